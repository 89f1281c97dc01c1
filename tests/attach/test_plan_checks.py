"""What a plan is checked for in dry runs: images stay apart, related outputs are read, and rows are images."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import batchformer as bf
from batchformer.errors import UserError

from .small_models import TOKENS, Net, trace

QUIET = {"heads": 2, "dropout": 0.0}


class Windows(nn.Module):
    """Four windows of each image attend with one query, which `repeat` gives to those of others (timm's GCViT)."""

    def __init__(self, interleave: bool) -> None:
        super().__init__()
        self.patch, self.query, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 5)
        self.interleave = interleave
        self.default_cfg = {"input_size": (3, 16, 16)}

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).transpose(1, 2)
        query = self.query(tokens.mean(1, keepdim=True))
        windows = tokens.reshape(-1, 4, 8)
        query = query.repeat_interleave(4, 0) if self.interleave else query.repeat(4, 1, 1)
        seen = ((query @ windows.mT).softmax(-1) @ windows).reshape(-1, 4, 8)
        return self.head(seen.mean(1))


def test_a_model_whose_images_see_each_other_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match=r"Windows lets the images of a batch influence each other after 'patch'"):
        bf.attach(Windows(interleave=False), after=["patch"], **QUIET)
    bf.attach(Windows(interleave=False), after=["patch"], streams="split", **QUIET)
    model = Windows(interleave=True).train()
    plain, images = copy.deepcopy(model), torch.randn(3, 3, 16, 16)
    attachment = bf.attach(model, after=["patch"], **QUIET)
    torch.testing.assert_close(attachment.plain(model(images)), plain(images))


class Forked(nn.Module):
    """Its layer gives two tensors, of which the model reads the second; `read` says whether the first as well."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(x)

    def __init__(self, read: bool, checkpointed: bool) -> None:
        super().__init__()
        self.fork, self.fc, self.read, self.checkpointed = self.Fork(), nn.Linear(8, 3), read, checkpointed
        nn.init.zeros_(self.fc.weight)  # as many a head begins: no output shows what reaches it

    def forward(self, x: Tensor) -> Tensor:
        one, two = checkpoint(self.fork, x, use_reentrant=True) if self.checkpointed else self.fork(x)
        return self.fc((one + two if self.read else two).mean(1))


def test_a_layer_whose_first_tensor_nobody_reads_is_refused() -> None:
    model = Forked(read=False, checkpointed=False)
    with pytest.raises(UserError, match="'fork' gives several tensors, and Forked does not read the first one"):
        bf.attach(model, after="fork", heads=2, example_inputs=TOKENS)
    assert trace(model) == [None]


def test_one_that_another_output_reads_is_not() -> None:
    class Both(Forked):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            one, two = self.fork(x)
            return {"second": self.fc(two.mean(1)), "first": one}

    bf.attach(Both(read=False, checkpointed=False), after="fork", heads=2, example_inputs=TOKENS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_one_that_is_read_or_cannot_be_followed_is_not(checkpointed: bool, trainable: bool) -> None:
    model = Forked(read=True, checkpointed=checkpointed).requires_grad_(trainable).train()
    bf.attach(model, after="fork", heads=2, example_inputs=TOKENS)
    assert len(model(TOKENS)) == 8
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("streams", ["duplicate", "split", "single"])
def test_rows_that_are_no_images_are_refused(streams: str) -> None:
    """Transformers with the sequence first have tokens there; with as many images as tokens nothing else would tell."""

    class SequenceFirst(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.high(self.low(x).transpose(0, 1)).mean(0))

    with pytest.raises(UserError, match="'high' does not have the images on its first axis"):
        bf.attach(SequenceFirst(), after="high", heads=2, example_inputs=TOKENS, streams=streams)
