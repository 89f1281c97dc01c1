"""Average precision of the things in panoptic output, their masks compared instead of boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchformer.errors import UserError
from batchformer.metrics.coco_ap import AveragePrecision
from batchformer.metrics.coco_ap_match import Found, Objects, Overlaps
from batchformer.metrics.panoptic_quality_table import overlay


class ThingsAP(AveragePrecision):
    """COCO's numbers for the segments of things, by the overlap of their masks; stuff is left out on both sides.

    Takes what `PanopticQuality` takes, with a `score` in each predicted segment. Panoptic segments do not overlap, so
    this is a lower number than that of the masks before they were merged. Objects, crowds among them, are the true
    segments of things, and their area is the number of pixels.
    """

    def __init__(self, is_thing: Sequence[bool]) -> None:
        super().__init__(len(is_thing))
        self.is_thing = np.array(is_thing, dtype=bool)

    def reset(self) -> None:
        super().reset()
        self._common: list[np.ndarray] = []

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        self._check_images(predictions, targets)
        for prediction, target in zip(predictions, targets, strict=True):
            both = overlay(prediction, target.get("truth", target))
            for side in (both.predicted, both.true):
                self._check_labels(side.label, "segments_info")
            if not all("score" in info for info in prediction["segments_info"]):
                raise UserError("ThingsAP needs a score in every predicted segment.")
            of_things = [self.is_thing[side.label] for side in (both.predicted, both.true)]
            label, area, score, _ = (field[of_things[0]] for field in both.predicted)
            true_label, true_area, _, crowd = (field[of_things[1]] for field in both.true)
            self._add(target, (label, score, area), (true_label, true_area, crowd, np.zeros_like(crowd)))
            self._common.append(both.common[np.ix_(of_things[1], of_things[0])])

    def _overlaps(self, found: Found, objects: Objects) -> Overlaps:
        shapes = np.array([common.shape for common in self._common]).reshape(-1, 2)
        cells = np.concatenate([np.zeros(0), *(common.reshape(-1) for common in self._common)])
        start = np.cumsum([0, *shapes.prod(1)])[:-1]
        first, first_object = (np.cumsum([0, *shapes[:, axis]])[:-1] for axis in (1, 0))

        def overlaps(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
            image = found.image[rows]
            column, row = rows - first[image], at - first_object[objects.image[at]]
            # padding points at objects of other images: whatever it reads there is masked by the caller
            place = start[image] + np.where(objects.image[at] == image, row * shapes[image, 1] + column, 0)
            common = cells[place]
            whole = np.where(objects.crowd[at], found.area[rows], found.area[rows] + objects.area[at] - common)
            return common / whole

        return overlaps
