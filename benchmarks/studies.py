"""Variants of one recipe, each held to the same baseline: `vit-cifar100-32-stable` is one of `vit-cifar100-32`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchformer.metrics.measures import Measure
from batchformer.report.comparison import format_summary
from batchformer.report.provenance import loss_factor
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, paired_difference, summarise
from benchmarks.paper import ABLATIONS, MAIN, STUDIES, Ablation

WANTED_SEEDS = 3  # with fewer no deviation is worth printing, and a study says that it is not finished


@dataclass(frozen=True)
class Variant:
    """The runs of one recipe name, with or without the module; `name` is what follows the name of the study."""

    name: str
    recipe: str
    method: str
    runs: Sequence[Run]

    def by_seed(self, measure: Measure) -> dict[int, float]:
        """Seed -> value of the measure, where the run has it."""
        found = {run.seed: run.metrics.get(measure.key) for run in self.runs}
        return {seed: value for seed, value in sorted(found.items()) if value is not None}

    def summary(self, measure: Measure) -> str:
        """Mean ± deviation over the seeds."""
        values = list(self.by_seed(measure).values())
        return format_summary(summarise(values) if values else None)


@dataclass(frozen=True)
class Study:
    """`reference`: the variant the others are held to, None where no baseline was run."""

    base: str
    variants: Sequence[Variant]
    reference: Variant | None

    @property
    def primary(self) -> Measure:
        return self.variants[0].runs[0].primary

    def difference(
        self, variant: Variant, reference: Variant | None = None, measure: Measure | None = None
    ) -> PairedDifference | None:
        """The primary measure, or the one given, minus that of the reference (the study's own), seeds matched."""
        reference = reference or self.reference
        if reference is None or variant is reference:
            return None
        before, after = (each.by_seed(measure or self.primary) for each in (reference, variant))
        seeds = [seed for seed in before if seed in after]
        return paired_difference([before[s] for s in seeds], [after[s] for s in seeds]) if seeds else None


def held_to(study: Study) -> list[tuple[Variant, Variant]]:
    """Variants, each with the one it is held to beside the study's baseline, where both were run."""
    named = {variant.name: variant for variant in study.variants}
    pairs = STUDIES[study.base].held_to.items() if study.base in STUDIES else ()
    return [(named[name], named[other]) for name, other in pairs if name in named and other in named]


def missing_from(study: Study) -> list[str]:
    """What an own study still lacks, in words: variants it compares and nobody has trained, and seeds."""
    pairs = STUDIES[study.base].held_to if study.base in STUDIES else {}
    if not pairs:
        return []
    trained = {variant.name: len(variant.runs) for variant in study.variants}
    untrained = [name for name in dict.fromkeys(["baseline", *pairs.values(), *pairs]) if name not in trained]
    most = max(WANTED_SEEDS, *trained.values())
    told = [f"not trained yet {_names(untrained)}"] if untrained else []
    short = sorted({count for count in trained.values() if count < most})
    return told + [
        f"{few} of {most} seeds of {_names(n for n, count in trained.items() if count == few)}" for few in short
    ]


def _names(variants: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in variants)


def find_studies(recipes: Mapping[str, Sequence[Run]]) -> list[Study]:
    """Studies among the recipes, in the order of their names.

    A recipe of a paper's table is never a variant of another, however its name begins, and an ablation that has its
    own table in BatchFormer's paper stands beside that one instead.
    """
    groups: dict[str, list[Variant]] = {}
    for recipe, runs in recipes.items():
        base = base_of(recipe)
        if base is None or ablation_of(recipe, runs) is not None:
            continue
        for method in dict.fromkeys(run.variant for run in runs):
            mine = [run for run in runs if run.variant == method]
            groups.setdefault(base, []).append(Variant(recipe.removeprefix(base).lstrip("-"), recipe, method, mine))
    studies = []
    for base, variants in sorted(groups.items()):
        reference = _reference(base, variants)
        ordered = sorted(variants, key=lambda each: (each is not reference, natural(each.name), each.method))
        if any(each.recipe != base for each in variants):
            studies.append(Study(base, ordered, reference))
    return studies


def base_of(recipe: str) -> str | None:
    """The recipe this one is a variant of (itself, where it has variants by name), None for any other."""
    if recipe in MAIN or recipe in STUDIES:
        return recipe
    bases = [base for base in (*MAIN, *STUDIES) if recipe.startswith(base + "-")]
    return max(bases, key=len, default=None)


def ablation_of(recipe: str, runs: Sequence[Run]) -> Ablation | None:
    """The table of BatchFormer's paper that varies what the recipe's name says; those are about long tails."""
    if any(run.primary.key != "accuracy" for run in runs):
        return None
    for ablation in ABLATIONS:
        if any(re.fullmatch(rf"{re.escape(main)}-.*\b{ablation.suffix}\d*\b.*", recipe) for main in MAIN):
            return ablation
    return None


def differs_from(base: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    """What an ablation changes besides what it is named for: the scale of the loss, the number of updates."""
    found = []
    scales, wanted = ({loss_factor(run) for run in part} for part in (runs, base))
    if wanted and scales != wanted:
        found.append(
            f"Its loss is {_listed(scales)} times the mean over the rows, that of {base[0].recipe} {_listed(wanted)} "
            "times: part of any difference may be that."
        )
    steps, usual = ({run.raw.get("steps") for run in part} - {None} for part in (runs, base))
    if steps and usual and steps != usual:
        found.append(f"It makes {_listed(steps)} updates, {base[0].recipe} makes {_listed(usual)}.")
    return found


def _listed(numbers: set[Any]) -> str:
    return " or ".join(f"{number:,.6g}" if number < 1000 else f"{number:,}" for number in sorted(numbers))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key with numbers by value: batch64 before batch128."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _reference(base: str, variants: Sequence[Variant]) -> Variant | None:
    for name in (base, f"{base}-baseline"):
        for variant in variants:
            if variant.recipe == name and variant.method == "baseline":
                return variant
    return None
