"""COCO's average precision: by pycocotools, and counted by hand."""

import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from batchformer.errors import UserError
from batchformer.metrics.coco_ap import AP_NAMES, CocoAP
from batchformer.metrics.measures import DETECTION

from .coco_scenes import as_tensors, detections, generated_annotations, judged, needs_real_data, real_annotations


def numbers(classes, predictions, targets):
    metric = CocoAP(classes)
    metric.update(predictions, targets)
    values = metric.compute()
    return np.array([values[name].item() for name in AP_NAMES])


def image(boxes, labels, scores=None, **flags):
    entry = {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), "labels": torch.tensor(labels).long()}
    return entry | ({} if scores is None else {"scores": torch.tensor(scores, dtype=torch.float32)}) | flags


SMALL, MEDIUM, LARGE = [0, 0, 10, 10], [20, 20, 70, 70], [100, 100, 300, 300]


@pytest.mark.parametrize(("seed", "whole_pixels"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_the_twelve_numbers_are_those_of_pycocotools(seed, whole_pixels):
    """Whole pixels give overlaps that are equal, and overlaps that are exactly a threshold."""
    rng = np.random.default_rng(seed)
    truth = generated_annotations(rng, whole_pixels=whole_pixels)
    found = detections(truth, rng, 60, whole_pixels)
    np.testing.assert_allclose(numbers(5, *as_tensors(truth, found)), judged(truth, found), atol=1e-12, rtol=0)


def test_every_number_is_a_measure_with_and_without_the_module():
    measures = {measure.key: measure.label for measure in DETECTION}
    assert list(measures) == [*AP_NAMES, *(f"{name}_batch" for name in AP_NAMES)]
    assert all(label.startswith(key[:2].upper()) for key, label in measures.items())


def test_more_detections_than_count_are_cut_off_by_score():
    rng = np.random.default_rng(7)
    truth = generated_annotations(rng, images=3, classes=1)
    found = detections(truth, rng, 400)
    assert len(found) > 300
    ours = numbers(1, *as_tensors(truth, found))
    np.testing.assert_allclose(ours, judged(truth, found), atol=1e-12, rtol=0)


@needs_real_data
@pytest.mark.parametrize("split", ["train2017", "val2017"])
@pytest.mark.parametrize("crowds", [0.0, 0.15])
def test_on_real_annotations_the_numbers_are_those_of_pycocotools(split, crowds):
    rng = np.random.default_rng(0)
    truth = real_annotations(f"instances_{split}.json")
    for entry in truth["annotations"]:
        entry["iscrowd"] = int(rng.random() < crowds)
    found = detections(truth, rng, 150)
    np.testing.assert_allclose(numbers(80, *as_tensors(truth, found)), judged(truth, found), atol=1e-6, rtol=0)


def test_everything_found_is_one():
    boxes = [SMALL, MEDIUM, LARGE]
    ours = numbers(2, [image(boxes, [0, 1, 1], [0.9, 0.8, 0.7])], [image(boxes, [0, 1, 1])])
    assert ours[[0, 1, 2, 3, 4, 5, 8, 9, 10, 11]].tolist() == pytest.approx([1.0] * 10)
    assert ours[6] == 0.75  # with one detection an image and class, half of class 1


def test_a_wrong_detection_costs_precision_only_above_the_right_one():
    truth = [image([LARGE], [0])]
    before = [image([LARGE, MEDIUM], [0, 0], [0.5, 0.9])]
    after = [image([LARGE, MEDIUM], [0, 0], [0.9, 0.5])]
    assert numbers(1, before, truth)[0] == pytest.approx(0.5)
    assert numbers(1, after, truth)[0] == pytest.approx(1.0)


def test_an_overlap_of_exactly_half_is_enough_for_ap50_alone():
    half = [100, 100, 300, 200]
    ours = numbers(1, [image([half], [0], [0.9])], [image([LARGE], [0])])
    assert ours[:3].tolist() == pytest.approx([0.1, 1.0, 0.0])


def test_of_two_objects_with_the_same_overlap_the_later_is_taken():
    """The first detection lies between both; the second is the left one, and finds the right one up to .65 only."""
    left, right, between = [0, 0, 20, 10], [4, 0, 24, 10], [2, 0, 22, 10]
    found = [image([between, left], [0, 0], [0.9, 0.8])]
    assert numbers(1, found, [image([left, right], [0, 0])])[8] == pytest.approx((7 * 1 + 3 * 0.5) / 10)
    assert numbers(1, found, [image([right, left], [0, 0])])[8] == pytest.approx((4 * 1 + 6 * 0.5) / 10)


def test_detections_inside_a_crowd_are_neither_right_nor_wrong():
    crowd = image([[0, 0, 400, 400], [500, 500, 550, 550]], [0, 0], iscrowd=torch.tensor([True, False]))
    inside = [[10, 10, 50, 50], [60, 60, 90, 90], [500, 500, 550, 550]]
    scores = [0.9, 0.8, 0.1]
    assert numbers(1, [image(inside, [0] * 3, scores)], [crowd])[0] == pytest.approx(1.0)
    crowd["iscrowd"][0] = False
    assert numbers(1, [image(inside, [0] * 3, scores)], [crowd])[0] < 0.2


def test_what_is_marked_to_ignore_excuses_one_detection():
    truth = [image([LARGE, SMALL], [0, 0], ignore=torch.tensor([True, False]))]
    once = [image([LARGE, SMALL], [0, 0], [0.9, 0.1])]
    twice = [image([LARGE, LARGE, SMALL], [0, 0, 0], [0.9, 0.8, 0.1])]
    assert numbers(1, once, truth)[0] == pytest.approx(1.0)
    assert numbers(1, twice, truth)[0] == pytest.approx(0.5)


def test_without_objects_there_is_no_number_and_without_detections_zero():
    nothing = [image([], [])]
    assert np.isnan(numbers(2, [image([LARGE], [0], [0.9])], nothing)).all()
    missed = numbers(2, [image([], [], [])], [image([LARGE], [1])])
    assert missed[[0, 5, 8]].tolist() == [0, 0, 0]
    assert math.isnan(missed[3])  # no small object


def test_classes_are_told_apart_and_reset_forgets():
    metric = CocoAP(3)
    metric.update([image([LARGE], [0], [0.9])], [image([LARGE], [1])])
    assert metric.compute()["ap"] == 0
    metric.reset()
    metric.update([image([LARGE, SMALL], [1, 0], [0.9, 0.3])], [image([LARGE], [1])])
    values = metric.compute()
    assert values["ap"] == pytest.approx(1.0)
    assert values["per_class"].isnan().tolist() == [True, False, True]


def test_labels_that_only_objects_or_only_detections_have_do_not_run_into_the_next_image():
    missed = [image([SMALL, LARGE], [0, 1]), image([], [])]
    assert numbers(2, [image([], [], []), image([LARGE], [0], [0.9])], missed)[0] == 0
    one = [image([], []), image([LARGE], [0])]
    assert numbers(2, [image([LARGE], [1], [0.9]), image([LARGE], [0], [0.8])], one)[0] == pytest.approx(1.0)


def test_an_image_given_twice_counts_once():
    truth, other = image([LARGE], [0], image_id=7), image([MEDIUM], [0], image_id=8)
    right, wrong = image([LARGE], [0], [0.9]), image([SMALL], [0], [0.9])
    metric = CocoAP(1)
    metric.update([right, wrong], [truth, other])
    once = metric.compute()
    metric.update([wrong], [truth])
    assert {name: value.tolist() for name, value in metric.compute().items() if name != "per_class"} == pytest.approx(
        {name: value.tolist() for name, value in once.items() if name != "per_class"}, nan_ok=True
    )


def test_wrong_input_is_named():
    metric = CocoAP(2)
    with pytest.raises(UserError, match="label 2 in predictions is not one of the 2 classes"):
        metric.update([image([LARGE], [2], [0.5])], [image([], [])])
    with pytest.raises(UserError, match="1 images and targets for 2"):
        metric.update([image([], [], [])], [image([], []), image([], [])])
    with pytest.raises(UserError, match="2 boxes, but 1 scores"):
        metric.update([image([LARGE, SMALL], [0, 0], [0.5])], [image([], [])])
    with pytest.raises(UserError, match="no 'labels'"):
        metric.update([{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0)}], [image([], [])])


def _one_process(rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    rng = np.random.default_rng(3)
    truth = generated_annotations(rng, images=7)
    predictions, targets = as_tensors(truth, detections(truth, rng, 30))
    mine = range(0, 7, 2) if rank == 0 else [1, 3, 5, 0]  # image 0 twice, as a sampler that fills up would have it
    metric = CocoAP(5)
    metric.update([predictions[k] for k in mine], [targets[k] for k in mine])
    values = metric.compute()
    if rank == 1:
        torch.save(values, out)
    dist.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path):
    out = os.fspath(tmp_path / "values.pt")
    mp.start_processes(_one_process, (2, os.fspath(tmp_path / "store"), out), nprocs=2, start_method="fork")
    together = torch.load(out)
    rng = np.random.default_rng(3)
    truth = generated_annotations(rng, images=7)
    alone = CocoAP(5)
    alone.update(*as_tensors(truth, detections(truth, rng, 30)))
    values = alone.compute()
    assert 0 < values["ap"] < 1
    for name in AP_NAMES:
        torch.testing.assert_close(together[name], values[name], equal_nan=True, rtol=0, atol=0)
