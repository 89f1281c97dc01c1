"""The part of docs/results.md about the variants of one recipe: a table, and every seed in a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median

from batchformer.metrics.measures import Measure
from batchformer.report.charts import Chart
from batchformer.report.comparison import compare_runs, format_difference
from batchformer.report.figures import seeds_chart
from batchformer.report.health import number, series
from batchformer.report.provenance import caveats, facts
from batchformer.report.runs import Run
from batchformer.report.statistics import summarise
from benchmarks._chart_files import chart_svg
from benchmarks._markdown import markdown, one_digit
from benchmarks.paper import MAIN, STUDIES
from benchmarks.studies import Study, differs_from, held_to, missing_from

CAPTION = "A ring is a seed, the bar their mean; dotted: the mean of the baseline."


def study_section(study: Study) -> str:
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
        return f"{STUDIES[base].setting}. Not in the paper."
    sides = [
        one_digit(None if side is None else next(iter(side.values()))) for side in (paper.baseline, paper.batchformer)
    ]
    return f"{paper.setting}; paper ({paper.table}): {sides[0]} without, {sides[1]} with."


def measures_of_study(study: Study) -> tuple[Measure, ...]:
    """Those that a run of the study has, the primary one first."""
    found = {
        measure.key: measure
        for variant in study.variants
        for measure in compare_runs([run.raw for run in variant.runs]).measures
    }
    return tuple(found.values())


def _reading(study: Study, metric: str, columns: Sequence[str]) -> str:
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


def _pairs(study: Study, measures: Sequence[Measure]) -> list[str]:
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
    return [STUDIES[study.base].held_to_words, "", markdown(header, rows), ""]


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


def study_chart(study: Study) -> tuple[Chart, str] | None:
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


def study_picture(study: Study) -> str | None:
    """As a file of its own, for pages that are Markdown."""
    drawn = study_chart(study)
    return None if drawn is None else chart_svg(drawn[0], f"Every seed of the study {study.base}", drawn[1])


def picture_name(study: Study) -> str:
    return f"study-{study.base}.svg"
