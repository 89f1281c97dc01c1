"""Small pieces of the page that several sections use."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def figure(title: str, picture: str, caption: str, legend: Mapping[str, str] | None = None) -> str:
    """A picture with its heading; `legend` maps a style of the marks to its name."""
    below = f"<figcaption>{escape(caption)}</figcaption>"
    return f"<figure><h4>{escape(title)}</h4>{_legend(legend or {})}{picture}{below}</figure>"


def missing(what: str, remedy: str) -> str:
    """In place of a picture that cannot be drawn: why, and how to get it."""
    return f'<p class="card muted missing">{escape(what)}; to get it, {marked(remedy)}.</p>'


def marked(text: str) -> str:
    """Text with what stands between backticks as code."""
    pieces = [escape(piece) for piece in text.split("`")]
    return "".join(f"<code>{piece}</code>" if k % 2 else piece for k, piece in enumerate(pieces))


def _legend(names: Mapping[str, str]) -> str:
    if not names:
        return ""
    items = "".join(
        f'<li><svg viewBox="0 0 26 12" aria-hidden="true"><polyline class="line {style}" points="0,6 26,6"/>'
        f'<circle class="dot {style}" cx="13" cy="6" r="3.4"/></svg>{escape(name)}</li>'
        for style, name in names.items()
    )
    return f'<ul class="legend">{items}</ul>'
