"""Aligned errors of meshes against slow versions."""

import numpy as np
import pytest
import torch

from batchformer.metrics.hands import HandErrors, align, f_score


def rotation(seed: int) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    q = q * torch.diagonal(r).sign()
    return q * torch.linalg.det(q).sign() ** torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)


def slow_align(points: np.ndarray, truth: np.ndarray, reflect: bool) -> np.ndarray:
    """Umeyama's algorithm for one set of points."""
    mean, target = points.mean(0), truth.mean(0)
    own, other = points - mean, truth - target
    covariance = sum(np.outer(b, a) for a, b in zip(own, other, strict=True))
    u, values, v = np.linalg.svd(covariance)
    flip = np.eye(3)
    if not reflect and np.linalg.det(u) * np.linalg.det(v) < 0:
        flip[2, 2] = -1
    turn = u @ flip @ v
    scale = np.trace(np.diag(values) @ flip) / sum((a**2).sum() for a in own)
    return np.stack([scale * turn @ a + target for a in own])


@pytest.mark.parametrize("reflect", [False, True])
def test_alignment_is_that_of_the_slow_algorithm(reflect):
    torch.manual_seed(0)
    truth = torch.randn(3, 8, 3, dtype=torch.float64)
    points = truth @ rotation(1) * 0.3 + 0.1 * torch.randn(3, 8, 3, dtype=torch.float64) + 5
    points[1] = points[1] * torch.tensor([-1.0, 1, 1])  # mirrored
    found = align(points, truth, reflect)
    for one, expected, result in zip(points, truth, found, strict=True):
        np.testing.assert_allclose(result.numpy(), slow_align(one.numpy(), expected.numpy(), reflect), atol=1e-10)


def test_a_turned_scaled_and_moved_hand_has_no_error_and_a_mirrored_one_has():
    torch.manual_seed(0)
    truth = torch.randn(1, 30, 3, dtype=torch.float64)
    moved = 2 * truth @ rotation(3) + 1
    torch.testing.assert_close(align(moved, truth), truth)
    mirrored = moved * torch.tensor([-1.0, 1.0, 1.0])
    assert (align(mirrored, truth) - truth).norm(dim=-1).mean() > 0.1
    torch.testing.assert_close(align(mirrored, truth, reflect=True), truth)


def test_f_score_counts_points_within_the_limit_both_ways():
    truth = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]])
    points = torch.tensor([[[0.001, 0, 0], [1.004, 0, 0]]])  # both are near a true one; the third has none
    precision, recall = 1.0, 2 / 3
    assert f_score(points, truth, 0.005).item() == pytest.approx(2 * precision * recall / (precision + recall))
    assert f_score(points, truth, 0.002).item() == pytest.approx(2 * 0.5 * (1 / 3) / (0.5 + 1 / 3))
    assert f_score(points + 10, truth, 0.005).item() == 0.0


def test_numbers_are_means_over_images_in_millimetres_and_percent():
    torch.manual_seed(0)
    truth = {"joints": torch.randn(4, 21, 3) * 0.05, "vertices": torch.randn(4, 50, 3) * 0.05}
    found = {name: value + 0.006 * torch.randn_like(value) for name, value in truth.items()}
    metric = HandErrors()
    metric.update({k: v[:1] for k, v in found.items()}, {k: v[:1] for k, v in truth.items()})
    metric.update({k: v[1:] for k, v in found.items()}, {k: v[1:] for k, v in truth.items()})
    values = metric.compute()
    for key, name in (("pa_mpjpe", "joints"), ("pa_mpvpe", "vertices")):
        errors = [
            np.linalg.norm(slow_align(a.double().numpy(), b.double().numpy(), False) - b.numpy(), axis=1).mean()
            for a, b in zip(found[name], truth[name], strict=True)
        ]
        assert float(values[key]) == pytest.approx(1000 * np.mean(errors), rel=1e-4)
    aligned = align(found["vertices"].double(), truth["vertices"].double())
    for key, limit in (("f5", 0.005), ("f15", 0.015)):  # metres
        scores = f_score(aligned, truth["vertices"].double(), limit)
        assert 0 < scores.mean() < 1
        assert float(values[key]) == pytest.approx(100 * float(scores.mean()))
    assert 80 < values["auc_joints"] < 100
    perfect = HandErrors()
    perfect.update(truth, truth)
    assert float(perfect.compute()["f5"]) == 100.0
    assert float(perfect.compute()["pa_mpvpe"]) == pytest.approx(0.0, abs=1e-3)
