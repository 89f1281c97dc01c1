"""Numbers of each class and calibration, against loops over the images."""

import math

import numpy as np
import pytest
import torch

from batchformer.metrics.class_report import (
    BINS,
    FEWEST_IMAGES,
    calibration,
    class_report,
    expected_error,
    fit_temperature,
    reliability,
    worst_mistakes,
)
from batchformer.metrics.coco_ap import CocoAP, unmatched


def made(images=600, classes=6, hot=1.0, seed=0):
    """Logits whose softmax is calibrated, made `hot` times too large."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(images, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    return hot * logits, labels


def test_numbers_of_classes_are_those_of_a_loop():
    logits, labels = made()
    said = logits.argmax(1)
    labels[labels == 4] = 3  # class 4 is said, and has no image
    said[said == 5] = 0  # class 5 has images, and is never said
    found = class_report(said, labels, 6)
    for c in range(6):
        right = sum(int(p == t == c) for p, t in zip(said.tolist(), labels.tolist(), strict=True))
        predicted, there = int((said == c).sum()), int((labels == c).sum())
        assert found.images[c] == there
        for value, top, bottom in (
            (found.precision[c], right, predicted),
            (found.recall[c], right, there),
            (found.f1[c], 2 * right, predicted + there),
        ):
            assert math.isnan(value) if not bottom else value == pytest.approx(100 * top / bottom, abs=1e-3)
        assert found.matrix[c] == [int(((labels == c) & (said == k)).sum()) for k in range(6)]
    known = [value for value in found.recall if not math.isnan(value)]
    assert len(known) == 5
    assert found.balanced_accuracy == pytest.approx(sum(known) / 5)
    assert found.macro_f1 == pytest.approx(np.nanmean(found.f1))
    pairs = {(t, p): n for t, p, n in found.confusions}
    assert [*pairs.values()] == sorted(pairs.values(), reverse=True)
    assert all(n == found.matrix[t][p] and t != p for (t, p), n in pairs.items())


def test_many_classes_have_pairs_and_no_matrix():
    labels = torch.arange(3000)
    said = labels.clone()
    said[:3] = torch.tensor([2999, 7, 7])
    found = class_report(said, labels, 3000)
    assert found.matrix == []
    assert found.confusions == [[0, 2999, 1], [1, 7, 1], [2, 7, 1]]


def test_calibration_error_is_that_of_a_loop_over_the_bins():
    logits, labels = made(hot=3.0)
    confidence, right = logits.softmax(1).amax(1), logits.argmax(1) == labels
    error = 0.0
    for k in range(BINS):
        inside = (confidence > k / BINS) & (confidence <= (k + 1) / BINS)
        if inside.any():
            gap = confidence[inside].mean() - right[inside].float().mean()
            error += float(inside.float().mean() * gap.abs())
    assert expected_error(confidence, right) == pytest.approx(100 * error, abs=1e-3)
    bins = reliability(confidence, right)
    assert sum(images for *_, images in bins) == len(labels)
    by_bins = sum(images * abs(sure - accuracy) for sure, accuracy, images in bins) / len(labels)
    assert by_bins == pytest.approx(100 * error, abs=0.01)


def test_certain_images_are_in_the_last_bin_with_the_nearly_certain_ones():
    confidence, right = torch.tensor([0.0, 0.98, 1.0]), torch.tensor([False, True, False])
    assert reliability(confidence, right) == [[0.0, 0.0, 1], [99.0, 50.0, 2]]


@pytest.mark.parametrize("hot", [0.4, 1.0, 3.0])
def test_temperature_minimises_the_loss(hot):
    logits, labels = made(hot=hot)
    grid = torch.logspace(-1, 1.2, 2000).tolist()
    losses = [float(torch.nn.functional.cross_entropy(logits / t, labels)) for t in grid]
    assert fit_temperature(logits, labels) == pytest.approx(grid[int(np.argmin(losses))], rel=2e-3)


def test_temperature_stays_finite_where_nothing_is_wrong():
    assert fit_temperature(10 * torch.eye(5), torch.arange(5)) == pytest.approx(1 / 20, rel=1e-3)
    assert fit_temperature(10 * torch.eye(5), torch.arange(5).roll(1)) == pytest.approx(20, rel=1e-3)


def test_the_temperature_that_is_reported_was_fitted_on_other_images():
    logits, labels = made(hot=3.0)
    halves = calibration(logits, labels)
    assert halves.fitted_on == "halves"
    assert halves.ece > 2 * halves.ece_scaled
    assert halves.temperature == pytest.approx(fit_temperature(logits, labels))
    # the first half turned the other way round: its temperature must be that of the second, which did not change
    other = logits.clone()
    other[0::2] *= -1
    scaled = (logits[1::2] / fit_temperature(other[0::2], labels[0::2])).softmax(1).amax(1)
    mixed = torch.empty(len(labels))
    mixed[1::2] = scaled
    mixed[0::2] = (other[0::2] / fit_temperature(other[1::2], labels[1::2])).softmax(1).amax(1)
    assert calibration(other, labels).ece_scaled == pytest.approx(expected_error(mixed, other.argmax(1) == labels))
    held_out = calibration(logits, labels, (*made(hot=3.0, seed=1), "source"))
    assert held_out.fitted_on == "source"
    assert held_out.temperature == pytest.approx(fit_temperature(*made(hot=3.0, seed=1)))
    few = calibration(logits[: FEWEST_IMAGES - 1], labels[: FEWEST_IMAGES - 1])
    assert few.temperature is None
    assert few.ece_scaled is None


def test_worst_mistakes_are_the_surest_ones_and_not_all_of_one_kind():
    labels = torch.zeros(6, dtype=torch.int64)
    logits = torch.zeros(6, 3)
    for image, (said, sure) in enumerate([(1, 9), (1, 8), (1, 7), (2, 6), (0, 20), (2, 5)]):
        logits[image, said] = sure
    assert worst_mistakes(logits, labels, 3) == [0, 1, 3]


def test_found_and_false_alarms_are_those_of_a_loop_over_scores():
    random = np.random.default_rng(0)
    metric, scenes = CocoAP(3), []
    for image in range(12):
        corners = random.uniform(0, 80, (4, 2))
        boxes = np.concatenate([corners, corners + random.uniform(10, 40, (4, 2))], 1)
        truth = {"boxes": boxes, "labels": random.integers(0, 3, 4), "image_id": image}
        moved = boxes + random.normal(0, 3, boxes.shape)
        labels = np.where(random.random(4) < 0.7, truth["labels"], random.integers(0, 3, 4))
        found = {"boxes": moved, "labels": labels, "scores": random.random(4).round(2)}
        metric.update([found], [truth])
        scenes.append((found, truth))
    values = metric.compute()

    def counted(limit):
        missed, false, objects = np.zeros(3), np.zeros(3), np.zeros(3)
        for found, truth in scenes:
            kept = found["scores"] >= limit
            lost, wrong = unmatched({key: value[kept] for key, value in found.items()}, truth)
            missed += np.bincount(lost["labels"], minlength=3)
            false += np.bincount(wrong["labels"], minlength=3)
            objects += np.bincount(truth["labels"], minlength=3)
        return objects - missed, false, objects

    def f1(limit):
        found, false, objects = counted(limit)
        return 2 * found.sum() / (found.sum() + false.sum() + objects.sum())

    columns, limit = metric.class_scores["columns"], metric.class_scores["threshold"]
    scores = sorted({float(score) for found, _ in scenes for score in found["scores"]})
    assert f1(limit) == pytest.approx(max(map(f1, scores)))
    found, false, objects = counted(limit)
    assert columns["objects"] == objects.tolist()
    assert columns["found"] == pytest.approx((100 * found / objects).tolist())
    assert columns["false alarms"] == false.tolist()
    assert columns["AP"] == pytest.approx((100 * values["per_class"]).tolist())
    assert np.mean(columns["AP50"]) == pytest.approx(100 * float(values["ap50"]))


def test_crowds_are_neither_missed_nor_false():
    box = np.array([[0.0, 0, 10, 10]])
    crowd = {"boxes": box, "labels": np.array([0]), "iscrowd": np.array([1])}
    twice = {"boxes": np.repeat(box, 2, 0), "labels": np.zeros(2, int), "scores": np.array([0.9, 0.8])}
    missed, false = unmatched(twice, crowd)
    assert len(missed["labels"]) == len(false["labels"]) == 0
    missed, false = unmatched(twice, {**crowd, "iscrowd": np.array([0])})
    assert (len(missed["labels"]), false["scores"].tolist()) == (0, [0.8])
    missed, false = unmatched({**twice, "labels": np.ones(2, int)}, {**crowd, "iscrowd": np.array([0])})
    assert (len(missed["labels"]), len(false["labels"])) == (1, 2)
