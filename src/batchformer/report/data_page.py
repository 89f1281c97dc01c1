"""data-check.html: what a check of a data set found, one file that opens offline."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from batchformer.report.html_parts import marked, plain_table
from batchformer.report.page import whole_page

MADE_BY = "Made by <code>batchformer data --check</code>"
_OPEN = 20  # findings of a kind that are shown at once; the others unfold
_MOST = 2000  # and of those


def render_check(recipe: str, check: Mapping[str, Any], kinds: Mapping[str, tuple[str, bool, str]], next_: str) -> str:
    """The page as text. `check`: what `Check.as_dict` gives; `kinds`: title, whether it is an error, and the remedy."""
    errors = check["errors"]
    tone, word = ("hurt", "To fix") if errors else ("helped", "No problems found")
    told = f"{errors:,} {'error' if errors == 1 else 'errors'}. " if errors else "No errors. "
    verdict = f'<div class="card verdict {tone}"><strong>{word}</strong>{escape(told)}{marked(next_)}</div>'
    found = "".join(_finding(*kinds[kind], lines) for kind, lines in check["findings"].items())
    images = sum(check["sets"].values())
    lede = f"{images:,} images in {check['root']}, each read once."
    sections = f'<section class="recipe">{verdict}{_numbers(check)}{found}{_classes(check["class_counts"])}</section>'
    return whole_page(f"The data of {recipe}", lede, sections, footer=f"{MADE_BY}.")


def _numbers(check: Mapping[str, Any]) -> str:
    size = check["image_size"]
    rows = [(f"images in {name}", f"{count:,}") for name, count in check["sets"].items()]
    for name in ("widths", "heights"):
        low, middle, high = check[name]
        rows.append((f"{name.removesuffix('s')} in pixels", f"{low:,} to {high:,}, median {middle:,}"))
    rows += [("channels", ", ".join(f"{mode}: {count:,}" for mode, count in check["modes"].items()))]
    rows += [(f"smaller than image_size ({size})", f"{check['smaller']:,}")] if size else []
    rows += [("rotated by their EXIF orientation", f"{check['turned']:,}")] if check["turned"] else []
    return f'<div class="card"><dl>{"".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in rows)}</dl></div>'


def _finding(title: str, error: bool, remedy: str, lines: Sequence[str]) -> str:
    mark = "error" if error else "note"
    head = f"<h3>{escape(title)}: {len(lines):,}</h3><p class='explain'>{mark}; {marked(remedy)}</p>"
    shown, more = lines[:_OPEN], lines[_OPEN:_MOST]
    rest = f"<details><summary>{len(lines) - _OPEN:,} more</summary>{_lines(more)}</details>" if more else ""
    cut = f"<p class='explain'>{len(lines) - _MOST:,} more are in data-check.json.</p>" if len(lines) > _MOST else ""
    return f'{head}<div class="card">{_lines(shown)}{rest}{cut}</div>'


def _lines(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _classes(counts: Mapping[str, int]) -> str:
    rows = [(name, f"{count:,}") for name, count in sorted(counts.items(), key=lambda each: -each[1])]
    table = plain_table(["class", "in training"], rows)
    return f"<h3>Classes: {len(rows):,}</h3><details><summary>images per class</summary>{table}</details>"
