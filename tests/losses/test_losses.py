"""Each loss against the slow formula of its paper, one image and one class at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, LogitAdjustedLoss

COUNTS = [500, 120, 33, 7, 1]


@pytest.fixture
def logits():
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-1, 1)


@pytest.fixture
def targets():
    return torch.arange(12) % 5


def slow_softmax_loss(rows: list[list[float]], targets: list[int], weights: list[float]) -> float:
    total = 0.0
    for row, target in zip(rows, targets, strict=True):
        total -= weights[target] * math.log(math.exp(row[target]) / sum(math.exp(value) for value in row))
    return total / sum(weights[target] for target in targets)


def test_balanced_softmax_is_a_softmax_weighted_by_class_counts(logits, targets):
    slow = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        slow -= math.log(
            COUNTS[target] * math.exp(row[target]) / sum(n * math.exp(z) for n, z in zip(COUNTS, row, strict=True))
        )
    assert BalancedSoftmaxLoss(COUNTS)(logits, targets).item() == pytest.approx(slow / 12, rel=1e-6)


def test_logit_adjustment_is_balanced_softmax_unless_tau_says_otherwise(logits, targets):
    torch.testing.assert_close(
        LogitAdjustedLoss(COUNTS)(logits, targets), BalancedSoftmaxLoss(COUNTS)(logits, targets), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("tau", [0.0, 1.0, 2.5])
def test_logit_adjustment_adds_tau_times_the_log_prior(logits, targets, tau):
    rows = [[z + tau * math.log(n / sum(COUNTS)) for z, n in zip(row, COUNTS, strict=True)] for row in logits.tolist()]
    slow = slow_softmax_loss(rows, targets.tolist(), [1.0] * 5)
    assert LogitAdjustedLoss(COUNTS, tau)(logits, targets).item() == pytest.approx(slow, rel=1e-6)


def test_logit_adjustment_with_tau_one_is_balanced_softmax(logits, targets):
    torch.testing.assert_close(
        LogitAdjustedLoss(COUNTS, 1.0)(logits, targets), BalancedSoftmaxLoss(COUNTS)(logits, targets)
    )


@pytest.mark.parametrize("epoch", [0, 4, 5, 9])
def test_ldam_subtracts_margins_and_reweights_from_the_given_epoch_on(logits, targets, epoch):
    loss = LDAMLoss(COUNTS, max_margin=0.4, scale=20.0, reweight_epoch=5, beta=0.99)
    loss.set_epoch(epoch)
    margins = [0.4 * n**-0.25 / max(m**-0.25 for m in COUNTS) for n in COUNTS]
    rows = [
        [20.0 * (z - (margins[c] if c == target else 0.0)) for c, z in enumerate(row)]
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True)
    ]
    weights = [1 / ((1 - 0.99**n) / (1 - 0.99)) for n in COUNTS] if epoch >= 5 else [1.0] * 5
    assert loss(logits, targets).item() == pytest.approx(slow_softmax_loss(rows, targets.tolist(), weights), rel=1e-5)


def test_ldam_gives_the_rarest_class_the_largest_margin_and_deferred_weights_that_sum_to_the_classes():
    loss = LDAMLoss(COUNTS, max_margin=0.5, reweight_epoch=0)
    assert loss.margins.argmax() == 4
    assert loss.margins.max().item() == pytest.approx(0.5)
    assert loss.weights.sum().item() == pytest.approx(5.0)
    assert loss.weights.argmax() == 4


def test_ldam_changes_its_weights_in_place():
    loss = LDAMLoss(COUNTS, reweight_epoch=1)
    before = loss.weights.data_ptr()
    loss.set_epoch(1)
    assert loss.weights.data_ptr() == before
    assert not loss.weights.eq(1).all()
    loss.set_epoch(0)
    assert loss.weights.eq(1).all()


LOSSES = [BalancedSoftmaxLoss(COUNTS), LogitAdjustedLoss(COUNTS, 1.5), LDAMLoss(COUNTS, reweight_epoch=0)]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
class TestEveryLoss:
    def test_one_hot_rows_give_the_loss_of_class_ids(self, loss, logits, targets):
        torch.testing.assert_close(loss(logits, F.one_hot(targets, 5).double()), loss(logits, targets))

    def test_half_precision_logits_give_a_single_precision_loss(self, loss, logits, targets):
        value = loss(logits.bfloat16(), targets)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(loss(logits.float(), targets).item(), rel=2e-2)

    def test_leaves_nothing_in_the_state_dict(self, loss, logits, targets):
        assert loss.state_dict() == {}


@pytest.mark.parametrize("loss", LOSSES[:2], ids=lambda loss: type(loss).__name__)
def test_the_loss_of_mixed_labels_is_the_mixed_loss(loss, logits, targets):
    one_hot = F.one_hot(targets, 5).double()
    mixed = loss(logits, 0.3 * one_hot + 0.7 * one_hot.roll(1, 0))
    torch.testing.assert_close(mixed, 0.3 * loss(logits, targets) + 0.7 * loss(logits, targets.roll(1, 0)))


def test_ldam_mixes_margins_and_weights_with_the_labels(logits, targets):
    loss = LDAMLoss(COUNTS, reweight_epoch=0)
    one_hot = F.one_hot(targets, 5).double()
    soft = 0.3 * one_hot + 0.7 * one_hot.roll(1, 0)
    value = mass = 0.0
    for row, label in zip(logits, soft, strict=True):
        shifted = [loss.scale * (row[c] - label[c] * loss.margins[c]).item() for c in range(5)]
        log_sum = math.log(sum(math.exp(z) for z in shifted))
        for c in range(5):
            value -= (label[c] * loss.weights[c]).item() * (shifted[c] - log_sum)
            mass += (label[c] * loss.weights[c]).item()
    assert loss(logits, soft).item() == pytest.approx(value / mass, rel=1e-5)


@pytest.mark.parametrize("loss", [BalancedSoftmaxLoss, LogitAdjustedLoss, LDAMLoss])
def test_a_class_without_images_is_named(loss):
    with pytest.raises(UserError, match="class 1"):
        loss([10, 0, 3])


def test_a_beta_of_one_is_refused():
    with pytest.raises(UserError, match="beta"):
        LDAMLoss(COUNTS, beta=1.0)
