"""Tables in Markdown, and their place in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchformer.errors import UserError

BEGIN, END = "<!-- results -->", "<!-- /results -->"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], right: bool = True) -> str:
    """A table: the first column to the left, the others to the right, unless they are words."""
    rule = ["---"] + ["---:" if right else "---"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(cell, cells)) + " |" for cells in (header, rule, *lines))


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def between_markers(text: str, table: str, name: str, begin: str = BEGIN, end: str = END) -> str:
    """The text of the page called `name` with the table between the markers; everything outside stays."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{name} must have {begin} and, after it, {end}, each once: the table goes between them.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def with_results(page: Path, table: str) -> str:
    """The text of this page with the table in it."""
    return between_markers(page.read_text(encoding="utf-8"), table, page.name)


def one_digit(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
