"""docs/report.html: all studies of results/ on one page, an index of their verdicts above, each collapsed.

A study is one recipe with its variants, which `results/` keeps in folders of their own (`vit-cifar100-32-stable` is a
variant of `vit-cifar100-32`): here they are variants of one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchformer.report.page import render
from batchformer.report.runs import Run, by_recipe, load_runs
from benchmarks.study_section import base_of, natural

TITLE = "All studies"


def report_page(results: Path) -> str:
    """The page as text."""
    return render(as_studies(load_runs([results])), TITLE)


def pages(root: Path) -> dict[Path, str]:
    return {root / "docs" / "report.html": report_page(root / "results")}


def as_studies(runs: Sequence[Run]) -> list[Run]:
    """The runs with the name of their study as recipe, and what follows it in their own name as variant."""
    renamed, recipes = [], by_recipe(runs)
    for recipe, mine in recipes.items():
        base = base_of(recipe) or _of_another(recipe, recipes) or recipe
        suffix = recipe.removeprefix(base).strip("-")
        several = len({run.variant for run in mine}) > 1
        for run in mine:
            variant = " ".join(filter(None, [suffix, run.variant if several or not suffix else ""]))
            renamed.append(_renamed(run, base, variant))
    groups = by_recipe(renamed)
    ordered = []
    for recipe in sorted(groups):
        variants = {run.variant for run in groups[recipe]}
        reference = "baseline" if "baseline" in variants else groups[recipe][0].raw.get("reference")
        mine = sorted(
            groups[recipe],
            key=lambda run: (run.variant != reference, run.variant != "batchformer", natural(run.variant)),
        )
        ordered += [replace(run, raw={**run.raw, "reference": reference}) for run in mine]
    return ordered


def _of_another(recipe: str, recipes: Mapping[str, Sequence[Run]]) -> str | None:
    """The recipe whose baseline this one is held to, by its name: one that has no reference of its own."""
    mine = recipes[recipe]
    if {"baseline", mine[0].raw.get("reference")} & {run.variant for run in mine}:
        return None
    bases = [base for base in recipes if recipe.startswith(f"{base}-")]
    return min(bases, key=len, default=None)


def _renamed(run: Run, recipe: str, variant: str) -> Run:
    return replace(run, recipe=recipe, variant=variant, raw={**run.raw, "recipe": recipe, "variant": variant})
