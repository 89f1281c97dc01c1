"""What measures are given and cannot count is refused in a sentence."""

from __future__ import annotations

import numpy as np
import pytest

from batchformer.errors import UserError
from batchformer.metrics.accuracy import ShotAccuracy
from batchformer.metrics.coco_ap import CocoAP, ThingsAP

BOX = {"boxes": np.array([[0.0, 0.0, 4.0, 4.0]]), "labels": np.array([0])}
FOUND = {**BOX, "scores": np.array([0.9])}


def test_measures_need_classes():
    CocoAP(1)
    ShotAccuracy([5])
    with pytest.raises(UserError, match="CocoAP needs the number of classes, got 0"):
        CocoAP(0)
    with pytest.raises(UserError, match="number of training images of each class"):
        ShotAccuracy([])


@pytest.mark.parametrize(
    ("found", "truth", "said"),
    [
        ({"boxes": BOX["boxes"], "scores": np.array([0.9])}, BOX, "have no 'labels', only boxes, scores"),
        (FOUND, {}, "targets of an image have no 'boxes', only image_id"),
        ({**FOUND, "scores": np.array([0.9, 0.8])}, BOX, "have 1 boxes, but 2 scores"),
        ({**FOUND, "labels": np.array([0, 0])}, BOX, "have 1 boxes, but 2 labels"),
        (FOUND, {**BOX, "area": np.array([1.0, 2.0])}, "have 1 boxes, but areas or flags for another number"),
        (FOUND, {**BOX, "iscrowd": np.array([0, 0])}, "have 1 boxes, but areas or flags for another number"),
        (FOUND, {**BOX, "ignore": np.array([], bool)}, "have 1 boxes, but areas or flags for another number"),
    ],
)
def test_boxes_that_do_not_fit_together_are_refused(found, truth, said):
    target = {"image_id": 1, **truth}
    with pytest.raises(UserError, match=said):
        CocoAP(1).update([found], [target])


def test_segments_need_scores_and_ids_above_zero():
    image = np.ones((2, 2), np.int64)
    true = {"image_id": 1, "segmentation": image, "segments_info": [{"id": 1, "label_id": 0, "category_id": 0}]}
    found = {**true, "segments_info": [{"id": 1, "label_id": 0, "category_id": 0, "score": 0.9}]}
    ThingsAP([True]).update([found], [true])
    with pytest.raises(UserError, match="a score in every predicted segment"):
        ThingsAP([True]).update([true], [true])
    zero = {**true, "segments_info": [{"id": 0, "label_id": 0, "category_id": 0}]}
    with pytest.raises(UserError, match="has the id 0, which stands for pixels without a label"):
        ThingsAP([True]).update([found], [zero])
