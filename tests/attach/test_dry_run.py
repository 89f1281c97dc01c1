"""Dry runs: the input is found or asked for, eval mode or training mode is judged, and nothing stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import batchformer as bf
from batchformer.errors import UserError

from .small_models import AuxiliaryHead, Blocks, tokens

QUIET = {"heads": 2, "dropout": 0.0}


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (96, 3), (256, 3)])
def test_a_network_of_one_own_size_is_run_dry(size: int, channels: int) -> None:
    side = size // 4
    model = nn.Sequential(nn.Conv2d(channels, 8, 4, 4), nn.Flatten(), nn.Linear(8 * side * side, 5)).train()
    attachment = bf.attach(model, after=["0"], **QUIET)
    images = torch.randn(3, channels, size, size)
    assert model(images).shape == (6, 5)
    attachment.detach()


def test_a_model_of_an_unusual_input_is_asked_to_say_it() -> None:
    model = Blocks()
    model.default_cfg = {}
    with pytest.raises(UserError, match=r"Blocks did not take a blank image.*default_cfg"):
        bf.attach(model, blocks=[1], heads=2)
    model.default_cfg = {"input_size": (5, 6)}
    bf.attach(model, blocks=[1], heads=2)


class Timed(Blocks):
    """Takes more than tokens, and reads it behind the insertion."""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.fc((self.blocks[1](self.blocks[0](self.embed(x))) + time[:, None, None]).mean(1))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_with_more_inputs_is_attached_to_by_an_example(by_name: bool) -> None:
    model, x, time = Timed().train(), tokens(), torch.arange(4.0)
    expected = model(x, time)
    with pytest.raises(UserError, match=r"missing 1 required .*'time'.*example_inputs="):
        bf.attach(model, blocks=[0], heads=2)
    with pytest.raises(UserError, match=r"did not take example_inputs= with 2 rows"):
        bf.attach(model, blocks=[0], heads=2, example_inputs=x)
    bf.attach(model, blocks=[0], heads=2, example_inputs={"x": x, "time": time} if by_name else (x, time))
    outputs = model(x, time=time) if by_name else model(x, time)
    torch.testing.assert_close(outputs[:4], expected)
    assert len(outputs) == 8


def test_an_example_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="no tensor with a batch axis"):
        bf.attach(Blocks(), blocks=[0], heads=2, example_inputs=3)


def test_attaching_asks_nothing_of_other_processes(recwarn: pytest.WarningsRecorder) -> None:
    """In dry runs the scope is local; that there is no process group is said when training begins."""
    attachment = bf.attach(Blocks(), blocks=[0, 2], heads=2, scope="global", share=True)
    assert not recwarn.list
    assert {point.module.scope for point in attachment.points} == {"global"}


class OwnLoss(AuxiliaryHead):
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = super().forward(images)
        return torch.stack([each.logsumexp(1).mean() for each in out]).sum() if self.training else out


def test_a_model_that_gives_a_loss_in_training_is_judged_by_eval_mode() -> None:
    bf.attach(model := OwnLoss().train(), after=["block"], **QUIET)
    assert model(torch.randn(4, 3, 8, 8)).ndim == 0


def test_a_dry_run_in_training_mode_leaves_nothing_behind() -> None:
    model = AuxiliaryHead().eval()
    state = copy.deepcopy(model.state_dict())
    seen = model.seen
    bf.attach(model, after=["block"], **QUIET)
    torch.testing.assert_close({name: model.state_dict()[name] for name in state}, state, rtol=0, atol=0)
    assert model.seen is seen
    assert model.calls == 0
    assert not any(part.training for part in model.modules())
