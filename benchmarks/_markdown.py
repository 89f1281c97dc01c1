"""Tables in Markdown, and their place in a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchformer.errors import UserError


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], right: bool = True) -> str:
    """A table: the first column to the left, the others to the right, unless they are words."""
    rule = ["---"] + ["---:" if right else "---"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(cell, cells)) + " |" for cells in (header, rule, *lines))


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def between_markers(text: str, table: str, begin: str, end: str, name: str) -> str:
    """The text of the page called `name` with the table between the markers; everything outside stays."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{name} must have {begin} and, after it, {end}, each once: the table goes between them.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def one_digit(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
