"""Charts of a comparison: differences with their intervals, curves over the epochs, lines of a task's own section."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from batchformer.metrics.measures import Measure
from batchformer.report.charts import (
    HEIGHT,
    NO_BOUNDS,
    Axis,
    Bounds,
    Chart,
    count_axis,
    linear_axis,
    short_name,
    thin,
    variant_styles,
)
from batchformer.report.comparison import Comparison, measure_word, rows_word, shown_name, signed, with_unit
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference

EpochCurve = list[tuple[float, list[float]]]  # epochs, and the values of the seeds there
_MOST_EPOCHS = 240
_LONGEST_NAME = 22  # letters beside the axis; the whole name is in the tip


class DrawnCurve(NamedTuple):
    """A picture, and whether its axis leaves out a steep start."""

    svg: str
    start_left_out: bool


class DrawnDifferences(NamedTuple):
    """A picture, and whether it is much taller than a usual one."""

    svg: str
    tall: bool


def difference_chart(name: str, table: Comparison) -> DrawnDifferences | None:
    """Difference of each variant to the reference as a dot with its interval, against the line of no difference.

    A row for each measure that has unit and direction of the primary one; with targets, one for each of them and for
    their mean.
    """
    rows = _rows(table)
    drawn = [(label, variant, d) for label, found in rows.items() for variant, d in found.items()]
    if not drawn:
        return None
    measure = table.primary
    values, within = possible_differences([difference for *_, difference in drawn], measure)
    room = 0.1 * max(map(abs, values))  # keeps the line of no difference off the frame
    word = measure_word(measure) if table.targets or len(rows) == 1 else rows_word(table)
    label = with_unit(f"difference in {word}" if word else "difference", measure.points)
    x = linear_axis([*values, room, -room], label, within=within)
    height = len(rows)
    chart = chart_of_rows(name, x, list(rows), 90 + max(40, 13 * len(table.others)) * height)
    styles, digits = variant_styles(table.variants), table.digits(measure)
    for label, variant, difference in drawn:
        place = (table.others.index(variant) + 0.5) / len(table.others)
        level = height - list(rows).index(label) - 0.1 - 0.8 * place
        style = styles[variant]
        if difference.low is not None and difference.high is not None:
            chart.interval((difference.low, level), (difference.high, level), style)
        tip = f"{label}, {shown_name(variant)}: {signed(difference.mean, digits)} {measure.points}".rstrip()
        chart.dots([(difference.mean, level)], style, [tip], radius=6 if len(table.others) == 1 else 4.5)
    right_is_better = measure.gain(1.0) > 0
    chart.heading(x.high / 2 if right_is_better else x.low / 2, "better →" if right_is_better else "← better")
    spoken = "; ".join(
        f"{label} {'' if len(table.others) == 1 else variant + ' '}{signed(difference.mean, digits)}"
        for label, variant, difference in drawn
    )
    minus = f"{shown_name(table.others[0])} minus " if len(table.others) == 1 else "to "
    svg = chart.svg(f"Difference {minus}{table.reference} with 95 % interval", spoken)
    return DrawnDifferences(svg, chart.height > 1.5 * HEIGHT)


def seeds_chart(name: str, rows: Mapping[str, Mapping[int, float]], measure: Measure, reference: str | None) -> Chart:
    """A row of rings for each variant, one ring a seed, and a bar at their mean; dotted: the mean of the reference."""
    label = with_unit(measure.words, measure.unit)
    x = linear_axis([value for seeds in rows.values() for value in seeds.values()], label, within=measure.bounds)
    chart = chart_of_rows(name, x, list(rows), 80 + 24 * len(rows))
    for k, (variant, seeds) in enumerate(rows.items()):
        level, mean = len(rows) - k - 0.5, fmean(seeds.values())
        if variant == reference:
            chart.divider(mean)
        tips = [f"{variant}, seed {seed}: {value:.2f} {measure.unit}".rstrip() for seed, value in seeds.items()]
        chart.dots([(value, level) for value in seeds.values()], "others", tips, radius=4)
        chart.segment((mean, level - 0.34), (mean, level + 0.34), "whisker mean")
    return chart


def chart_of_rows(name: str, x: Axis, labels: Sequence[str], height: int, longest: int = _LONGEST_NAME) -> Chart:
    """Rows from above, the name of each beside it; the last one is at 0.5."""
    short = [short_name(label, longest) for label in labels]
    y = Axis(0, len(short), [(len(short) - k - 0.5, label) for k, label in enumerate(short)])
    return Chart(name, x, y, left=max(64, 7 * max(map(len, short)) + 16), height=height)


def _rows(table: Comparison) -> dict[str, dict[str, PairedDifference]]:
    """Label of a row -> variant -> difference, where there is one."""
    measure = table.primary
    if table.targets:
        columns: list[tuple[str, Measure, str | None]] = [(target, measure, target) for target in table.targets]
        columns.append(("mean", measure, None))
    else:
        alike = [m for m in table.measures if (m.unit, m.better) == (measure.unit, measure.better)]
        columns = [(each.label, each, None) for each in alike]
    found = {
        label: {v: d for v in table.others if (d := table.difference(each, v, target)) is not None}
        for label, each, target in columns
    }
    return {label: differences for label, differences in found.items() if differences}


def possible_differences(found: Iterable[PairedDifference], measure: Measure) -> tuple[list[float], Bounds]:
    """Means and ends of intervals as far as a difference of this measure can reach, and how far: for their axis.

    The interval of two or three seeds can span much more than is possible.
    """
    low, high = measure.bounds
    most = math.inf if low is None or high is None else high - low
    values = [max(-most, min(most, value)) for difference in found for value in difference if value is not None]
    return values, (-most, most)


def curve_chart(
    name: str, runs: Sequence[Run], variants: Sequence[str], key: str, label: str, measure: Measure | None = None
) -> DrawnCurve | None:
    """One quantity over the epochs: mean of the seeds as a line, smallest to largest seed as a band.

    A seed with several targets counts as their mean. Of a `measure` a steep start may be left out, which would compress
    the rest.
    """
    whole = {
        variant: epoch_curve((r.seed, e["epoch"], e.get(key)) for r in runs if r.variant == variant for e in r.history)
        for variant in variants
    }
    epochs = sorted({epoch for curve in whole.values() for epoch, _ in curve})
    if not epochs:
        return None
    start = epochs[len(epochs) // 5] if measure is not None else epochs[0]  # the axis need not hold the first fifth
    values = [v for curve in whole.values() for epoch, seeds in curve for v in seeds if epoch >= start]
    within = NO_BOUNDS if measure is None else measure.bounds
    chart = Chart(name, count_axis(epochs, "epoch"), linear_axis(values, label, within=within))
    low, high = chart.y.low, chart.y.high
    curves = {
        variant: [(epoch, seeds) for epoch, seeds in curve if low <= min(seeds) and max(seeds) <= high]
        for variant, curve in whole.items()
    }
    draw_curves(chart, variant_styles(variants), curves)
    ends = [f"{shown_name(v)} ends at {fmean(c[-1][1]):.4g}" for v, c in curves.items() if c]
    return DrawnCurve(chart.svg(f"{label} over the epochs", "; ".join(ends)), curves != whole)


def lines_chart(
    name: str,
    title: str,
    across: Sequence[float | None],
    lines: Mapping[str, Sequence[float | None]],
    xlabel: str,
    ylabel: str,
) -> str | None:
    """Lines over a common axis, as a task's own section gives them; None where there is no point."""
    points = {
        line: [(x, y) for x, y in zip(across, values, strict=True) if x is not None and y is not None]
        for line, values in lines.items()
    }
    drawn = [point for line in points.values() for point in line]
    if not drawn:
        return None
    x_axis = linear_axis([x for x, _ in drawn], xlabel)
    chart = Chart(name, x_axis, linear_axis([y for _, y in drawn], ylabel), left=60)
    for (line, places), style in zip(points.items(), variant_styles(list(points)).values(), strict=True):
        chart.line(places, style)
        chart.dots(places, style, [f"{line}: {y:.4g} at {x:.4g}" for x, y in places])
    return chart.svg(title, "; ".join(f"{line} ends at {p[-1][1]:.4g}" for line, p in points.items() if p))


def points_chart(
    name: str, title: str, groups: Mapping[str, Sequence[Sequence[float | None]]], xlabel: str, ylabel: str
) -> str | None:
    """Groups of points on one plane, as a task's own section gives them; None where there is no point."""
    found = {group: [(x, y) for x, y in points if x is not None and y is not None] for group, points in groups.items()}
    drawn = [point for points in found.values() for point in points]
    if not drawn:
        return None
    across, down = zip(*drawn, strict=True)
    chart = Chart(name, linear_axis(across, xlabel), linear_axis(down, ylabel), left=60)
    for (group, points), style in zip(found.items(), variant_styles(list(found)).values(), strict=True):
        chart.dots(points, style, [group] * len(points))
    return chart.svg(title, "; ".join(f"{group}: {len(points)} points" for group, points in found.items()))


def epoch_curve(found: Iterable[tuple[int, float | None, float | None]]) -> EpochCurve:
    """From (seed or run, epoch counted from 0, value): epochs from 1 and the mean of each seed, thinned for drawing."""
    seen: dict[float, dict[int, list[float]]] = {}
    for seed, epoch, value in found:
        if epoch is not None and value is not None:
            seen.setdefault(epoch + 1, {}).setdefault(seed, []).append(value)
    means = {epoch: [fmean(v) for v in seeds.values()] for epoch, seeds in seen.items()}
    epochs = sorted(means)
    return [(epochs[k], means[epochs[k]]) for k in thin(range(len(epochs)), _MOST_EPOCHS)]


def draw_curves(chart: Chart, styles: Mapping[str, str], curves: Mapping[str, EpochCurve]) -> None:
    """All bands, from the smallest to the largest seed, and over them all lines, the means of the seeds."""
    for name, curve in curves.items():
        if any(len(values) > 1 for _, values in curve):
            chart.band([(e, min(v)) for e, v in curve], [(e, max(v)) for e, v in curve], styles[name])
    for name, curve in curves.items():
        chart.line([(e, fmean(v)) for e, v in curve], styles[name])
