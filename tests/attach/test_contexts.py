"""Contexts that change a model for a while: modes, buffers, random state and attributes are then what they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchformer.attach.contexts import dry_run_state, evaluating, set_mode, temporary_attributes, untouched


class Counts(nn.Module):
    """Moves a buffer, replaces another, counts its calls, and has a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.dropout.eval()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.last = x[0].detach()
        self.calls += 1
        return self.dropout(self.norm(x))


class NeverSwitched(Counts):
    def train(self, mode: bool = True) -> Counts:
        raise AssertionError("the flag alone is to be set")


def in_training(model: nn.Module) -> AbstractContextManager[None]:
    return dry_run_state(model, training=True)


def state(model: nn.Module) -> dict[str, Any]:
    buffers = dict(model.named_buffers())
    return {
        "modes": [part.training for part in model.modules()],
        "which": {name: id(buffer) for name, buffer in buffers.items()},
        "values": {name: buffer.tolist() for name, buffer in buffers.items()},
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("context", [untouched, in_training], ids=lambda context: context.__name__)
@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_leaves_nothing_behind_also_where_it_fails(context: Callable[..., Any], fails: bool) -> None:
    model = Counts()
    before = state(model)
    with pytest.raises(RuntimeError) if fails else torch.no_grad(), context(model):
        model.norm.train()
        model.dropout.train()
        model(torch.randn(3, 4))
        if fails:
            raise RuntimeError
    assert state(model) == before


def test_numbers_that_a_dry_run_in_training_mode_counted_are_put_back() -> None:
    model = Counts()
    with in_training(model):
        assert not model.norm.training  # its statistics are not moved
        assert model.dropout.training
        model(torch.randn(3, 4))
    assert model.calls == 0


def test_evaluating_sets_the_flags_alone_and_puts_each_back() -> None:
    model = NeverSwitched()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [model.training, model.norm.training, model.dropout.training] == [True, True, False]


def test_the_seed_holds_inside_and_gradients_are_on() -> None:
    with torch.no_grad(), untouched(nn.Linear(2, 2), seed=3):
        assert torch.is_grad_enabled()
        drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))


def test_attributes_have_their_values_inside_only() -> None:
    module = nn.Dropout(0.5)
    with pytest.raises(RuntimeError), temporary_attributes({module: {"p": 0.0}}):  # noqa: PT012
        assert module.p == 0.0
        raise RuntimeError
    assert module.p == 0.5


def test_a_model_in_eval_mode_is_set_to_train_and_parts_of_a_training_one_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    set_mode(model.eval(), "train")
    assert all(module.training for module in model.modules())
    model[1].eval()  # frozen by its user
    set_mode(model, "train")
    assert not model[1].training
