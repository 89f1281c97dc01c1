"""The part of docs/results.md about the variants of one recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from batchformer.report.comparison import by_seed, format_difference, format_summary, metrics_of
from batchformer.report.health import number, series
from batchformer.report.markdown import markdown, one_digit
from batchformer.report.paper import MAIN, STUDIES
from batchformer.report.provenance import caveats, differs_from, facts
from batchformer.report.runs import Run
from batchformer.report.statistics import summarise
from batchformer.report.studies import Study, Variant, held_to, missing_from
from batchformer.report.study_figure import CAPTION, picture_name, study_picture


def study_section(study: Study) -> str:
    """One table of all variants: accuracy, difference to the baseline, both training losses at the end, cost."""
    lines = [f"## Study: {study.base}", "", _what(study.base), ""]
    runs = [run.raw for variant in study.variants for run in variant.runs]
    metrics = metrics_of(runs)
    extra = {name: read for name, read in _EXTRA.items() if any(read(each.runs) != "–" for each in study.variants)}
    header = ["variant", "method", "seeds", *metrics.values(), "difference to the baseline", *extra]
    table = [
        [
            f"`{variant.name or variant.recipe}`",
            variant.method,
            str(len(variant.runs)),
            *(accuracy(variant, metric) for metric in metrics),
            "the baseline" if variant is study.reference else format_difference(study.difference(variant)),
            *(read(variant.runs) for read in extra.values()),
        ]
        for variant in study.variants
    ]
    lines += [markdown(header, table), "", _reading(study, next(iter(metrics.values())), list(extra)), ""]
    if missing := missing_from(study):
        lines += [f"This study is not finished: {'; '.join(missing)}.", ""]
    lines += _pairs(study, metrics)
    if study_picture(study) is not None:
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
    sides = [one_digit(None if side is None else side.get("all")) for side in (paper.baseline, paper.batchformer)]
    return f"{paper.setting}; paper ({paper.table}): {sides[0]} without, {sides[1]} with."


def accuracy(variant: Variant, metric: str) -> str:
    """Mean ± deviation over the seeds."""
    values = by_seed([run.raw for run in variant.runs], variant.method, metric)
    return format_summary(summarise(list(values.values())) if values else None)


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


def _pairs(study: Study, metrics: Mapping[str, str]) -> list[str]:
    rows = [
        [
            f"`{variant.name}`",
            f"`{other.name}`",
            _EXTRA["epochs"](other.runs),
            *(
                cell
                for metric in metrics
                for cell in (accuracy(other, metric), format_difference(study.difference(variant, other, metric)))
            ),
        ]
        for variant, other in held_to(study)
    ]
    if not rows:
        return []
    header = ["variant", "held to", "its epochs"]
    header += [words for label in metrics.values() for words in (f"its {label}", f"difference to it, {label}")]
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
