"""Studies with a folder for each variant in docs/results.md: a table, and every seed in a picture.

The variants of a recipe are held to one baseline: `vit-cifar100-32-stable` is one of `vit-cifar100-32`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from batchformer.metrics.measures import Measure
from batchformer.report.charts import Chart
from batchformer.report.comparison import compare_runs, format_difference
from batchformer.report.figures import seeds_chart
from batchformer.report.health import number, series
from batchformer.report.provenance import caveats, facts, loss_factor
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, summarise
from benchmarks._chart_files import chart_svg
from benchmarks._gain import Gain, mean_of
from benchmarks._markdown import markdown, one_digit
from benchmarks.paper import ABLATIONS, MAIN, Ablation
from benchmarks.studies import STUDIES

CAPTION = "A ring is a seed, the bar their mean; dotted: the mean of the baseline."
IN_FOLDERS = {name: study for name, study in STUDIES.items() if study.setting}
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
        return mean_of(self.by_seed(measure))


@dataclass(frozen=True)
class TrainedStudy:
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
        reference, measure = reference or self.reference, measure or self.primary
        if reference is None or variant is reference:
            return None
        return Gain(measure, reference.by_seed(measure), variant.by_seed(measure)).difference


def held_to(study: TrainedStudy) -> list[tuple[Variant, Variant]]:
    """Variants, each with the one it is held to beside the study's baseline, where both were run."""
    named = {variant.name: variant for variant in study.variants}
    pairs = IN_FOLDERS[study.base].held_to.items() if study.base in IN_FOLDERS else ()
    return [(named[name], named[other]) for name, other in pairs if name in named and other in named]


def missing_from(study: TrainedStudy) -> list[str]:
    """What an own study still lacks, in words: variants it compares and nobody has trained, and seeds."""
    pairs = IN_FOLDERS[study.base].held_to if study.base in IN_FOLDERS else {}
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


def find_studies(recipes: Mapping[str, Sequence[Run]]) -> list[TrainedStudy]:
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
            studies.append(TrainedStudy(base, ordered, reference))
    return studies


def base_of(recipe: str) -> str | None:
    """The recipe this one is a variant of (itself, where it has variants by name), None for any other."""
    if recipe in MAIN or recipe in IN_FOLDERS:
        return recipe
    bases = [base for base in (*MAIN, *IN_FOLDERS) if recipe.startswith(base + "-")]
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


def study_section(study: TrainedStudy) -> str:
    """One table of all variants: accuracy, difference to the baseline, both training losses at the end, cost."""
    lines = [f"## Study: {study.base}", "", _what(study.base), ""]
    measures = measures_of_study(study)
    extra = {name: read for name, read in _EXTRA.items() if any(read(each.runs) != "–" for each in study.variants)}
    header = [
        "variant",
        "method",
        "seeds",
        *(measure.label for measure in measures),
        "difference to the baseline",
        *extra,
    ]
    table = [
        [
            f"`{variant.name or variant.recipe}`",
            variant.method,
            str(len(variant.runs)),
            *(variant.summary(measure) for measure in measures),
            "the baseline" if variant is study.reference else format_difference(study.difference(variant)),
            *(read(variant.runs) for read in extra.values()),
        ]
        for variant in study.variants
    ]
    lines += [markdown(header, table), "", _reading(study, study.primary.label, list(extra)), ""]
    if missing := missing_from(study):
        lines += [f"This study is not finished: {'; '.join(missing)}.", ""]
    lines += _pairs(study, measures)
    if study_chart(study) is not None:
        lines += [f"![Every seed of every variant]({picture_name(study)})", "", CAPTION, ""]
    for variant in study.variants:
        told = dict(facts(variant.runs))
        words = "; ".join(told[key] for key in ("Settings", "Length", "Device") if key in told)
        lines.append(f"- `{variant.recipe}`, {variant.method}: {words}")
        base = study.reference.runs if study.reference is not None and variant is not study.reference else ()
        careful = [*(differs_from(base, variant.runs) if base else ()), *caveats(variant.runs)]
        lines += [f"  - Read with care: {text}" for text in careful]
    return "\n".join(lines) + "\n"


def _what(base: str) -> str:
    paper = MAIN.get(base)
    if paper is None:
        return f"{IN_FOLDERS[base].setting}. Not in the paper."
    sides = [
        one_digit(None if side is None else next(iter(side.values()))) for side in (paper.baseline, paper.batchformer)
    ]
    return f"{paper.setting}; paper ({paper.table}): {sides[0]} without, {sides[1]} with."


def measures_of_study(study: TrainedStudy) -> tuple[Measure, ...]:
    """Those that a run of the study has, the primary one first."""
    found = {
        measure.key: measure
        for variant in study.variants
        for measure in compare_runs([run.raw for run in variant.runs]).measures
    }
    return tuple(found.values())


def _reading(study: TrainedStudy, metric: str, columns: Sequence[str]) -> str:
    if study.reference is None:
        return "No baseline was run, so there is no difference to give."
    told = f"The difference is in {metric}, over matched seeds, with its 95 % interval."
    if "loss, related" in columns:
        told += (
            " Plain and related: the training loss of each stream in the last epoch (a related loss at the logarithm "
            "of the number of classes is chance)."
        )
    if "change, least" in columns:
        told += (
            " Measured after training, dropout off: by how much of their norm the module that changes them least "
            "changes the related tokens, and which share of the gradient of a sample's loss (sum of norms) falls on "
            "others."
        )
    return told


def _pairs(study: TrainedStudy, measures: Sequence[Measure]) -> list[str]:
    rows = [
        [
            f"`{variant.name}`",
            f"`{other.name}`",
            _EXTRA["epochs"](other.runs),
            *(
                cell
                for measure in measures
                for cell in (other.summary(measure), format_difference(study.difference(variant, other, measure)))
            ),
        ]
        for variant, other in held_to(study)
    ]
    if not rows:
        return []
    header = ["variant", "held to", "its epochs"]
    header += [words for label in (m.label for m in measures)
               for words in (f"its {label}", f"difference to it, {label}")]  # fmt: skip
    return [IN_FOLDERS[study.base].held_to_words, "", markdown(header, rows), ""]


def _told(
    one_of: Callable[[Sequence[float]], float], runs: Sequence[Run], part: Callable[[Run], float | None], form: str
) -> str:
    values = [value for run in runs if (value := part(run)) is not None]
    return format(one_of(values), form) if values else "–"


def _last_loss(stream: str) -> Callable[[Run], float | None]:
    return lambda run: next((value for value in reversed(run.streams.get(stream, [])) if value is not None), None)


def _least_change(run: Run) -> float | None:
    changes = [value for value in series(run.health.get("points", []), "change_quiet") if value is not None]
    return min(changes, default=None)


def _share_on_others(run: Run) -> float | None:
    return number(run.health, "gradient_on_others", "quiet", "norm_share")


def _number(key: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.raw.get(key)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    return read


_EXTRA: dict[str, Callable[[Sequence[Run]], str]] = {
    "loss, plain": lambda runs: _told(fmean, runs, _last_loss("plain_loss"), ".2f"),
    "loss, related": lambda runs: _told(fmean, runs, _last_loss("related_loss"), ".2f"),
    "change, least": lambda runs: _told(fmean, runs, _least_change, ".1%"),
    "gradient on others": lambda runs: _told(fmean, runs, _share_on_others, ".1%"),
    "epochs": lambda runs: _told(fmean, runs, _number("epochs"), ".0f"),
    # no waiting for a turn in it; the median, as a run that shared the card says little about the others
    "images/s, median": lambda runs: _told(median, runs, _number("images_per_s"), ",.0f"),
}


def study_chart(study: TrainedStudy) -> tuple[Chart, str] | None:
    """A row of rings for each variant, and the means in words; None where there is nothing to compare."""
    measure = study.primary
    found = [(variant, seeds) for variant in study.variants if (seeds := variant.by_seed(measure))]
    if len(found) < 2:
        return None
    names = [variant.name or variant.method for variant, _ in found]
    rows = {name: seeds for name, (_, seeds) in zip(names, found, strict=True)}
    reference = next((name for name, (v, _) in zip(names, found, strict=True) if v is study.reference), None)
    words = [f"{name} {summarise(list(of.values())).mean:.2f} {measure.unit}".rstrip() for name, of in rows.items()]
    return seeds_chart("seeds", rows, measure, reference), "; ".join(words)


def study_picture(study: TrainedStudy) -> str | None:
    """As a file of its own, for pages that are Markdown."""
    drawn = study_chart(study)
    return None if drawn is None else chart_svg(drawn[0], f"Every seed of the study {study.base}", drawn[1])


def picture_name(study: TrainedStudy) -> str:
    return f"study-{study.base}.svg"
