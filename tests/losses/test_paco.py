"""PaCo's loss against the definition, written out row by row, and what it becomes at its limits."""

import math

import pytest
import torch
import torch.nn.functional as F

from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, PaCoLoss

COUNTS = [50, 20, 5, 2]
ROWS, SAMPLES, DIM = 6, 14, 5


def inputs():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, len(COUNTS), generator=draw, dtype=torch.float64)
    targets = torch.tensor([0, 1, 0, 2, 3, 0])
    others = torch.randn(SAMPLES - ROWS, DIM, generator=draw, dtype=torch.float64)
    anchors = torch.randn(ROWS, DIM, generator=draw, dtype=torch.float64)
    others_are = torch.tensor([0, 1, 1, 2, 0, 0, 1, 1])  # class 3 has no contrast but the anchor itself
    return [x.float().requires_grad_() for x in (logits, anchors, others)], targets, others_are


def slow(logits, anchors, others, targets, others_are, own, alpha, beta, gamma, temperature):
    """One anchor at a time, one contrast at a time; in float64."""
    logits, anchors, others = (x.double() for x in (logits, anchors, others))
    rows, labels = [None] * SAMPLES, [None] * SAMPLES
    for i, place in enumerate(own):
        rows[place], labels[place] = anchors[i], int(targets[i])
    rest = [place for place in range(SAMPLES) if rows[place] is None]
    for place, other, label in zip(rest, others, others_are.tolist(), strict=True):
        rows[place], labels[place] = other, label
    total = torch.zeros((), dtype=torch.float64)
    for i in range(ROWS):
        y = int(targets[i])
        adjusted = [logits[i, c] + math.log(n / sum(COUNTS)) for c, n in enumerate(COUNTS)]
        similar = {j: (anchors[i] * rows[j]).sum() / temperature for j in range(SAMPLES) if j != own[i]}
        denominator = sum(z.exp() for z in adjusted) + gamma * sum(s.exp() for s in similar.values())
        summed, weight = beta * (adjusted[y].exp() / denominator).log(), beta
        for j, s in similar.items():
            if labels[j] == y:
                summed, weight = summed + alpha * (s.exp() / denominator).log(), weight + alpha
        total = total - summed / weight
    return total / ROWS


@pytest.mark.parametrize("own", [[0, 1, 2, 3, 4, 5], [1, 3, 5, 7, 9, 11]])  # alone, and the second of two processes
@pytest.mark.parametrize("weights", [(0.01, 1.0, 1.0, 0.5), (0.3, 0.5, 0.2, 1.0), (1.0, 0.0, 1.0, 0.7)])
def test_values_and_gradients_are_those_of_the_definition(own, weights):
    (logits, anchors, others), targets, others_are = inputs()
    rest = [place for place in range(SAMPLES) if place not in own]
    order = torch.tensor([*own, *rest]).argsort()
    if weights[1] == 0:  # then each anchor needs a contrast of its class
        targets = torch.where(targets == 3, 0, targets)
    contrasts = torch.cat([anchors, others])[order]
    labels = torch.cat([targets, others_are])[order]
    found = PaCoLoss(COUNTS, *weights)(logits, targets, anchors, contrasts, labels, torch.tensor(own))
    expected = slow(logits, anchors, others, targets, others_are, own, *weights)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    leaves = [logits, anchors, others]
    for ours, theirs in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_without_contrasts_it_is_balanced_softmax():
    (logits, anchors, others), targets, others_are = inputs()
    contrasts, labels = torch.cat([anchors, others]), torch.cat([targets, others_are])
    loss = PaCoLoss(COUNTS, alpha=0.0, gamma=0.0)(logits, targets, anchors, contrasts, labels, torch.arange(ROWS))
    torch.testing.assert_close(loss, BalancedSoftmaxLoss(COUNTS)(logits, targets))


def test_an_anchor_is_not_contrasted_with_itself():
    (logits, anchors, others), targets, others_are = inputs()
    contrasts, labels = torch.cat([F.normalize(anchors, dim=1), others]).detach(), torch.cat([targets, others_are])
    given = logits[:1], targets[:1], anchors[:1], contrasts, labels, torch.arange(1)
    before = PaCoLoss(COUNTS)(*given)
    contrasts[0] = 100.0
    assert torch.equal(PaCoLoss(COUNTS)(*given), before)


def test_half_precision_around_it_changes_nothing():
    (logits, anchors, others), targets, others_are = inputs()
    given = (logits, targets, anchors, torch.cat([anchors, others]), torch.cat([targets, others_are]))
    plain = PaCoLoss(COUNTS)(*given, torch.arange(ROWS))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(PaCoLoss(COUNTS)(*given, torch.arange(ROWS)), plain)


@pytest.mark.parametrize(
    "options", [{"alpha": -0.5}, {"gamma": -1.0}, {"alpha": 0.0, "beta": 0.0}, {"temperature": 0.0}]
)
def test_weights_that_make_no_loss_are_refused(options):
    with pytest.raises(UserError, match="PaCo: alpha="):
        PaCoLoss(COUNTS, **options)


def test_it_leaves_nothing_in_the_state_dict():
    assert not PaCoLoss(COUNTS).state_dict()


def test_a_class_without_images_is_named():
    with pytest.raises(UserError, match=r"PaCo cannot handle classes without training images \(class 1\)"):
        PaCoLoss([3, 0, 2])
