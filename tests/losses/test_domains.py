"""Penalties between domains against slow formulas, and which rows of two streams belong to which domain."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from batchformer.losses import coral_penalty, irm_penalty, margin_disparity, rows_by_domain, vrex_penalty


def test_rows_of_both_streams_stay_with_their_domain():
    plain = torch.tensor([10, 11, 20, 21, 30, 31])
    both = torch.cat([plain, plain + 100])
    grouped = rows_by_domain(both, domains=3, streams=2)
    assert grouped.tolist() == [[10, 11, 110, 111], [20, 21, 120, 121], [30, 31, 130, 131]]
    assert rows_by_domain(plain, domains=3).tolist() == [[10, 11], [20, 21], [30, 31]]


def test_released_grouping_mixes_domains():
    plain = torch.tensor([10, 11, 20, 21, 30, 31])
    mixed = rows_by_domain(torch.cat([plain, plain + 100]), domains=3, streams=2, mixed=True)
    assert mixed.tolist() == [[10, 11, 20, 21], [30, 31, 110, 111], [120, 121, 130, 131]]


def test_coral_is_the_mean_over_pairs_of_differences_of_means_and_covariances():
    torch.manual_seed(0)
    features = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    slow = []
    for a, b in itertools.combinations(features, 2):
        covariances = [torch.cov(each.T) for each in (a, b)]
        slow.append((a.mean(0) - b.mean(0)).square().mean() + (covariances[0] - covariances[1]).square().mean())
    wanted = torch.stack(slow).mean()
    found = coral_penalty(features)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(value, features, retain_graph=True)[0] for value in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_covariances_are_in_float32_under_autocast():
    torch.manual_seed(0)
    features = torch.randn(3, 7, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = coral_penalty(features)
    assert torch.equal(found, coral_penalty(features))


def test_irm_is_the_product_of_the_slopes_of_even_and_odd_rows():
    torch.manual_seed(0)
    logits = torch.randn(3, 6, 4, requires_grad=True)
    labels = torch.randint(4, (3, 6))
    slow = []
    for z, y in zip(logits, labels, strict=True):
        scale = torch.ones((), requires_grad=True)
        slopes = [
            torch.autograd.grad(F.cross_entropy(z[k::2] * scale, y[k::2]), scale, create_graph=True)[0] for k in (0, 1)
        ]
        slow.append(slopes[0] * slopes[1])
    wanted = torch.stack(slow).mean()
    found = irm_penalty(logits, labels)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_vrex_is_the_variance_of_the_risks():
    assert float(vrex_penalty(torch.tensor([1.0, 2.0, 6.0]))) == pytest.approx(((1 - 3) ** 2 + 1 + 9) / 3)


def test_margin_disparity_by_hand():
    torch.manual_seed(0)
    source, source_adversary, target, target_adversary = torch.randn(4, 5, 3)
    slow = 4 * sum(-source_adversary[k].log_softmax(0)[source[k].argmax()] for k in range(5)) / 5
    slow = slow - sum((1 - target_adversary[k].softmax(0)[target[k].argmax()]).log() for k in range(5)) / 5
    found = margin_disparity(source, source_adversary, target, target_adversary, margin=4.0)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=1e-5)


def test_the_classifier_is_not_changed_through_what_the_adversary_is_asked():
    outputs = [torch.randn(5, 3, requires_grad=True) for _ in range(4)]
    margin_disparity(*outputs).backward()
    assert outputs[0].grad is None
    assert outputs[2].grad is None
    assert outputs[1].grad is not None
    assert outputs[3].grad is not None
