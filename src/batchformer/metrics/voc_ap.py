"""Average precision as VOC 2007 counts it, at one overlap and averaged over many as MoCo reports it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.metrics.coco_ap import AP_NAMES, CocoAP, box_overlap
from batchformer.metrics.gather import gathered

OVERLAPS = np.arange(50, 100, 5) / 100
_RECALLS = np.arange(11) / 10

Rows = Float[np.ndarray, "rows columns"]


class VocAP(CocoAP):
    """`voc_ap`, `voc_ap50` and `voc_ap75` as fractions of 1, `per_class` (the AP50 of each class), and COCO's numbers.

    VOC 2007: the precision is read at the recalls 0, 0.1, ..., 1 (the largest precision at that recall or more), a
    detection belongs to the object it overlaps most, an object is found once and only with an overlap above the limit,
    and difficult objects count neither as found nor as missed. `voc_ap` is the mean over the overlaps 0.50, 0.55, ...,
    0.95, as detectron2 and MoCo's tables report it; COCO's AP is another.

    `update` takes what `CocoAP` takes; an object with `ignore` is difficult. VOC numbers pixels from 1 and counts both
    end pixels of a side (xmax - xmin + 1). Boxes here are the areas of these pixels (x1 = xmin - 1, x2 = xmax), so that
    the same side is x2 - x1.
    """

    names = ("voc_ap", "voc_ap50", "voc_ap75", *AP_NAMES)

    def reset(self) -> None:
        super().reset()
        self._rows: list[Rows] = []  # class, score, largest overlap, object, whether that is difficult
        self._per_class = np.zeros(self.num_classes, dtype=np.int64)
        self._count = 0

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        first = len(self._boxes)
        super().update(predictions, targets)
        read = zip(self._found[first:], self._objects[first:], self._boxes[first:], strict=True)
        for (found_labels, scores, _), (labels, _, _, difficult), (found, boxes) in read:
            np.add.at(self._per_class, labels[~difficult], 1)
            best, which, ignored = np.zeros(len(found)), np.full(len(found), -1), np.zeros(len(found), dtype=bool)
            if len(boxes) and len(found):
                overlaps = box_overlap(found[:, None], boxes, np.zeros(1, bool)) * (found_labels[:, None] == labels)
                which, best = overlaps.argmax(1), overlaps.max(1)
                ignored = difficult[which] & (best > 0)
            columns = found_labels, scores, best, which + self._count, ignored
            self._rows.append(np.stack(columns, axis=1).reshape(-1, 5))
            self._count += len(boxes)

    def compute(self) -> dict[str, Tensor]:
        parts = gathered((np.concatenate([np.zeros((0, 5)), *self._rows]), self._per_class, self._count))
        starts = np.cumsum([0, *(count for _, _, count in parts)])
        shift = np.array([0, 0, 0, 1, 0])  # of the number of an object, which each process counts from 0
        found = np.concatenate([rows + k * shift for (rows, _, _), k in zip(parts, starts, strict=False)])
        objects = np.sum([counts for _, counts, _ in parts], axis=0)
        found = found[np.argsort(-found[:, 1], kind="stable")]
        table = np.full((self.num_classes, len(OVERLAPS)), np.nan)
        for label in np.flatnonzero(objects):
            rows = found[found[:, 0] == label]
            table[label] = [_average_precision(rows, objects[label], limit) for limit in OVERLAPS]
        named = {"voc_ap": _mean(table), "voc_ap50": _mean(table[:, 0]), "voc_ap75": _mean(table[:, 5])}
        numbers = {name: torch.as_tensor(value) for name, value in {**named, "per_class": table[:, 0]}.items()}
        return {**super().compute(), **numbers}


def _average_precision(found: Rows, objects: int, limit: float) -> float:
    """Of one class, from its detections by falling score."""
    _, _, overlap, which, difficult = found.T
    hit = overlap > limit
    counted = ~(hit & difficult.astype(bool))
    first = np.zeros(len(found), dtype=bool)
    hits = np.flatnonzero(hit)
    first[hits[np.unique(which[hits], return_index=True)[1]]] = True
    right, wrong = np.cumsum((first & counted)[counted]), np.cumsum((~first & counted)[counted])
    recall, precision = right / objects, right / np.maximum(right + wrong, 1)
    return float(np.mean([precision[recall >= level].max(initial=0.0) for level in _RECALLS]))


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")
