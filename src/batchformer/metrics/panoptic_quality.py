"""Panoptic quality: how well segments are recognised, and how well those recognised are outlined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.errors import UserError
from batchformer.metrics.gather import as_array, check_pairs, gathered, refuse_unknown_labels

_IOU, _RIGHT, _WRONG, _MISSED = range(4)
#: what `compute` gives, `per_class` aside
PQ_NAMES = tuple(f"{value}{group}" for group in ("", "_things", "_stuff") for value in ("pq", "sq", "rq"))
_LOOK_UP = 1 << 16  # smaller ids use a lookup table, larger ones a binary search


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
        check_pairs("PanopticQuality", predictions, targets)
        for prediction, target in zip(predictions, targets, strict=True):
            both = overlay(prediction, target.get("truth", target))
            for side in (both.predicted, both.true):
                refuse_unknown_labels(side.label, len(self.is_thing), "segments_info")
            count_segments(both, self._counts)

    def compute(self) -> dict[str, Float[Tensor, "*shape"]]:
        """The numbers `names` lists, and `per_class` with PQ, SQ and RQ of each class, nan where it does not occur."""
        iou, right, wrong, missed = np.sum(gathered(self._counts), axis=0)
        weight = right + wrong / 2 + missed / 2
        occurs = weight > 0
        per_class = np.full((len(weight), 3), np.nan)
        per_class[occurs, 0] = iou[occurs] / weight[occurs]
        per_class[occurs, 1] = iou[occurs] / np.maximum(right[occurs], 1)
        per_class[occurs, 2] = right[occurs] / weight[occurs]
        self.class_scores = {
            "columns": {
                "segments": (right + missed).astype(int).tolist(),
                **{name: (100 * per_class[:, k]).tolist() for k, name in enumerate(("PQ", "SQ", "RQ"))},
            },
            "worst_by": "PQ",
        }
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


class Segments(NamedTuple):
    """The segments of one image in the order they were listed in."""

    label: Int[np.ndarray, " segments"]
    area: Float[np.ndarray, " segments"]
    score: Float[np.ndarray, " segments"]
    crowd: Bool[np.ndarray, " segments"]


class Overlay(NamedTuple):
    """Overlaps of predicted and true segments. Empty predictions are dropped; `void`: unlabelled pixels of each."""

    predicted: Segments
    true: Segments
    common: Int[np.ndarray, "true predicted"]
    void: Int[np.ndarray, " predicted"]


def overlay(prediction: Mapping[str, Any], truth: Mapping[str, Any]) -> Overlay:
    """Overlaps of two dicts of `segmentation`, a map of segment ids, and `segments_info`, with `id` and `label_id`.

    Predicted pixels whose id is not listed belong to no segment (transformers writes -1 or 0 there), nor do those of
    id 0 in the truth: they are void. A segment listed twice, as transformers lists the parts of fused stuff, is one.
    An `area` given in the truth is taken as it is, as the panoptic API does.
    """
    maps = [np.asarray(as_array(side["segmentation"], np.int64)) for side in (prediction, truth)]
    if maps[0].shape != maps[1].shape:
        sizes = " and ".join(" x ".join(map(str, side.shape[::-1])) for side in maps)
        raise UserError(
            f"predicted and true segmentation of an image differ in size ({sizes} pixels): "
            f"bring the predicted one to the size of the original image."
        )
    infos = [_once(side["segments_info"]) for side in (prediction, truth)]
    if any(info["id"] == 0 for info in infos[1]):
        raise UserError("a true segment has the id 0, which stands for pixels without a label.")
    ids = [np.array([info["id"] for info in side], dtype=np.int64) for side in infos]
    # true: 0 void, then the segments, then ids that are not listed, which are neither; predicted: 0 no segment
    true_place, place = _places(maps[1], ids[1]), _places(maps[0], ids[0])
    true_place[(true_place == 0) & (maps[1] != 0)] = len(ids[1]) + 1
    width = len(ids[0]) + 1
    cells = np.bincount((true_place * width + place).reshape(-1), minlength=(len(ids[1]) + 2) * width)
    table = cells.reshape(len(ids[1]) + 2, width)
    there = np.flatnonzero(table[:, 1:].sum(0))
    predicted = _segments([infos[0][k] for k in there], table[:, 1:].sum(0)[there])
    given = [info.get("area", pixels) for info, pixels in zip(infos[1], table[1:-1].sum(1), strict=True)]
    common = table[:, 1:][:, there]
    return Overlay(predicted, _segments(infos[1], np.array(given)), common[1:-1], common[0])


def _once(infos: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    first: dict[int, Mapping[str, Any]] = {}
    for info in infos:
        known = first.setdefault(int(info["id"]), info)
        if known["label_id"] != info["label_id"]:
            raise UserError(
                f"segment {info['id']} is listed with the labels {known['label_id']} and {info['label_id']}: "
                f"give every segment an id of its own."
            )
    return list(first.values())


def _segments(infos: Sequence[Mapping[str, Any]], area: np.ndarray) -> Segments:
    return Segments(
        np.array([info["label_id"] for info in infos], dtype=np.int64),
        area.astype(np.float64),
        np.array([info.get("score", 1.0) for info in infos], dtype=np.float64),
        np.array([info.get("iscrowd", 0) for info in infos], dtype=bool),
    )


def _places(segmentation: Int[np.ndarray, "height width"], ids: Int[np.ndarray, " segments"]) -> np.ndarray:
    """For each pixel the place of its id in `ids`, from 1; 0 where it is not there."""
    if not len(ids):
        return np.zeros_like(segmentation)
    if min(ids.min(), segmentation.min() + 1) >= 0 and max(ids.max(), segmentation.max()) < _LOOK_UP:
        table = np.zeros(_LOOK_UP + 1, dtype=np.int64)  # the last entry is that of id -1
        table[ids] = np.arange(1, len(ids) + 1)
        return table[segmentation]
    order = np.argsort(ids)
    near = order[np.minimum(np.searchsorted(ids[order], segmentation), len(ids) - 1)]
    return np.where(ids[near] == segmentation, near + 1, 0)
