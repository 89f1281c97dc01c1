"""The pictures of the report. Each function returns an SVG, or None where the runs lack what it needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from batchformer.metrics.shots import FEW_BELOW, MANY_ABOVE
from batchformer.report.charts import Chart
from batchformer.report.classes import (
    ClassGroup,
    class_ranks,
    difference_per_group,
    mean_per_group,
    sorted_groups,
    split_borders,
)
from batchformer.report.comparison import METHODS, ComparisonRow, signed
from batchformer.report.measures import named_by
from batchformer.report.runs import Run
from batchformer.report.scales import Axis, count_axis, frequency_axis, linear_axis, smooth, thin
from batchformer.report.statistics import RankCorrelation, spearman

NAMES = {"baseline": "baseline", "batchformer": "BatchFormer"}
_MOST_EPOCHS = 240


def difference_chart(name: str, rows: Sequence[ComparisonRow]) -> str | None:
    """Paired difference of each metric as a dot with its interval, against the line of no difference."""
    drawn = [(row, row.difference) for row in rows if row.difference is not None]
    if not drawn:
        return None
    values = [v for _, difference in drawn for v in difference if v is not None]
    room = 0.1 * max(map(abs, values))  # the line of no difference is never the frame
    x = linear_axis([*values, room, -room], f"difference in {named_by(rows[0].label).short}, percentage points")
    height = len(drawn)
    y = Axis(0, height, [(height - k - 0.5, row.label) for k, (row, _) in enumerate(drawn)])
    widest = max(len(row.label) for row, _ in drawn)
    chart = Chart(name, x, y, left=max(64, 8 * widest + 16), height=90 + 40 * height)
    for k, (row, difference) in enumerate(drawn):
        level = height - k - 0.5
        if difference.low is not None and difference.high is not None:
            chart.segment((difference.low, level), (difference.high, level), "whisker batchformer")
        tip = f"{row.label}: {signed(difference.mean)} points"
        chart.dots([(difference.mean, level)], "batchformer", [tip], radius=6)
    spoken = "; ".join(f"{row.label} {signed(difference.mean)}" for row, difference in drawn)
    return chart.svg("Difference BatchFormer minus baseline with 95 % interval", spoken)


def curve_chart(
    name: str, runs: Sequence[Run], key: str, label: str, skip_start: bool = False
) -> tuple[str, bool] | None:
    """One quantity over the epochs: mean of the seeds as a line, smallest to largest seed as a band.

    Beside the picture whether it leaves out a steep start, which only `skip_start` lets it do.
    """
    whole = {method: _curve([run for run in runs if run.method == method], key) for method in METHODS}
    values = [v for curve in whole.values() for _, seeds in curve for v in seeds]
    epochs = [epoch for curve in whole.values() for epoch, _ in curve]
    if not values:
        return None
    floor = _end_of_steep_start(values) if skip_start else min(values)
    chart = Chart(name, count_axis(epochs, "epoch"), linear_axis([v for v in values if v >= floor], label))
    curves = {
        method: [(epoch, seeds) for epoch, seeds in curve if min(seeds) >= chart.y.low]
        for method, curve in whole.items()
    }
    for method, curve in curves.items():
        chart.band([(e, min(v)) for e, v in curve], [(e, max(v)) for e, v in curve], method)
    for method, curve in curves.items():
        chart.line([(e, math.fsum(v) / len(v)) for e, v in curve], method)
    ends = [f"{NAMES[m]} ends at {math.fsum(c[-1][1]) / len(c[-1][1]):.2f}" for m, c in curves.items() if c]
    return chart.svg(f"{label} over the epochs", "; ".join(ends)), curves != whole


def class_accuracy_chart(name: str, runs: Sequence[Run]) -> str | None:
    """Accuracy of each class against how often it was seen in training, with and without the method."""
    groups = sorted_groups([run for run in runs if run.per_class])
    if not groups:
        return None
    chart = Chart(
        name,
        frequency_axis([group.count for group in groups], "training images of the class (log)"),
        linear_axis([0, 100], "accuracy, %"),
    )
    _draw_frequency_borders(chart)
    for method in METHODS:
        means = mean_per_group([run for run in runs if run.method == method], groups, lambda run: run.per_class)
        known = [(group, mean) for group, mean in zip(groups, means, strict=True) if mean is not None]
        tips = [f"{group.name}: {mean:.1f} % ({NAMES[method]}), {group.count:.0f} images" for group, mean in known]
        chart.dots([(max(1.0, g.count), mean) for g, mean in known], method, tips, radius=2.6)
        if len(known) > 20:
            trend = smooth([mean for _, mean in known], len(known) / 16)
            chart.line([(max(1.0, g.count), v) for (g, _), v in zip(known, trend, strict=True)], f"{method} trend")
    return chart.svg(
        "Accuracy per class against training frequency",
        f"{len(groups)} points per method, frequent classes on the left, mean over the seeds.",
    )


def class_difference_chart(name: str, runs: Sequence[Run]) -> str | None:
    """Difference of the accuracies in about ten bins of classes, from frequent to rare."""
    groups = sorted_groups([run for run in runs if run.per_class], most=10)
    bins = [(g, d) for g, d in zip(groups, difference_per_group(runs, groups), strict=True) if d is not None]
    if not bins:
        return None
    values = [v for _, difference in bins for v in difference if v is not None]
    x = Axis(
        0,
        len(bins),
        [(k + 0.5, f"{group.count:.0f}") for k, (group, _) in enumerate(bins)],
        "training images per class",
    )
    chart = Chart(name, x, linear_axis(values, "difference, points", include_zero=True))
    for k, (group, difference) in enumerate(bins):
        tip = f"{group.name}, about {group.count:.0f} training images: {signed(difference.mean, 1)} points"
        chart.bar(k + 0.14, k + 0.86, difference.mean, "up" if difference.mean >= 0 else "down", tip)
        if difference.low is not None and difference.high is not None:
            chart.segment((k + 0.5, difference.low), (k + 0.5, difference.high), "whisker")
    many, medium = split_borders([group for group, _ in bins])
    _draw_rank_borders(chart, many, medium, len(bins), 0)
    spoken = ", ".join(f"{signed(difference.mean, 1)}" for _, difference in bins)
    return chart.svg("Difference in accuracy by class frequency", f"From frequent to rare classes: {spoken}.")


def influence_chart(name: str, runs: Sequence[Run]) -> str | None:
    """The paper's Fig. 6: gradient norm of each class's loss on the other images, classes by descending frequency."""
    related = [run for run in runs if run.influence and run.class_counts]
    groups = sorted_groups(related)
    norms = mean_per_group(related, groups, lambda run: run.influence)
    known = [(rank, g, v) for rank, g, v in zip(class_ranks(groups), groups, norms, strict=True) if v is not None]
    if not known:
        return None
    classes = sum(len(group.members) for group in groups)
    ranks = [rank for rank, _, _ in known]
    y = linear_axis([v for _, _, v in known], "gradient norm on the others", include_zero=True)
    chart = Chart(name, count_axis([1.0, float(classes)], "class, from frequent to rare"), y)
    many, medium = (sum(len(group.members) for group in groups[:border]) for border in split_borders(groups))
    _draw_rank_borders(chart, many, medium, classes, 1)
    tips = [f"{group.name}: {value:.4g}, {group.count:.0f} training images" for _, group, value in known]
    chart.dots([(rank, value) for rank, _, value in known], "batchformer", tips, radius=2.8)
    if len(known) > 4:
        trend = smooth([value for _, _, value in known], max(1.0, len(known) / 14))
        chart.line(list(zip(ranks, trend, strict=True)), "trend batchformer")
    return chart.svg(
        "Gradient norm of each class's loss on the other images of the batch (Fig. 6 of the paper)",
        f"{len(known)} points, classes sorted by descending training frequency, with a smoothed trend.",
    )


def influence_correlation(runs: Sequence[Run]) -> RankCorrelation | None:
    """Spearman correlation between how rare a class is and its gradient norm; the paper's claim is a positive one."""
    related = [run for run in runs if run.influence and run.class_counts]
    groups = sorted_groups(related, most=10**9)
    norms = mean_per_group(related, groups, lambda run: run.influence)
    known = [(-group.count, value) for group, value in zip(groups, norms, strict=True) if value is not None]
    return spearman([rarity for rarity, _ in known], [value for _, value in known])


def _curve(runs: Sequence[Run], key: str) -> list[tuple[float, list[float]]]:
    """(epoch, values of the seeds) where at least one seed has a value, thinned for drawing."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for entry in run.history:
            epoch, value = entry["epoch"], entry.get(key)
            if epoch is not None and value is not None:
                seen.setdefault(epoch + 1, []).append(value)
    epochs = sorted(seen)
    return [(epochs[k], seen[epochs[k]]) for k in thin(range(len(epochs)), _MOST_EPOCHS)]


def _end_of_steep_start(values: Sequence[float]) -> float:
    """Where the vertical axis may begin: the lowest fifth of the values would press the rest together."""
    return sorted(values)[len(values) // 5]


def _draw_frequency_borders(chart: Chart) -> None:
    low, high = chart.x.low, chart.x.high
    borders = [border for border in (MANY_ABOVE, FEW_BELOW) if low < border < high]
    for border in borders:
        chart.divider(border)
    edges = [high, *borders, low]
    for left, right in itertools.pairwise(edges):
        middle = math.sqrt(left * right)
        chart.heading(middle, "Many" if middle > MANY_ABOVE else "Few" if middle < FEW_BELOW else "Medium")


def _draw_rank_borders(chart: Chart, many: int, medium: int, total: int, first: int) -> None:
    """Borders between the splits where the axis counts classes or bins; `first` is the number of the first one."""
    shift = first - 0.5 if first else 0.0
    for border in {many, medium} - {0, total}:
        chart.divider(border + shift)
    for start, end, word in ((0, many, "Many"), (many, medium, "Medium"), (medium, total, "Few")):
        if end > start:
            chart.heading((start + end) / 2 + shift, word)


__all__ = [
    "NAMES",
    "ClassGroup",
    "class_accuracy_chart",
    "class_difference_chart",
    "curve_chart",
    "difference_chart",
    "influence_chart",
    "influence_correlation",
]
