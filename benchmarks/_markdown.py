"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(cell, cells)) + " |" for cells in (header, rule, *lines))


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def one_digit(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
