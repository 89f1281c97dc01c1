"""Classes sorted by training frequency, the results of the runs for each, and their charts on the page."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from batchformer.metrics.measures import FEW_BELOW, MANY_ABOVE, Measure
from batchformer.report.charts import (
    Axis,
    Chart,
    count_axis,
    frequency_axis,
    linear_axis,
    smooth,
    variant_styles,
    with_names,
)
from batchformer.report.comparison import Comparison, class_word, measure_word, shown_name, signed, with_unit
from batchformer.report.figures import possible_differences
from batchformer.report.html_parts import figure, plain_table
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, RankCorrelation, mean_of_known, paired_difference, spearman

MOST_POINTS = 400
SORTED = "class, from frequent to rare"
MOST_NAMES = 12  # class names at the axis of a chart
MOST_CLASSES_OPEN = 20  # rows of the table of classes that are shown; larger tables are collapsed


@dataclass(frozen=True)
class ClassGroup:
    """One class, or neighbours in frequency where there are too many to draw; `count` is their geometric mean."""

    members: tuple[int, ...]
    count: float
    name: str


def sorted_groups(runs: Sequence[Run], most: int = MOST_POINTS) -> list[ClassGroup]:
    """Groups of equal size, the most frequent classes first; empty when no run has class counts."""
    run = next((run for run in runs if run.class_counts), None)
    if run is None:
        return []
    names = run.class_names or [f"class {k}" for k in range(len(run.class_counts))]
    order = sorted(range(len(run.class_counts)), key=lambda k: (-run.class_counts[k], k))
    pieces = min(most, len(order))
    edges = [round(k * len(order) / pieces) for k in range(pieces + 1)]
    groups = []
    for start, end in itertools.pairwise(edges):
        members = tuple(order[start:end])
        counts = [max(1, run.class_counts[k]) for k in members]
        if len(members) == 1:  # the count itself: a logarithm would make 19.999 of the border 20
            groups.append(ClassGroup(members, counts[0], names[members[0]]))
        else:
            mean = math.exp(fmean(map(math.log, counts)))
            groups.append(ClassGroup(members, mean, f"{len(members)} classes"))
    return groups


def class_ranks(groups: Sequence[ClassGroup]) -> list[float]:
    """Rank of each group among the sorted classes, counted from 1: the middle of its members."""
    ends = itertools.accumulate(len(group.members) for group in groups)
    return [end - (len(group.members) - 1) / 2 for end, group in zip(ends, groups, strict=True)]


def split_borders(groups: Sequence[ClassGroup]) -> tuple[int, int]:
    """How many of the sorted groups are Many, and how many are Many or Medium."""
    many = sum(group.count > MANY_ABOVE for group in groups)
    return many, sum(group.count >= FEW_BELOW for group in groups)


def mean_per_group(
    runs: Sequence[Run], groups: Sequence[ClassGroup], part: Callable[[Run], Sequence[float | None]]
) -> list[float | None]:
    """Mean over the runs that have the part and over the members of each group; None where nothing is known."""
    return [mean_of_known(part(run)[k] for run in runs if part(run) for k in group.members) for group in groups]


def difference_per_group(
    runs: Sequence[Run], reference: str, variant: str, groups: Sequence[ClassGroup]
) -> list[PairedDifference | None]:
    """Per-class values of the variant minus those of the reference, per group of classes, seeds matched.

    As in the comparison, a seed with several targets is one pair: the mean over those that both have.
    """
    sides = [{(r.target, r.seed): r for r in runs if r.variant == v and r.per_class} for v in (reference, variant)]
    differences: list[PairedDifference | None] = []
    for group in groups:
        pairs: dict[int, list[tuple[float, float]]] = {}
        for key in (key for key in sides[0] if key in sides[1]):
            before, after = (mean_of_known(side[key].per_class[k] for k in group.members) for side in sides)
            if before is not None and after is not None:
                pairs.setdefault(key[1], []).append((before, after))
        before_by_seed, after_by_seed = ([fmean(pair[k] for pair in of) for of in pairs.values()] for k in (0, 1))
        differences.append(paired_difference(before_by_seed, after_by_seed) if pairs else None)
    return differences


def class_chart(name: str, runs: Sequence[Run], variants: Sequence[str], measure: Measure) -> str | None:
    """The measure of each class against how often it was seen in training, for each variant."""
    groups = sorted_groups([run for run in runs if run.per_class])
    if not groups:
        return None
    found = {
        variant: mean_per_group([run for run in runs if run.variant == variant], groups, lambda run: run.per_class)
        for variant in variants
    }
    bounds = [bound for bound in measure.bounds if bound is not None]
    values = bounds if len(bounds) == 2 else [v for means in found.values() for v in means if v is not None]
    word = measure_word(measure)
    chart = Chart(
        name,
        frequency_axis([group.count for group in groups], "training images of the class (log)"),
        linear_axis(values, with_unit(word, measure.unit), within=measure.bounds),
    )
    _draw_frequency_borders(chart)
    for variant, style in variant_styles(variants).items():
        known = [(group, mean) for group, mean in zip(groups, found[variant], strict=True) if mean is not None]
        tips = [
            f"{group.name}: {mean:.1f} {measure.unit} ({shown_name(variant)}), {group.count:.0f} images"
            for group, mean in known
        ]
        chart.dots([(max(1.0, g.count), mean) for g, mean in known], style, tips, radius=2.6)
        if len(known) > 20:
            trend = smooth([mean for _, mean in known], len(known) / 16)
            chart.line([(max(1.0, g.count), v) for (g, _), v in zip(known, trend, strict=True)], f"{style} trend")
    return chart.svg(
        f"{word} per class against training frequency",
        f"{len(groups)} points per variant, frequent classes on the left, mean over the seeds.",
    )


def class_difference_chart(
    name: str, runs: Sequence[Run], reference: str, variant: str, measure: Measure
) -> str | None:
    """Difference to the reference in about ten bins of classes, from frequent to rare."""
    groups = sorted_groups([run for run in runs if run.per_class], most=10)
    found = difference_per_group(runs, reference, variant, groups)
    bins = [(group, difference) for group, difference in zip(groups, found, strict=True) if difference is not None]
    if not bins:
        return None
    values, within = possible_differences([difference for _, difference in bins], measure)
    counts = [(k + 0.5, f"{group.count:.0f}") for k, (group, _) in enumerate(bins)]
    x = Axis(0, len(bins), counts, "training images per class")
    if all(len(group.members) == 1 for group, _ in bins):
        x = with_names(Axis(0, len(bins), (), SORTED), 0.5, [group.name for group, _ in bins])
    y = linear_axis(values, with_unit("difference", measure.points), include_zero=True, within=within)
    chart = Chart(name, x, y)
    for k, (group, difference) in enumerate(bins):
        amount = f"{signed(difference.mean, 1)} {measure.points}".rstrip()
        tip = f"{group.name}, about {group.count:.0f} training images: {amount}"
        chart.bar(k + 0.14, k + 0.86, difference.mean, "up" if measure.gain(difference.mean) >= 0 else "down", tip)
        if difference.low is not None and difference.high is not None:
            chart.interval((k + 0.5, difference.low), (k + 0.5, difference.high), "")
    many, medium = split_borders([group for group, _ in bins])
    _draw_rank_borders(chart, many, medium, len(bins), 0)
    spoken = ", ".join(f"{signed(difference.mean, 1)}" for _, difference in bins)
    title = f"Difference in {measure_word(measure)} by class frequency"
    return chart.svg(title, f"From frequent to rare classes: {spoken}.")


def class_table(runs: Sequence[Run], table: Comparison) -> str:
    """Every class by name, the frequent ones first: training images, the measure of each variant, their difference.

    In columns that wrap; collapsed where there are many classes.
    """
    known = [run for run in runs if run.per_class]
    groups = sorted_groups(known, most=10**9)
    if not groups:
        return ""
    found = {v: [run for run in known if run.variant == v] for v in table.variants}
    columns = {
        shown_name(v): [
            "–" if mean is None else f"{mean:.1f}" for mean in mean_per_group(of, groups, lambda run: run.per_class)
        ]
        for v, of in found.items()
        if of
    }
    if len(columns) == 2 and len(table.others) == 1:
        pairs = difference_per_group(known, table.reference, table.others[0], groups)
        columns["difference"] = ["–" if pair is None else signed(pair.mean, 1) for pair in pairs]
    header = ["class", "images", *columns]
    numbered = len(groups) > MOST_NAMES  # then the charts count them
    names = [f"{k}. {group.name}" if numbered else group.name for k, group in enumerate(groups, 1)]
    rows = list(zip(names, [f"{group.count:,.0f}" for group in groups], *columns.values(), strict=True))
    beside = {3: 3, 4: 2, 5: 2}.get(len(header), 1)  # tables that fit beside each other on a wide screen
    size = max(10, math.ceil(len(rows) / beside))
    pieces = "".join(plain_table(header, rows[k : k + size]) for k in range(0, len(rows), size))
    word = with_unit(class_word(table.primary), table.primary.unit)
    title = f"All {len(rows):,} classes by name, from frequent to rare: {word}"
    pieces = f'<div class="pieces p{beside}">{pieces}</div>'
    wide = " wide" if len(rows) > size or len(columns) > 1 else ""
    if len(rows) <= MOST_CLASSES_OPEN:
        return f'<div class="card classes{wide}"><h4>{escape(title)}</h4>{pieces}</div>'
    return f'<details class="card classes{wide}"><summary>{escape(title)}</summary>{pieces}</details>'


def influence_chart(name: str, runs: Sequence[Run]) -> str | None:
    """The paper's Fig. 6: gradient norm of each class's loss on the other images, classes by descending frequency."""
    groups, norms = _influence_per_group(runs, MOST_POINTS)
    known = [(rank, g, v) for rank, g, v in zip(class_ranks(groups), groups, norms, strict=True) if v is not None]
    if not known:
        return None
    classes = sum(len(group.members) for group in groups)
    ranks = [rank for rank, _, _ in known]
    y = linear_axis([v for _, _, v in known], "gradient norm on the others", include_zero=True, within=(0, None))
    x = count_axis([1.0, float(classes)], SORTED)
    chart = Chart(name, with_names(x, 1, [group.name for group in groups]) if classes <= MOST_NAMES else x, y)
    many, medium = (sum(len(group.members) for group in groups[:border]) for border in split_borders(groups))
    _draw_rank_borders(chart, many, medium, classes, 1)
    tips = [f"{group.name}: {value:.4g}, {group.count:.0f} training images" for _, group, value in known]
    chart.dots([(rank, value) for rank, _, value in known], "related", tips, radius=2.8)
    if trend := len(known) > 4:
        values = [value for _, _, value in known]
        running = [sum(values[:count]) / count for count in range(1, len(values) + 1)]
        chart.line(list(zip(ranks, running, strict=True)), "related trend")
    return chart.svg(
        "Gradient norm of each class's loss on the other images of the batch (Fig. 6 of the paper)",
        f"{len(known)} points, classes sorted by descending training frequency{', with their running mean' * trend}.",
    )


def _influence_per_group(runs: Sequence[Run], most: int) -> tuple[list[ClassGroup], list[float | None]]:
    related = [run for run in runs if run.influence and run.class_counts]
    groups = sorted_groups(related, most)
    return groups, mean_per_group(related, groups, lambda run: run.influence)


def influence_correlation(runs: Sequence[Run]) -> RankCorrelation | None:
    """Spearman correlation between how rare a class is and its gradient norm; the paper's claim is a positive one."""
    groups, norms = _influence_per_group(runs, most=10**9)
    known = [(-group.count, value) for group, value in zip(groups, norms, strict=True) if value is not None]
    return spearman([rarity for rarity, _ in known], [value for _, value in known])


def influence_section(name: str, runs: Sequence[Run], whose: str) -> str:
    """The gradients on other images of the runs of one variant, as HTML; empty where no run has them."""
    picture = influence_chart(name, runs)
    if picture is None:
        return ""
    title = f"<h3>Gradients on the other images of the batch (the paper’s Fig. 6){escape(whose)}</h3>"
    wrt = "features" if all(run.influence_wrt == "features" for run in runs if run.influence) else "pixels"
    seeds = ", mean of the seeds" if len(runs) > 1 else ""
    line = (
        " Line: running mean over the classes up to that one, as in the paper’s figure; points: single classes."
        if "related trend" in picture
        else ""
    )
    drawn = figure(
        "Gradient norm of each class’s loss on the others",
        picture,
        f"Test set, module on, norm at the {wrt} of the other images{seeds}.{line}",
    )
    return f'{title}<div class="grid">{drawn}<div class="card reading">{_influence_reading(runs)}</div></div>'


def _influence_reading(runs: Sequence[Run]) -> str:
    claim = (
        "<p class='muted'>Through BatchFormer the loss of one image also reaches the <em>other</em> images of its "
        "batch. According to the paper, this gradient is larger for rarer classes.</p>"
    )
    overall = influence_correlation(runs)
    if overall is None:
        return claim + "<p>No rank correlation: all classes are equally frequent, or there is only one.</p>"
    single = [(run.seed, influence_correlation([run])) for run in runs if run.influence]
    seeds = ", ".join(f"{signed(found.rho)} (seed {seed})" for seed, found in single if found is not None)
    each = f'<p class="muted">Single runs: {escape(seeds)}.</p>' if len(single) > 1 else ""
    certain = overall.p is not None and overall.p < 0.05
    if not certain:
        reading = "No clear correlation here: these runs neither confirm nor refute the paper’s claim."
    elif overall.rho > 0:
        reading = "The same here: rarer classes have larger gradients on the other images."
    else:
        reading = "The opposite here: rarer classes have smaller gradients on the other images."
    chance = "" if overall.p is None else f"; p {'&lt; 0.001' if overall.p < 0.001 else f'= {overall.p:.3f}'}"
    return (
        f'{claim}<p class="rho">ρ = {signed(overall.rho)}</p><p class="muted">Spearman rank correlation between rarity '
        f"and gradient norm over the classes (+1: larger for rarer classes{chance}).</p><p><b>{reading}</b></p>"
        f"{each}"
    )


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
