"""VOC 2007's average precision against a slow evaluator written after the rules of its development kit."""

import numpy as np
import pytest
import torch

from batchformer.metrics import VocAP
from batchformer.metrics.voc_ap import OVERLAPS

PIXELS = np.array([1.0, 1.0, 0.0, 0.0])  # from an area to the numbers of its first and last pixel


def slow_ap(predictions, targets, label: int, limit: float) -> float:
    """Detection by detection, by falling score, with pixels numbered from 1 as in the files."""
    found = [
        (float(score), image, box + PIXELS)
        for image, prediction in enumerate(predictions)
        for box, score, name in zip(prediction["boxes"], prediction["scores"], prediction["labels"], strict=True)
        if name == label
    ]
    objects = {
        image: [[box + PIXELS, hard, False] for box, hard, name in rows if name == label]
        for image, rows in enumerate(zip(t["boxes"], t["ignore"], t["labels"], strict=True) for t in targets)
    }
    count = sum(not hard for some in objects.values() for _, hard, _ in some)
    if not count:
        return float("nan")
    hits, misses, curve = 0, 0, []
    for _, image, box in sorted(found, key=lambda one: -one[0]):
        best, which = 0.0, None
        for one in objects[image]:
            true = one[0]
            width = min(box[2], true[2]) - max(box[0], true[0]) + 1
            height = min(box[3], true[3]) - max(box[1], true[1]) + 1
            if width <= 0 or height <= 0:
                continue
            areas = sum((b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (box, true))
            overlap = width * height / (areas - width * height)
            if overlap > best:
                best, which = overlap, one
        if which is not None and best > limit:
            if which[1]:
                continue
            hits, misses = (hits, misses + 1) if which[2] else (hits + 1, misses)
            which[2] = True
        else:
            misses += 1
        curve.append((hits / count, hits / (hits + misses)))
    return sum(max([p for r, p in curve if r >= level / 10] or [0.0]) for level in range(11)) / 11


def scenes(seed: int):
    generator = np.random.default_rng(seed)
    predictions, targets = [], []
    for _ in range(6):
        count = int(generator.integers(0, 5))
        low = generator.uniform(0, 60, (count, 2))
        boxes = np.concatenate([low, low + generator.uniform(10, 40, (count, 2))], axis=1)
        labels, hard = generator.integers(0, 3, count), generator.uniform(size=count) < 0.3
        targets.append({"boxes": boxes, "labels": labels, "ignore": hard})
        times = int(generator.integers(0, 4))
        moved = np.concatenate([boxes + generator.normal(0, 4, boxes.shape) for _ in range(times)] or [boxes[:0]])
        names = np.where(generator.uniform(size=len(moved)) < 0.8, np.tile(labels, times), generator.integers(0, 3))
        predictions.append({"boxes": moved, "labels": names, "scores": generator.uniform(size=len(moved))})
    return predictions, targets


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_slow_evaluator(seed):
    predictions, targets = scenes(seed)
    metric = VocAP(3)
    for k in range(0, 6, 2):
        metric.update(predictions[k : k + 2], targets[k : k + 2])
    values = metric.compute()
    table = np.array([[slow_ap(predictions, targets, label, limit) for limit in OVERLAPS] for label in range(3)])
    assert float(values["voc_ap"]) == pytest.approx(np.nanmean(table))
    assert float(values["voc_ap50"]) == pytest.approx(np.nanmean(table[:, 0]))
    assert float(values["voc_ap75"]) == pytest.approx(np.nanmean(table[:, 5]))
    np.testing.assert_allclose(values["per_class"].numpy(), table[:, 0])


def test_perfect_detections_are_one_and_nothing_is_zero():
    box = torch.tensor([[0.0, 0.0, 20.0, 20.0]])
    target = {"boxes": box, "labels": torch.tensor([0]), "ignore": torch.tensor([False])}
    metric = VocAP(2)
    metric.update([{"boxes": box, "labels": torch.tensor([0]), "scores": torch.tensor([0.9])}], [target])
    assert float(metric.compute()["voc_ap"]) == 1.0
    metric.reset()
    metric.update([{"boxes": box[:0], "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}], [target])
    assert float(metric.compute()["voc_ap"]) == 0.0


def test_a_box_of_the_files_is_found_with_the_overlap_that_voc_counts():
    """Pixels 11 to 20 of which 11 to 15 are detected: half of them, which is not more than 0.5; 11 to 16 is."""
    target = {"boxes": torch.tensor([[10.0, 10.0, 20.0, 20.0]]), "labels": torch.tensor([0])}
    for last, expected in ((15.0, 0.0), (16.0, 1.0)):
        metric = VocAP(1)
        found = torch.tensor([[10.0, 10.0, 20.0, last]])
        metric.update([{"boxes": found, "labels": torch.tensor([0]), "scores": torch.tensor([0.9])}], [target])
        assert float(metric.compute()["voc_ap50"]) == expected
