"""Frozen BatchNorm that keeps its scale and shift: timm's numbers, and never those of other buffers."""

import copy

import numpy as np
import pytest
import torch
from timm.layers import FrozenBatchNormAct2d

from batchformer.models.detector_backbone import CachedFrozenBatchNormAct2d


def filled(kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    module = kind(5)
    state = {name: torch.rand(value.shape, generator=generator) + 0.1 for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    return module


@pytest.fixture
def pair():
    return filled(CachedFrozenBatchNormAct2d), filled(FrozenBatchNormAct2d)


def agree(ours, theirs):
    x = torch.randn(2, 5, 3, 4, dtype=ours.weight.dtype)
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.square().sum().backward()
        results.append((out, leaf.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_outputs_and_gradients_are_those_of_timm(pair):
    agree(*pair)
    agree(*pair)
    assert pair[0]._cached is not None
    assert pair[0].state_dict().keys() == pair[1].state_dict().keys()


def test_other_buffers_are_noticed(pair):
    ours, theirs = pair
    agree(*pair)
    for module in pair:
        module.load_state_dict(filled(FrozenBatchNormAct2d, seed=1).state_dict())
    agree(*pair)
    for module in pair:
        module.running_var.mul_(2.0)
    agree(*pair)
    agree(ours.double(), theirs.double())


def test_a_buffer_in_the_place_of_another_is_noticed(pair):
    """Also where memory and version are those of the one before: as when memory was let go and comes again."""
    memory = np.ones(5, dtype=np.float32)
    for value in (1.0, 2.0):
        memory[:] = value
        for module in pair:
            module.weight = torch.from_numpy(memory)
        agree(*pair)


def test_copies_and_inference_go_their_own_ways(pair):
    ours, theirs = pair
    agree(*pair)
    other = copy.deepcopy(ours)
    other.weight.mul_(3.0)
    theirs_too = copy.deepcopy(theirs)
    theirs_too.weight.mul_(3.0)
    agree(other, theirs_too)
    agree(ours, theirs)
    fresh = filled(CachedFrozenBatchNormAct2d)
    with torch.inference_mode():
        fresh(torch.randn(2, 5, 3, 4))
    agree(fresh, theirs)


def test_compiled_without_a_break(pair):
    ours, theirs = pair
    x = torch.randn(2, 5, 3, 4)
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="aot_eager")(x), theirs(x))
