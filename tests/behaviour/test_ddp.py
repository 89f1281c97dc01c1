"""Promise 5 under DistributedDataParallel: two real processes over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchformer as bf
from batchformer.errors import UserError

from ..processes import run_in_processes


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator), torch.arange(4) % 3


def _gradients(model: nn.Module, forward: nn.Module, rank: int) -> list[torch.Tensor]:
    images, targets = _batch(rank)
    model.zero_grad()
    bf.TwoStreamLoss(F.cross_entropy)(forward(images), targets).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _work(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = _model()
    bf.attach(model, heads=2, dropout=0.0)
    gradients = _gradients(model, DistributedDataParallel(model), rank)
    plain = bf.detach(DistributedDataParallel(model))
    with pytest.raises(UserError, match="attach before wrapping"):
        bf.attach(DistributedDataParallel(_model()), heads=2)
    torch.save((gradients, list(plain.module.state_dict())), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_are_the_mean_over_processes_and_a_wrapped_model_takes_no_module(tmp_path: Path) -> None:
    run_in_processes(_work, 2, tmp_path)
    model = _model()
    bf.attach(model, heads=2, dropout=0.0)
    per_process = [_gradients(model, model, rank) for rank in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*per_process, strict=True)]
    for rank in range(2):
        gradients, keys = torch.load(tmp_path / f"{rank}.pt")
        assert len(gradients) == len(expected)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert keys == list(_model().state_dict())
