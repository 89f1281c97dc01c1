"""The table of `compare`: with and without the method, seeds matched, difference with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchformer.errors import UserError
from batchformer.report.measures import ALL_CLASSES, TOP, measure_of, named_by
from batchformer.report.statistics import PairedDifference, Summary, paired_difference, summarise

METRICS = ALL_CLASSES.metrics
TOP_METRICS = TOP.metrics
_WHERE_THERE_ARE = {"top1_ema": "Top-1, EMA", "many": "Many", "medium": "Medium", "few": "Few"}
METHODS = ("baseline", "batchformer")


@dataclass(frozen=True)
class ComparisonRow:
    """One metric of one recipe. A side without runs is None; `difference` is over `paired_seeds` only."""

    metric: str
    label: str
    baseline: Summary | None
    batchformer: Summary | None
    difference: PairedDifference | None
    baseline_seeds: tuple[int, ...]
    batchformer_seeds: tuple[int, ...]
    paired_seeds: tuple[int, ...]


def comparison_table(results: Iterable[Mapping[str, Any]]) -> list[ComparisonRow]:
    """Rows of `metrics_of` from the contents of `result.json` files of one recipe.

    Seeds are matched between the methods; a metric that a run does not have (no class in that split) is left out.
    """
    results = list(results)
    recipes = sorted({str(result.get("recipe")) for result in results})
    if len(recipes) > 1:
        raise UserError(f"one table compares runs of one recipe, got {', '.join(recipes)}: compare them one by one")
    return [_row(metric, label, results) for metric, label in metrics_of(results).items()]


def metrics_of(results: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Which metrics these results are about: see `measures`.

    Image classification on a long tail has Top-1 and Top-5 and also Many, Medium, Few; its `all` is the top-1 accuracy.
    """
    metrics = [result["metrics"] for result in results]
    measure = measure_of(metrics)
    if measure.objects:
        found = {key for each in metrics for key, value in each.items() if _known(value)}
        return {key: label for key, label in measure.metrics.items() if key == "all" or key in found}
    if measure is not TOP:
        return METRICS
    more = {key: label for key, label in _WHERE_THERE_ARE.items() if any(_known(each.get(key)) for each in metrics)}
    return {**TOP_METRICS, **more}


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def by_seed(results: Iterable[Mapping[str, Any]], method: str, metric: str) -> dict[int, float]:
    """Seed -> value of one metric for one method, in the order of the seeds."""
    values: dict[int, float] = {}
    for result in results:
        if result["method"] != method:
            continue
        seed, value = result["seed"], result["metrics"].get(metric)
        if value is None or not math.isfinite(value):
            continue
        if seed in values:
            raise UserError(
                f"two runs of recipe {result.get('recipe')!r} have method {method} and seed {seed}: "
                "pass only one of them"
            )
        values[seed] = float(value)
    return dict(sorted(values.items()))


def _row(metric: str, label: str, results: Sequence[Mapping[str, Any]]) -> ComparisonRow:
    baseline, batchformer = (by_seed(results, method, metric) for method in METHODS)
    paired = tuple(seed for seed in baseline if seed in batchformer)
    return ComparisonRow(
        metric=metric,
        label=label,
        baseline=summarise(list(baseline.values())) if baseline else None,
        batchformer=summarise(list(batchformer.values())) if batchformer else None,
        difference=paired_difference([baseline[s] for s in paired], [batchformer[s] for s in paired])
        if paired
        else None,
        baseline_seeds=tuple(baseline),
        batchformer_seeds=tuple(batchformer),
        paired_seeds=paired,
    )


def format_summary(summary: Summary | None) -> str:
    """`49.53 ± 0.34`; without deviation for one seed; a dash for none."""
    if summary is None:
        return "–"
    return f"{summary.mean:.2f}" if summary.sd is None else f"{summary.mean:.2f} ± {summary.sd:.2f}"


def format_difference(difference: PairedDifference | None) -> str:
    """`+0.49 [-0.12, +1.10]`; `+0.49 (one seed)` where there is no interval."""
    if difference is None:
        return "–"
    return f"{signed(difference.mean)} {format_interval(difference)}"


def format_interval(difference: PairedDifference) -> str:
    if difference.low is None or difference.high is None:
        return "(one seed)"
    return f"[{signed(difference.low)}, {signed(difference.high)}]"


def signed(value: float, digits: int = 2) -> str:
    """With its sign, and with a real minus; what rounds to zero has no sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text


def format_table(rows: Sequence[ComparisonRow]) -> str:
    """The same table as plain text for a terminal."""
    header = (f"{named_by(rows[0].label).short}, %", "baseline", "batchformer", "difference [95 % interval]")
    body = [
        (row.label, format_summary(row.baseline), format_summary(row.batchformer), format_difference(row.difference))
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (header, *body)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(header), "  ".join("─" * width for width in widths), *(line(cells) for cells in body)])
