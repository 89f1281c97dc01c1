"""Panoptic quality: how well segments are recognised, and how well those recognised are outlined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.errors import UserError
from batchformer.metrics.box_processes import gathered
from batchformer.metrics.panoptic_quality_table import Overlay, overlay

_IOU, _RIGHT, _WRONG, _MISSED = range(4)
#: what `compute` gives, `per_class` aside
PQ_NAMES = tuple(f"{value}{group}" for group in ("", "_things", "_stuff") for value in ("pq", "sq", "rq"))


class PanopticQuality:
    """PQ = SQ x RQ of each class (Kirillov et al., 2019), averaged over all classes, over things and over stuff.

    A predicted and a true segment of one class match when their intersection over union is above .5, void pixels taken
    out of the union; SQ is the mean overlap of the matched, RQ is right / (right + wrong / 2 + missed / 2). As in the
    panoptic API, where libraries differ: a true crowd is neither matched nor missed; a predicted segment that matches
    nothing is not wrong when more than half of it is void or crowd of its class (of several crowds of a class in one
    image, the last that is listed); classes that neither occur nor are predicted do not enter the mean.

    `update` takes for each image a dict with `segmentation` (a map of segment ids at the size of the original image;
    ids that are not listed are void) and `segments_info` (dicts with `id` and `label_id`), and the label of the image
    from an evaluation batch of `CocoPanoptic`, or a dict like the first (with `iscrowd` in its segments; id 0 is void).
    Fractions of 1; nan for a group without any class. `compute` is over the images of all processes.
    """

    names = PQ_NAMES

    def __init__(self, is_thing: Sequence[bool]) -> None:
        if not len(is_thing):
            raise UserError("PanopticQuality needs is_thing: for each class whether it is a thing or stuff.")
        self.is_thing = np.array(is_thing, dtype=bool)
        self.reset()

    def reset(self) -> None:
        self._counts = np.zeros((4, len(self.is_thing)))

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        if len(predictions) != len(targets):
            raise UserError(
                f"PanopticQuality got predictions for {len(predictions)} images and targets for {len(targets)}."
            )
        for prediction, target in zip(predictions, targets, strict=True):
            both = overlay(prediction, target.get("truth", target))
            for labels in (both.predicted.label, both.true.label):
                if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.is_thing):
                    wrong = labels.min() if labels.min() < 0 else labels.max()
                    raise UserError(f"label {wrong} of a segment is not one of the {len(self.is_thing)} classes.")
            count_segments(both, self._counts)

    def compute(self) -> dict[str, Float[Tensor, ...]]:
        """The numbers `names` lists, and `per_class` with PQ, SQ and RQ of each class, nan where it does not occur."""
        iou, right, wrong, missed = np.sum(gathered(self._counts), axis=0)
        weight = right + wrong / 2 + missed / 2
        occurs = weight > 0
        per_class = np.full((len(weight), 3), np.nan)
        per_class[occurs, 0] = iou[occurs] / weight[occurs]
        per_class[occurs, 1] = iou[occurs] / np.maximum(right[occurs], 1)
        per_class[occurs, 2] = right[occurs] / weight[occurs]
        groups = (occurs, occurs & self.is_thing, occurs & ~self.is_thing)
        means = [per_class[group].mean(0) if group.any() else np.full(3, np.nan) for group in groups]
        values = dict(zip(PQ_NAMES, np.concatenate(means), strict=True)) | {"per_class": per_class}
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}


def count_segments(both: Overlay, counts: Float[np.ndarray, "4 classes"]) -> None:
    """Add one image to the sums of overlaps and the numbers of right, wrong and missed segments of each class."""
    predicted, true = both.predicted, both.true
    union = predicted.area + true.area[:, None] - both.common - both.void
    same = (true.label[:, None] == predicted.label) & ~true.crowd[:, None] & (both.common > 0)
    iou = np.divide(both.common, union, out=np.zeros(union.shape), where=same)
    row, column = np.nonzero(iou > 0.5)
    np.add.at(counts[_IOU], true.label[row], iou[row, column])
    np.add.at(counts[_RIGHT], true.label[row], 1)
    missed = ~true.crowd
    missed[row] = False
    np.add.at(counts[_MISSED], true.label[missed], 1)

    last_crowd = {label: place for place, label in enumerate(true.label) if true.crowd[place]}
    excused = both.void.astype(np.float64)
    for label, place in last_crowd.items():
        excused += np.where(predicted.label == label, both.common[place], 0)
    wrong = excused <= predicted.area / 2
    wrong[column] = False
    np.add.at(counts[_WRONG], predicted.label[wrong], 1)
