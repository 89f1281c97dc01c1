"""Average precision and recall as COCO counts them: of detected boxes, and of the things in panoptic output."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.errors import UserError
from batchformer.metrics.coco_matching import (
    SIZES,
    CountedObjects,
    Detections,
    MatchedDetections,
    Objects,
    Overlaps,
    average,
    found_and_false,
    match,
    totals,
)
from batchformer.metrics.gather import (
    as_array,
    check_pairs,
    first_of_each,
    gathered,
    joined,
    process_and_count,
    refuse_unknown_labels,
)
from batchformer.metrics.panoptic_quality import overlay

#: what `compute` gives, `per_class` aside
AP_NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
            "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large")  # fmt: skip

Fields = tuple[np.ndarray, ...]
_NO_DETECTIONS = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
_NO_OBJECTS = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool), np.zeros(0, bool))


class AveragePrecision(ABC):
    """Base class of AP for boxes and masks: images are collected on the host, matched and averaged in `compute`.

    All images are matched at once, in a few hundred calls of numpy. Processes exchange what was matched, not what was
    detected; an image that several of them have seen counts once.

    Kept for its speed (benchmarks/results/coco_evaluators.json, 512 images of COCO, 100 boxes each, processor time):
    0.28 s here, 1.2 s by faster_coco_eval and 5.7 s by pycocotools, with equal results to 1e-14; 2.8 s and 11 s by
    torchmetrics around these two, which counts an image twice when two processes have seen it.
    """

    names: tuple[str, ...] = AP_NAMES

    def __init__(self, num_classes: int) -> None:
        if num_classes < 1:
            raise UserError(f"{type(self).__name__} needs the number of classes, got {num_classes}.")
        self.num_classes = num_classes
        self.reset()

    def reset(self) -> None:
        self.class_scores: dict[str, Any] = {}  # set by `compute`: columns of a table of the classes
        self._ids: list[int] = []
        self._found: list[Fields] = []  # label, score, area
        self._objects: list[Fields] = []  # label, area, crowd, ignore

    @abstractmethod
    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add some images."""

    @abstractmethod
    def _overlaps(self, found: Detections, objects: Objects) -> Overlaps:
        """The overlap of any detection with any object of the same image."""

    def compute(self) -> dict[str, Float[Tensor, "*shape"]]:
        """The numbers `names` lists, and `per_class`: the AP of each class, nan where it has no object.

        `class_scores` then has more about each class: AP50, the share of its objects that are found and the number of
        false alarms, from the score on that has the best F1 over all classes.
        """
        ids, matches, all_totals = zip(*gathered(self._matched()), strict=True)
        starts = np.cumsum([0, *map(len, ids)])[:-1]
        matched, total = joined(matches, starts), joined(all_totals, starts)
        # every image once, sorted by id, which is the order of detections of equal score
        order, keep = first_of_each(np.concatenate(ids))
        matched = MatchedDetections(*(field[keep[matched.image]] for field in matched))
        total = CountedObjects(*(field[keep[total.image]] for field in total))
        counts = np.zeros((self.num_classes, len(SIZES)), dtype=np.int64)
        np.add.at(counts, total.label, total.counts)
        matched = matched._replace(image=order[matched.image])
        values = average(matched, counts)
        objects = counts[:, 0]
        limit, found, false = found_and_false(matched, objects)
        share = np.divide(found, objects, out=np.full(len(objects), np.nan), where=objects > 0)
        self.class_scores = {
            "columns": {
                "objects": objects.tolist(),
                "AP": (100 * values["per_class"]).tolist(),
                "AP50": (100 * values.pop("ap50_per_class")).tolist(),
                "found": (100 * share).tolist(),
                "false alarms": false.tolist(),
            },
            "worst_by": "AP",
            "threshold": limit,
        }
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}

    def _matched(self) -> tuple[np.ndarray, MatchedDetections, CountedObjects]:
        """The images of this process: their ids, matched detections and annotated objects."""
        found = Detections(*flat(self._found, _NO_DETECTIONS))
        objects = Objects(*flat(self._objects, _NO_OBJECTS))
        return (
            np.array(self._ids, dtype=np.int64),
            match(found, objects, self._overlaps(found, objects)),
            totals(objects),
        )

    def _add(self, target: Mapping[str, Any], found: Fields, objects: Fields) -> None:
        process, processes = process_and_count()
        self._ids.append(int(target.get("image_id", len(self._ids) * processes + process)))
        self._found.append(found)
        self._objects.append(objects)


class CocoAP(AveragePrecision):
    """COCO's twelve numbers as fractions of 1, equal to those of pycocotools; nan (there: -1) without any object.

    `update` takes, for each image, what transformers' `post_process_object_detection` returns (`scores`, `labels`,
    `boxes` as x1, y1, x2, y2 in pixels of the original image), and the label of the image from an evaluation batch of
    `DetectionData`, of which it reads `image_id` and `truth`; or a dict with `boxes` (also x1, y1, x2, y2), `labels`,
    and if known `area`, `iscrowd`, `ignore` and `image_id`. `compute` is over the images of all processes.
    """

    def reset(self) -> None:
        super().reset()
        self._boxes: list[Fields] = []  # of detections and of objects: x, y, width, height

    def update(self, predictions: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
        check_pairs(type(self).__name__, predictions, targets)
        for prediction, target in zip(predictions, targets, strict=True):
            boxes, labels = self._read(prediction, "predictions")
            scores = as_array(prediction["scores"], float)
            if len(scores) != len(labels):
                raise UserError(f"predictions of an image have {len(labels)} boxes, but {len(scores)} scores.")
            truth = target.get("truth", target)
            true_boxes, true_labels = self._read(truth, "targets")
            count = len(true_labels)
            area = as_array(truth["area"], float) if "area" in truth else _area(true_boxes)
            flags = [as_array(truth.get(key, np.zeros(count)), bool) for key in ("iscrowd", "ignore")]
            if {len(area), *map(len, flags)} != {count}:
                raise UserError(f"targets of an image have {count} boxes, but areas or flags for another number.")
            self._add(target, (labels, scores, _area(boxes)), (true_labels, area, *flags))
            self._boxes.append((boxes, true_boxes))

    def _overlaps(self, found: Detections, objects: Objects) -> Overlaps:
        _, boxes, true_boxes = flat(self._boxes, (np.zeros((0, 4)), np.zeros((0, 4))))
        return lambda rows, at: box_overlap(boxes[rows], true_boxes[at], objects.crowd[at])

    def _read(self, boxes_of: Mapping[str, Any], what: str) -> tuple[np.ndarray, np.ndarray]:
        """Boxes as x, y, width, height, and labels."""
        missing = [key for key in ("boxes", "labels") if key not in boxes_of]
        if missing:
            there = ", ".join(sorted(boxes_of)) or "nothing"
            raise UserError(f"{what} of an image have no {missing[0]!r}, only {there}.")
        boxes, labels = as_array(boxes_of["boxes"], float).reshape(-1, 4), as_array(boxes_of["labels"], np.int64)
        if len(boxes) != len(labels):
            raise UserError(f"{what} of an image have {len(boxes)} boxes, but {len(labels)} labels.")
        refuse_unknown_labels(labels, self.num_classes, what)
        return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1), labels


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
        check_pairs(type(self).__name__, predictions, targets)
        for prediction, target in zip(predictions, targets, strict=True):
            both = overlay(prediction, target.get("truth", target))
            for side in (both.predicted, both.true):
                refuse_unknown_labels(side.label, self.num_classes, "segments_info")
            if not all("score" in info for info in prediction["segments_info"]):
                raise UserError("ThingsAP needs a score in every predicted segment.")
            of_things = [self.is_thing[side.label] for side in (both.predicted, both.true)]
            label, area, score, _ = (field[of_things[0]] for field in both.predicted)
            true_label, true_area, _, crowd = (field[of_things[1]] for field in both.true)
            self._add(target, (label, score, area), (true_label, true_area, crowd, np.zeros_like(crowd)))
            self._common.append(both.common[np.ix_(of_things[1], of_things[0])])

    def _overlaps(self, found: Detections, objects: Objects) -> Overlaps:
        shapes = np.array([common.shape for common in self._common]).reshape(-1, 2)
        cells = np.concatenate([np.zeros(0), *(common.reshape(-1) for common in self._common)])
        start = np.cumsum([0, *shapes.prod(1)])[:-1]
        first, first_object = (np.cumsum([0, *shapes[:, axis]])[:-1] for axis in (1, 0))

        def overlaps(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
            image = found.image[rows]
            column, row = rows - first[image], at - first_object[objects.image[at]]
            # padding entries refer to objects of other images: the caller masks what is read for them
            place = start[image] + np.where(objects.image[at] == image, row * shapes[image, 1] + column, 0)
            common = cells[place]
            whole = np.where(objects.crowd[at], found.area[rows], found.area[rows] + objects.area[at] - common)
            return common / whole

        return overlaps


def unmatched(
    prediction: Mapping[str, Any], truth: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Of one image: the objects that no detection found, and the detections that found none, at an overlap of one half.

    `boxes` (x1, y1, x2, y2) and `labels`, of detections also `scores`. Crowds and ignored objects are not missed, and
    what lies on them is not false.
    """
    found = {key: as_array(prediction[key], float) for key in ("boxes", "scores")}
    found["labels"] = as_array(prediction["labels"], np.int64)
    objects = {"boxes": as_array(truth["boxes"], float).reshape(-1, 4), "labels": as_array(truth["labels"], np.int64)}
    free = np.ones(len(objects["labels"]), dtype=bool)
    counts = ~np.logical_or(*(as_array(truth.get(key, ~free), bool) for key in ("iscrowd", "ignore")))
    false = np.ones(len(found["labels"]), dtype=bool)
    sides = [
        np.concatenate([b[:, :2], b[:, 2:] - b[:, :2]], 1) for b in (found["boxes"].reshape(-1, 4), objects["boxes"])
    ]
    for k in np.argsort(-found["scores"], kind="stable"):
        overlap = box_overlap(sides[0][k][None], sides[1], ~counts) * (objects["labels"] == found["labels"][k])
        possible = (overlap >= 0.5) & (free | ~counts)
        if possible.any():
            taken = np.where(possible & counts if (possible & counts).any() else possible, overlap, -1).argmax()
            free[taken], false[k] = False, False
    missed = free & counts
    return {key: values[missed] for key, values in objects.items()}, {key: v[false] for key, v in found.items()}


def box_overlap(
    one: Float[np.ndarray, "*#pairs 4"], two: Float[np.ndarray, "*#pairs 4"], crowd: Bool[np.ndarray, "*#pairs"]
) -> Float[np.ndarray, "*#pairs"]:
    """Intersection over union of boxes (x, y, width, height); with a crowd, over the area of the first box alone."""
    width = np.minimum(one[..., 0] + one[..., 2], two[..., 0] + two[..., 2]) - np.maximum(one[..., 0], two[..., 0])
    height = np.minimum(one[..., 1] + one[..., 3], two[..., 1] + two[..., 3]) - np.maximum(one[..., 1], two[..., 1])
    common = np.clip(width, 0, None) * np.clip(height, 0, None)
    whole = np.where(crowd, _area(one), _area(one) + _area(two) - common)
    return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def flat(images: list[Fields], empty: Fields) -> list[np.ndarray]:
    """Concatenate the fields of all images, with the image number of every entry as the first array."""
    number = np.repeat(np.arange(len(images)), [len(fields[0]) for fields in images])
    return [number, *(np.concatenate(field) for field in zip(empty, *images, strict=True))]


def _area(boxes: Float[np.ndarray, "*n 4"]) -> Float[np.ndarray, "*n"]:
    return boxes[..., 2] * boxes[..., 3]
