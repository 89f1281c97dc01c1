"""Classes sorted by training frequency, and what the runs of a method say about each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchformer.metrics.shots import FEW_BELOW, MANY_ABOVE
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, paired_difference

MOST_POINTS = 400


@dataclass(frozen=True)
class ClassGroup:
    """One class, or neighbours in frequency where there are too many to draw; `count` is their geometric mean."""

    members: tuple[int, ...]
    count: float
    name: str


def sorted_groups(runs: Sequence[Run], most: int = MOST_POINTS) -> list[ClassGroup]:
    """Groups of equal size, the most frequent classes first; empty when no run knows its class counts."""
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
            mean = math.exp(math.fsum(map(math.log, counts)) / len(counts))
            groups.append(ClassGroup(members, mean, f"{len(members)} classes"))
    return groups


def class_ranks(groups: Sequence[ClassGroup]) -> list[float]:
    """Where each group stands among the sorted classes, counted from 1: the middle of its members."""
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
    return [_mean([part(run)[k] for run in runs if part(run) for k in group.members]) for group in groups]


def difference_per_group(runs: Sequence[Run], groups: Sequence[ClassGroup]) -> list[PairedDifference | None]:
    """Accuracy with the method minus without, seeds matched, per group of classes."""
    sides = [{r.seed: r for r in runs if r.method == method and r.per_class} for method in ("baseline", "batchformer")]
    seeds = [seed for seed in sides[0] if seed in sides[1]]
    differences: list[PairedDifference | None] = []
    for group in groups:
        pairs = [
            (
                _mean([sides[0][s].per_class[k] for k in group.members]),
                _mean([sides[1][s].per_class[k] for k in group.members]),
            )
            for s in seeds
        ]
        whole = [(a, b) for a, b in pairs if a is not None and b is not None]
        differences.append(paired_difference([a for a, _ in whole], [b for _, b in whole]) if whole else None)
    return differences


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
