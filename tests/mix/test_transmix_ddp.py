"""TransMix under DistributedDataParallel: two real processes over gloo. (Without timm: the second would import it.)"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import batchformer as bf

from ..processes import run_in_processes


class Tiny(nn.Module):
    """A vision transformer of one block, 8 x 8 pixels, patches of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], 1)
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0][:, 0])


def _step(rank: int, wrap: bool) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Tiny()
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    wrapped = DistributedDataParallel(model) if wrap else model
    mix = bf.mix.TransMix(wrapped, 4, generator=torch.Generator().manual_seed(rank))
    mixed = mix(images, torch.arange(5) % 4)
    logits = wrapped(mixed.images)
    targets = mixed.targets()
    F.cross_entropy(logits, targets).backward()
    return targets, [p.grad for p in model.parameters()]


def _work(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save(_step(rank, wrap=True), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_every_process_mixes_by_its_own_attention_and_gradients_are_averaged(tmp_path: Path):
    run_in_processes(_work, 2, tmp_path)
    made = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    alone = [_step(rank, wrap=False) for rank in range(2)]
    expected = [(a + b) / 2 for a, b in zip(alone[0][1], alone[1][1], strict=True)]
    for (targets, gradients), (own_targets, own) in zip(made, alone, strict=True):
        torch.testing.assert_close(targets, own_targets)
        torch.testing.assert_close(gradients, expected)
        assert not torch.equal(own[0], expected[0])
