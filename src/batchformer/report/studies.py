"""Variants of one recipe, each held to the same baseline: `vit-cifar100-32-stable` is one of `vit-cifar100-32`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from batchformer.report.comparison import by_seed
from batchformer.report.paper import ABLATIONS, MAIN, STUDIES, Ablation
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, paired_difference

WANTED_SEEDS = 3  # with fewer no deviation is worth printing, and a study says that it is not finished


@dataclass(frozen=True)
class Variant:
    """The runs of one recipe name and method; `name` is what follows the name of the study."""

    name: str
    recipe: str
    method: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Study:
    """`reference`: the variant the others are held to, None where no baseline was run."""

    base: str
    variants: Sequence[Variant]
    reference: Variant | None

    def difference(
        self, variant: Variant, reference: Variant | None = None, metric: str = "all"
    ) -> PairedDifference | None:
        """Accuracy minus that of the reference (the study's own, unless another is given), seeds matched."""
        reference = reference or self.reference
        if reference is None or variant is reference:
            return None
        before, after = (by_seed([run.raw for run in each.runs], each.method, metric) for each in (reference, variant))
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
        for method in dict.fromkeys(run.method for run in runs):
            mine = [run for run in runs if run.method == method]
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


def with_references(recipes: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """The recipes, where a variant without a baseline of its own borrows that of its study."""
    borrowed = {recipe: list(runs) for recipe, runs in recipes.items()}
    for study in find_studies(recipes):
        for variant in study.variants:
            runs = borrowed[variant.recipe]
            if study.reference is not None and all(run.method != "baseline" for run in runs):
                seeds = {run.seed for run in runs}
                lent = [run for run in study.reference.runs if run.seed in seeds]
                runs += [
                    replace(
                        run,
                        recipe=variant.recipe,
                        raw={**run.raw, "recipe": variant.recipe, "borrowed_from": run.recipe},
                    )
                    for run in lent
                ]
    return borrowed


def ablation_of(recipe: str, runs: Sequence[Run]) -> Ablation | None:
    """The table of BatchFormer's paper that varies what the recipe's name says; those are about long tails."""
    if any({"top1", "ap", "pq"} & run.metrics.keys() for run in runs):
        return None
    for ablation in ABLATIONS:
        if any(re.fullmatch(rf"{re.escape(main)}-.*\b{ablation.suffix}\d*\b.*", recipe) for main in MAIN):
            return ablation
    return None


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key with numbers by value: batch64 before batch128."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _reference(base: str, variants: Sequence[Variant]) -> Variant | None:
    for name in (base, f"{base}-baseline"):
        for variant in variants:
            if variant.recipe == name and variant.method == "baseline":
                return variant
    return None
