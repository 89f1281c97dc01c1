"""What runs are judged by, in the words of the page: accuracy, or the numbers of COCO for boxes and for segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """`metrics` maps the keys of result files to labels, the deciding one, "all", first."""

    name: str  # in a sentence: the ... is 0.3 points higher
    short: str  # on an axis
    metrics: dict[str, str]
    objects: bool = False  # of a detector: no number of images stands behind a class


ALL_CLASSES = Measure(
    "accuracy over all classes", "accuracy", {"all": "All", "many": "Many", "medium": "Medium", "few": "Few"}
)
TOP = Measure("top-1 accuracy", "accuracy", {"all": "Top-1", "top5": "Top-5"})
BOXES = Measure(
    "average precision of boxes",
    "AP",
    {"all": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP small", "ap_medium": "AP medium",
     "ap_large": "AP large", "ap_batch": "AP, module on"},
    objects=True,
)  # fmt: skip
SEGMENTS = Measure(
    "panoptic quality",
    "PQ",
    {"all": "PQ", "sq": "SQ", "rq": "RQ", "pq_things": "PQ things", "pq_stuff": "PQ stuff", "ap": "AP things",
     "pq_batch": "PQ, module on"},
    objects=True,
)  # fmt: skip


def measure_of(metrics: Iterable[Mapping[str, Any]]) -> Measure:
    """By the metrics of the results, all of one recipe."""
    keys = {key for each in metrics for key in each}
    for key, measure in {"pq": SEGMENTS, "ap": BOXES, "top1": TOP}.items():
        if key in keys:
            return measure
    return ALL_CLASSES


def named_by(label: str) -> Measure:
    """The measure whose deciding metric has this label."""
    return next(measure for measure in (SEGMENTS, BOXES, TOP, ALL_CLASSES) if measure.metrics["all"] == label)
