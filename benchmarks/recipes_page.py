"""The tables of docs/recipes.md, written from what the recipe files say about themselves.

Everything outside the two markers is written by hand and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchformer.metrics import measures
from batchformer.recipes import About, PaperRow, about, find_recipe, read_recipe, recipe_groups, recipe_names
from benchmarks._markdown import between_markers, markdown

BEGIN = "<!-- recipes: written by python -m benchmarks.pages recipes -->"
END = "<!-- end of recipes -->"
SETTINGS = {  # column -> where a recipe says it
    "epochs": ("trainer", "max_epochs"),
    "batch": ("data", "init_args", "batch_size"),
    "learning rate": ("model", "optimizer", "lr"),
    "weight decay": ("model", "optimizer", "weight_decay"),
    "loss over the streams": ("model", "stream_loss"),
    "augmentation": ("data", "init_args", "augment"),
}
_KNOWN = (measures.LONG_TAILED, measures.CLASSIFICATION, measures.DETECTION, measures.PANOPTIC)
LABELS = {measure.key: measure.label for family in reversed(_KNOWN) for measure in family}
INTRODUCTION_OF_NUMBERS = """\
Of rows with more than one measure, without → with BatchFormer; what we measured stands beside them in
[results](results.md)."""


def recipes_tables() -> str:
    """One table for each group, then all numbers of the papers' rows that have more than one."""
    parts = []
    for group, names in recipe_groups().items():
        header = ["recipe", "", "data", *SETTINGS, "paper"]
        parts.append(f"## {group}\n\n{_table(header, [_settings_row(name) for name in names])}")
    parts.append(f"## The papers' numbers\n\n{INTRODUCTION_OF_NUMBERS}")
    for keys, names in _by_measures().items():
        header = ["recipe", "table", "row", *(LABELS.get(key, key.replace("_", " ")) for key in keys)]
        parts.append(_table(header, [_numbers_row(name, keys) for name in names]))
    return "\n\n".join(parts)


def _settings_row(name: str) -> list[str]:
    described, recipe = about(name), read_recipe(find_recipe(name)[1])
    *settings, augmentation = (_written(_look_up(recipe, path)) for path in SETTINGS.values())
    if isinstance(views := _look_up(recipe, ("data", "init_args", "views")), list):
        augmentation = ", ".join(dict.fromkeys(views))
    row = [_link(name), described.title, described.needs or "embedded", *settings, augmentation]
    return [*row, _paper_cell(described)]


def _look_up(recipe: Any, path: Sequence[str]) -> Any:
    for key in path:
        recipe = recipe.get(key) if isinstance(recipe, dict) else None
    return recipe


def _written(value: Any) -> str:
    if value is None:
        return "default"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _paper_cell(described: About) -> str:
    paper = described.paper
    return "" if paper is None else f"{paper.table}: {_change(paper, _keys(paper)[0])}"


def _by_measures() -> dict[tuple[str, ...], list[str]]:
    """The recipes of rows with several measures, by the measure that leads; the columns are all measures of these."""
    keys = {name: _keys(paper) for name in recipe_names() if (paper := about(name).paper) is not None}
    found: dict[tuple[str, ...], list[str]] = {}
    for first in dict.fromkeys(known[0] for known in keys.values()):
        names = [name for name, known in keys.items() if known[0] == first and len(known) > 1]
        found[tuple(dict.fromkeys(key for name in names for key in keys[name]))] = names
    return found


def _numbers_row(name: str, keys: Sequence[str]) -> list[str]:
    paper = about(name).paper
    assert paper is not None
    return [_link(name), paper.table, paper.row, *(_change(paper, key) for key in keys)]


def _keys(paper: PaperRow) -> list[str]:
    return list(dict.fromkeys(key for numbers in paper.numbers.values() for key in numbers))


def _change(paper: PaperRow, key: str) -> str:
    """The number of each variant in turn; a dash where the paper has none."""
    values = [numbers.get(key) for numbers in paper.numbers.values()]
    if all(value is None for value in values):
        return ""
    return " → ".join("–" if value is None else f"{value:.1f}" for value in values)


def _link(name: str) -> str:
    return f"[`{name}`](../src/batchformer/recipes/{name}.yaml)"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(header, [[text.replace("<", "&lt;") for text in cells] for cells in rows], right=False)


def pages(root: Path) -> dict[Path, str]:
    """The page with the tables between the markers; everything outside stays."""
    page = root / "docs" / "recipes.md"
    return {page: between_markers(page.read_text(encoding="utf-8"), f"\n{recipes_tables()}\n", page.name, BEGIN, END)}
