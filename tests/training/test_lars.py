"""LARS: the steps of timm's, and nothing read on the host."""

import copy

import pytest
import timm.optim
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from batchformer.training.lars import Lars


def parameters():
    torch.manual_seed(0)
    shapes = [(4, 3), (5, 2, 3, 3), (2, 2)], [(4,), (5,)]
    matrices, vectors = ([torch.nn.Parameter(torch.randn(shape)) for shape in group] for group in shapes)
    with torch.no_grad():
        matrices[2].zero_()  # a weight without a norm takes the plain step
    return matrices, vectors


def groups(matrices, vectors):
    """One group with weight decay, one that is adapted without, one that is not adapted."""
    return [
        {"params": matrices[:1] + matrices[2:], "weight_decay": 0.1},
        {"params": matrices[1:2], "weight_decay": 0.0, "always_adapt": True},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.3},
    ]


def test_steps_are_timms_and_its_state_is_loaded():
    ours, theirs = parameters(), parameters()
    optimizers = Lars(groups(*ours), 0.5, momentum=0.9), timm.optim.Lars(groups(*theirs), 0.5, momentum=0.9)
    for number in range(4):
        for each in (ours, theirs):
            draw = torch.Generator().manual_seed(number)
            for weight in (*each[0], *each[1]):
                weight.grad = torch.randn(weight.shape, generator=draw)
        ours[1][1].grad = theirs[1][1].grad = None
        if number == 2:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", [Lars, timm.optim.Lars])
def test_the_learning_rate_may_be_a_tensor_that_only_the_device_reads(kind):
    """Fake tensors have no values, so whatever reads one on the host raises: timm's step does."""
    with FakeTensorMode():
        weights = parameters()
        optimizer = kind(groups(*weights), 0.5, momentum=0.9)
        for group in optimizer.param_groups:
            group["lr"] = torch.rand(())
        for weight in (*weights[0], *weights[1]):
            weight.grad = torch.ones_like(weight)
        if kind is Lars:
            for _ in range(2):
                optimizer.step()
            return
        with pytest.raises(DataDependentOutputException):
            optimizer.step()
