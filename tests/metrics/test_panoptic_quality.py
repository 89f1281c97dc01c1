"""Panoptic quality, by a slow reference and counted by hand; average precision of things by pycocotools."""

import contextlib
import io
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from batchformer.errors import UserError
from batchformer.metrics.coco_ap import AP_NAMES, ThingsAP
from batchformer.metrics.panoptic_quality import PQ_NAMES, PanopticQuality

from .coco_scenes import needs_real_data
from .panoptic_scenes import as_dict, generated_truth, imperfect, real_truth
from .slow_panoptic import slow_panoptic_quality

CLASSES = [True, True, True, False, False, False]


def numbers(pairs, is_thing):
    metric = PanopticQuality(is_thing)
    metric.update([as_dict(predicted) for predicted, _ in pairs], [as_dict(true, flags=True) for _, true in pairs])
    values = metric.compute()
    return np.array([values[name].item() for name in PQ_NAMES])


def generated_pairs(seed, images=8):
    rng = np.random.default_rng(seed)
    truths = [generated_truth(rng) for _ in range(images)]
    return [(imperfect(truth, rng, 6), truth) for truth in truths]


def strip(*lengths):
    """One row of pixels: so many of id 1, then of id 2, ...; id 0 where a length is negative."""
    parts = [np.full(abs(n), place if n > 0 else 0) for place, n in enumerate(lengths, 1)]
    return np.concatenate(parts)[None]


@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_the_slow_reference(seed):
    pairs = generated_pairs(seed)
    ours = numbers(pairs, CLASSES)
    assert 0.1 < ours[0] < 0.95
    np.testing.assert_allclose(ours, slow_panoptic_quality(pairs, CLASSES), atol=1e-12, rtol=0)


@needs_real_data
@pytest.mark.parametrize("split", ["train2017", "val2017"])
def test_on_real_segmentations_it_agrees_with_the_slow_reference(split):
    truths, is_thing = real_truth(split)
    rng = np.random.default_rng(0)
    pairs = [(imperfect(truth, rng, 133), truth) for truth in truths[:40]]
    ours = numbers(pairs, is_thing)
    assert 0.3 < ours[0] < 0.95
    np.testing.assert_allclose(ours, slow_panoptic_quality(pairs, is_thing), atol=1e-12, rtol=0)


def test_the_truth_itself_is_perfect():
    truths = [truth for _, truth in generated_pairs(3)]
    without_crowds = [(drawn, {k: info for k, info in infos.items() if not info[1]}) for drawn, infos in truths]
    np.testing.assert_allclose(numbers(list(zip(without_crowds, truths, strict=True)), CLASSES), 1)


def test_void_is_taken_out_of_the_union():
    """Ten true pixels, all found, and eight more on void: the overlap is 1, not 10 / 18."""
    truth = (strip(10, -8), {1: (0, False)})
    assert numbers([((strip(18), {1: (0, False)}), truth)], [True])[0] == 1


def test_an_overlap_of_exactly_half_is_no_match():
    truth = (strip(10, 10), {1: (0, False), 2: (1, False)})
    half = (strip(5, 15), {1: (0, False), 2: (1, False)})
    values = numbers([(half, truth)], [True, True])
    # class 0: 5 of 10, missed and wrong; class 1: 10 of 15, matched
    assert values[:3].tolist() == pytest.approx([(0 + 2 / 3) / 2, (0 + 2 / 3) / 2, 0.5])


@pytest.mark.parametrize(("on_void", "wrong"), [(6, False), (5, True)])
def test_a_segment_is_excused_when_more_than_half_of_it_is_void(on_void, wrong):
    truth = (strip(20, -on_void), {1: (0, False)})
    predicted = np.concatenate([np.full(20 - (10 - on_void), 1), np.full(10, 2)])[None]
    values = numbers([((predicted, {1: (0, False), 2: (1, False)}), truth)], [True, True])
    # a wrong segment of class 1 brings that class, at 0, into the mean
    assert values[2] == (0.5 if wrong else 1.0)


def test_crowds_excuse_their_own_class_and_are_never_missed():
    truth = (strip(10, 10), {1: (0, True), 2: (1, False)})
    of_class = lambda label: (strip(10, 10), {1: (label, False), 2: (1, False)})  # noqa: E731
    unfound = (np.concatenate([np.zeros(10), np.full(10, 2)]).astype(int)[None], {2: (1, False)})
    assert numbers([(of_class(0), truth)], [True] * 3)[2] == 1
    assert numbers([(unfound, truth)], [True] * 3)[2] == 1
    assert numbers([(of_class(2), truth)], [True] * 3)[2] == 0.5


def test_things_and_stuff_are_averaged_apart_and_a_group_without_classes_is_nan():
    truth = (strip(10, 10), {1: (0, False), 2: (1, False)})
    predicted = (strip(10, 6), {1: (0, False), 2: (1, False)})
    predicted = (np.pad(predicted[0], ((0, 0), (0, 4))), predicted[1])
    pq, _, _, things, _, _, stuff, _, _ = numbers([(predicted, truth)], [True, False])
    assert (pq, things, stuff) == pytest.approx((0.8, 1.0, 0.6))
    assert np.isnan(numbers([(predicted, truth)], [True, True])[6])


def test_what_transformers_returns_is_understood():
    truth = as_dict((strip(10, 10), {1: (0, False), 2: (1, False)}), flags=True)
    fused = torch.tensor(strip(10, 10), dtype=torch.int32)
    infos = [{"id": 1, "label_id": 0, "score": 0.9, "was_fused": False}, {"id": 2, "label_id": 1, "was_fused": True}]
    metric = PanopticQuality([True, False])
    metric.update([{"segmentation": fused, "segments_info": [*infos, infos[1], {"id": 9, "label_id": 1}]}], [truth])
    assert metric.compute()["pq"] == 1
    metric.reset()
    metric.update([{"segmentation": torch.zeros(1, 20) - 1, "segments_info": []}], [truth])
    assert metric.compute()["pq"] == 0


def test_wrong_input_is_named():
    metric = PanopticQuality([True])
    truth = as_dict((strip(4), {1: (0, False)}), flags=True)
    with pytest.raises(UserError, match=r"differ in size \(5 x 1 and 4 x 1 pixels\)"):
        metric.update([as_dict((strip(5), {1: (0, False)}))], [truth])
    with pytest.raises(UserError, match="label 3 in segments_info is not one of the 1 classes"):
        metric.update([as_dict((strip(4), {1: (3, False)}))], [truth])
    listed = {"segmentation": strip(4), "segments_info": [{"id": 1, "label_id": 0}, {"id": 1, "label_id": 2}]}
    with pytest.raises(UserError, match="segment 1 is listed with the labels 0 and 2"):
        metric.update([listed], [truth])
    with pytest.raises(UserError, match="needs is_thing"):
        PanopticQuality([])


def judged_masks(predictions, truths, is_thing):
    """pycocotools on one mask for each thing."""
    coco, masks = pytest.importorskip("pycocotools.coco"), pytest.importorskip("pycocotools.mask")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    annotations, found = [], []
    for image, (prediction, truth) in enumerate(zip(predictions, truths, strict=True)):
        for side, entries in ((prediction, found), (truth, annotations)):
            for info in side["segments_info"]:
                if is_thing[info["label_id"]]:
                    mask = masks.encode(np.asfortranarray(side["segmentation"] == info["id"], dtype=np.uint8))
                    entry = {"image_id": image, "category_id": info["label_id"] + 1, "segmentation": mask}
                    extra = {"id": len(entries) + 1, "area": float(masks.area(mask)), "iscrowd": info.get("iscrowd", 0)}
                    entries.append(entry | ({"score": info["score"]} if entries is found else extra))
    with contextlib.redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        images = [{"id": k, "height": 1, "width": 1} for k in range(len(truths))]
        categories = [{"id": c + 1} for c, thing in enumerate(is_thing) if thing]
        reference.dataset = {"images": images, "annotations": annotations, "categories": categories}
        reference.createIndex()
        judge = evaluation.COCOeval(reference, reference.loadRes(found), "segm")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return np.where(judge.stats == -1, np.nan, judge.stats)


def test_average_precision_of_things_is_that_of_pycocotools():
    rng = np.random.default_rng(0)
    pairs = generated_pairs(1, images=20)
    predictions = [as_dict(predicted, rng) for predicted, _ in pairs]
    truths = [as_dict(true, flags=True) for _, true in pairs]
    metric = ThingsAP(CLASSES)
    metric.update(predictions, truths)
    ours = np.array([metric.compute()[name].item() for name in AP_NAMES])
    assert 0.1 < ours[0] < 0.95
    np.testing.assert_allclose(ours, judged_masks(predictions, truths, CLASSES), atol=1e-12, rtol=0)


@needs_real_data
def test_on_real_segmentations_average_precision_of_things_is_that_of_pycocotools():
    truths, is_thing = real_truth("val2017")
    rng = np.random.default_rng(1)
    predictions = [as_dict(imperfect(truth, rng, 133), rng) for truth in truths]
    targets = [as_dict(truth, flags=True) for truth in truths]
    metric = ThingsAP(is_thing)
    metric.update(predictions, targets)
    ours = np.array([metric.compute()[name].item() for name in AP_NAMES])
    np.testing.assert_allclose(ours, judged_masks(predictions, targets, is_thing), atol=1e-6, rtol=0)


def _one_process(rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pairs = generated_pairs(5)[: 1 if rank else None][(0 if rank else 1) :]  # the first image, and all others
    ours = numbers(pairs, CLASSES)
    if rank:
        torch.save(torch.from_numpy(ours), out)
    dist.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path):
    out = os.fspath(tmp_path / "values.pt")
    mp.start_processes(_one_process, (2, os.fspath(tmp_path / "store"), out), nprocs=2, start_method="fork")
    np.testing.assert_allclose(torch.load(out).numpy(), numbers(generated_pairs(5), CLASSES), rtol=1e-12)
