"""From matches to COCO's twelve numbers: precision over recall, averaged."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from batchformer.metrics.coco_ap_match import IOU_THRESHOLDS, SIZES, Matches

RECALLS = np.linspace(0.0, 1.0, 101)
LIMITS = (1, 10, 100)


def average(matches: Matches, counts: Int[np.ndarray, "classes sizes"]) -> dict[str, Float[np.ndarray, ""]]:
    """COCO's summary and `per_class`, the AP of each class; nan where there is nothing to find.

    AP is the mean, over the classes with objects, ten thresholds from .50 to .95 and 101 recalls, of the largest
    precision at that recall or above; AR the mean of the recall reached with so many detections of each image and
    class.
    """
    precision = np.full((len(counts), len(SIZES), len(IOU_THRESHOLDS), len(RECALLS)), np.nan)
    recall = np.full((len(counts), len(SIZES), len(LIMITS), len(IOU_THRESHOLDS)), np.nan)
    order = np.lexsort((matches.rank, matches.image, -matches.score, matches.label))
    label = matches.label[order]
    for c in np.flatnonzero(counts.any(1)):
        rows = order[np.searchsorted(label, c) : np.searchsorted(label, c, side="right")]
        for size in np.flatnonzero(counts[c]):
            counting = ~matches.passed[rows, :, size]
            right = matches.hit[rows, :, size] & counting
            for place, limit in enumerate(LIMITS):
                within = right[matches.rank[rows] < limit]
                recall[c, size, place] = within.sum(0) / counts[c, size]
            precision[c, size] = _precision_at(right, counting & ~right, counts[c, size])
    return _summary(precision, recall)


def _precision_at(right: np.ndarray, wrong: np.ndarray, total: int) -> Float[np.ndarray, "thresholds recalls"]:
    """Interpolated precision at each of `RECALLS`, 0 where that recall is never reached."""
    at = np.zeros((len(IOU_THRESHOLDS), len(RECALLS)))
    if not len(right):
        return at
    right, wrong = right.cumsum(0).astype(float), wrong.cumsum(0).astype(float)
    recall, precision = right / total, right / (right + wrong + np.spacing(1))
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    for threshold in range(len(at)):
        place = np.searchsorted(recall[:, threshold], RECALLS)
        reached = place < len(recall)
        at[threshold, reached] = precision[place[reached], threshold]
    return at


def _summary(precision: np.ndarray, recall: np.ndarray) -> dict[str, Float[np.ndarray, ""]]:
    per_class = precision.mean((2, 3))  # (classes, sizes)
    values = {
        "ap": _mean(per_class[:, 0]),
        "ap50": _mean(precision[:, 0, 0].mean(-1)),
        "ap75": _mean(precision[:, 0, 5].mean(-1)),
    }
    values |= {f"ap_{name}": _mean(per_class[:, place]) for place, name in enumerate(SIZES) if place}
    values |= {f"ar{limit}": _mean(recall[:, 0, place].mean(-1)) for place, limit in enumerate(LIMITS)}
    values |= {f"ar_{name}": _mean(recall[:, place, -1].mean(-1)) for place, name in enumerate(SIZES) if place}
    return values | {"per_class": per_class[:, 0]}


def _mean(values: Float[np.ndarray, " classes"]) -> Float[np.ndarray, ""]:
    there = values[~np.isnan(values)]
    return np.asarray(there.mean() if len(there) else np.nan)
