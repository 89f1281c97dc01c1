"""The losses of RIDE against their formulas, one expert, one image and one class at a time."""

import math

import pytest
import torch

from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, RideLoss, RoutingLoss

COUNTS = [500, 120, 33, 7]
ROWS, EXPERTS, CLASSES = 6, 3, 4
SCALE, MARGIN, BETA, FACTOR = 30.0, 0.5, 0.9999, 0.05


def logits():
    cosines = torch.rand(ROWS, EXPERTS, CLASSES, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (SCALE * cosines / 6).requires_grad_()


LABELS = torch.tensor([0, 1, 2, 3, 3, 0])


def ride(epoch=0, **options):
    base = LDAMLoss(COUNTS, MARGIN * SCALE, 1.0, 5, BETA)
    loss = RideLoss(base, COUNTS, temperature_factor=FACTOR, reweight_epoch=5, **{"diversity": -0.45, **options})
    loss.set_epoch(epoch)
    return loss


def softmax(values):
    powers = [torch.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def slow(z, labels, late, diversity, collaborative=False):
    """The sum over experts of margins, weights and KL(mean || expert), by loops."""
    rarest = min(COUNTS)
    margins = [MARGIN * (rarest / n) ** 0.25 for n in COUNTS]
    effective = [(1 - BETA) / (1 - BETA**n) for n in COUNTS]
    weights = [CLASSES * w / sum(effective) if late else 1.0 for w in effective]
    share = [1 - FACTOR + FACTOR * CLASSES * n / sum(COUNTS) for n in COUNTS]
    temperature = [t / max(share) if late else 1.0 for t in share]
    total = torch.zeros(())
    for e in range(EXPERTS):
        entropy, mass, distance = torch.zeros(()), 0.0, torch.zeros(())
        for row, y in enumerate(labels.tolist()):
            mean = [sum(z[row, k, c] for k in range(EXPERTS)) / EXPERTS for c in range(CLASSES)]
            judged = mean if collaborative else list(z[row, e])
            shown = [value - SCALE * margins[y] if c == y else value for c, value in enumerate(judged)]
            entropy = entropy - weights[y] * torch.log(softmax(shown)[y])
            mass += weights[y]
            p = softmax([value.detach() / t for value, t in zip(mean, temperature, strict=True)])
            q = softmax([value / t for value, t in zip(z[row, e], temperature, strict=True)])
            distance = distance + sum(a * torch.log(a / b) for a, b in zip(p, q, strict=True))
        total = total + entropy / mass + diversity * (sum(temperature) / CLASSES) ** 2 * distance / len(labels)
    return total


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("diversity", "collaborative"), [(-0.45, False), (0.2, False), (0.0, False), (0.0, True)])
def test_value_and_gradient_are_those_of_the_formula(late, diversity, collaborative):
    fast, reference = logits(), logits()
    loss = ride(5 if late else 4, diversity=diversity, collaborative=collaborative)(fast, LABELS)
    expected = slow(reference, LABELS, late, diversity, collaborative)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.grad, reference.grad, rtol=1e-4, atol=1e-6)


def test_without_diversity_is_not_the_collaborative_loss():
    z = logits()
    alone, together = (ride(diversity=0.0, collaborative=on)(z, LABELS) for on in (False, True))
    parts = [LDAMLoss(COUNTS, MARGIN * SCALE, 1.0)(z[:, k], LABELS) for k in range(EXPERTS)]
    torch.testing.assert_close(alone, sum(parts))
    assert not torch.isclose(alone, together)


def test_the_late_epochs_change_the_same_tensors():
    """A captured CUDA graph reads them where they were when it was captured."""
    loss = ride()
    places = [buffer.data_ptr() for buffer in loss.buffers()]
    before = loss.temperature.clone()
    loss.set_epoch(5)
    assert [buffer.data_ptr() for buffer in loss.buffers()] == places
    assert before.eq(1).all()
    assert loss.temperature.argmax() == 0
    assert loss.temperature.max() == 1
    assert loss.base.weights.argmax() == 3
    loss.set_epoch(4)
    assert loss.temperature.eq(1).all()


@pytest.mark.parametrize("times_experts", [False, True])
def test_a_teacher_is_compared_with_the_mean(times_experts):
    z, teacher, tau = logits(), torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)), 1.5
    taught = ride(teacher_weight=0.7, teacher_temperature=tau, times_experts=times_experts)(z, (LABELS, teacher))
    distance = 0.0
    for row, told in zip(z.detach().mean(1), teacher, strict=True):
        p, q = softmax(told / tau), softmax(row / tau)
        distance += sum(float(a) * math.log(a / b) for a, b in zip(p, q, strict=True)) / ROWS
    expected = ride()(z, LABELS) + 0.7 * tau**2 * distance
    torch.testing.assert_close(taught, (EXPERTS if times_experts else 1) * expected, rtol=1e-5, atol=1e-5)


def test_any_loss_of_one_network_is_the_loss_of_an_expert():
    z = logits()
    loss = RideLoss(BalancedSoftmaxLoss(COUNTS), COUNTS, diversity=0.0)(z, LABELS)
    torch.testing.assert_close(loss, sum(BalancedSoftmaxLoss(COUNTS)(z[:, k], LABELS) for k in range(EXPERTS)))


def test_a_class_without_images_is_named():
    with pytest.raises(UserError, match=r"RIDE cannot handle classes without training images \(class 2\)"):
        RideLoss(torch.nn.CrossEntropyLoss(), [5, 3, 0])


def test_the_router_learns_where_a_later_expert_helps():
    torch.manual_seed(0)
    scores, right = torch.randn(40, 3), torch.rand(40, 4) < 0.5
    total = 0.0
    for row in range(40):
        for k in range(3):
            helps = not right[row, k] and any(right[row, later] for later in range(k + 1, 4))
            chance = 1 / (1 + math.exp(-scores[row, k]))
            total -= 100 * math.log(chance) if helps else math.log(1 - chance)
    assert RoutingLoss(100.0)(scores, right).item() == pytest.approx(total / 120, rel=1e-5)


def test_the_losses_run_without_reading_anything_back():
    """In one graph of torch's compiler, which breaks where the host reads a value."""
    z, teacher = logits(), torch.randn(ROWS, CLASSES)
    for loss, inputs in (
        (ride(teacher_weight=1.0), (z, (LABELS, teacher))),
        (RoutingLoss(), (z[:, :2, 0], z[:, :, 0] > 0)),
    ):
        compiled = torch.compile(loss, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))
