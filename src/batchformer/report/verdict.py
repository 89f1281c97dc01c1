"""One plain sentence from the numbers: it helped, it hurt, or nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from batchformer.report.comparison import ComparisonRow, signed
from batchformer.report.measures import named_by


class Verdict(NamedTuple):
    kind: Literal["helped", "hurt", "unclear", "incomplete"]
    sentence: str


def verdict(rows: Sequence[ComparisonRow]) -> Verdict:
    """Decided by the interval of the paired difference in All alone: above zero, below zero, or around it.

    One metric decides, chosen beforehand, so that four looks at the data do not make a chance result look like a gain.
    """
    row = next(row for row in rows if row.metric == "all")
    if row.difference is None:
        return Verdict("incomplete", _what_is_missing(row))
    mean, low, high = row.difference
    accuracy = named_by(row.label).name
    if low is None or high is None:
        direction = "higher" if mean > 0 else "lower" if mean < 0 else "the same"
        amount = f"{abs(mean):.2f} points {direction}" if mean else "the same"
        return Verdict(
            "unclear",
            f"With BatchFormer the {accuracy} is {amount}, but this is one seed: no interval can be "
            "given, so it may be chance.",
        )
    interval = f"95 % interval {signed(low)} to {signed(high)}"
    seeds = f"{len(row.paired_seeds)} matched seeds"
    if low > 0:
        return Verdict("helped", f"BatchFormer helped: {signed(mean)} points of {accuracy} ({interval}, {seeds}).")
    if high < 0:
        return Verdict("hurt", f"BatchFormer hurt: {signed(mean)} points of {accuracy} ({interval}, {seeds}).")
    return Verdict(
        "unclear",
        f"No clear difference: {signed(mean)} points of {accuracy}, and the {interval} ({seeds}) contains zero.",
    )


def _what_is_missing(row: ComparisonRow) -> str:
    if row.baseline is None and row.batchformer is None:
        return f"No run here has an {named_by(row.label).name}, so there is nothing to compare."
    if row.baseline is None:
        return "Only runs with BatchFormer are here: add runs of the baseline to compare."
    if row.batchformer is None:
        return "Only runs of the baseline are here: add runs with BatchFormer to compare."
    return "Both methods were run, but never with the same seed: no paired difference can be given."
