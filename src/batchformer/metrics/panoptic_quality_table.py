"""Two segmentations of one image laid over each other: how many pixels every pair of segments has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from batchformer.errors import UserError
from batchformer.metrics.box_processes import as_array

_LOOK_UP = 1 << 16  # ids below are found in a table, larger ones by searching


class Segments(NamedTuple):
    """The segments of one image in the order they were listed in."""

    label: Int[np.ndarray, " segments"]
    area: Float[np.ndarray, " segments"]
    score: Float[np.ndarray, " segments"]
    crowd: Bool[np.ndarray, " segments"]


class Overlay(NamedTuple):
    """Predicted segments without a pixel are left out; `void` is what a predicted one covers of unlabelled pixels."""

    predicted: Segments
    true: Segments
    common: Int[np.ndarray, "true predicted"]
    void: Int[np.ndarray, " predicted"]


def overlay(prediction: Mapping[str, Any], truth: Mapping[str, Any]) -> Overlay:
    """Both have `segmentation`, a map of segment ids, and `segments_info`, a list of dicts with `id` and `label_id`.

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
