"""Small models that several tests of this folder attach to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import batchformer as bf


class Blocks(nn.Module):
    """A tiny token model; `captures` notes the batch size first, as XCiT does for its class token."""

    def __init__(self, captures: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.fc = nn.Linear(8, 3)
        self.captures = captures
        self.default_cfg = {"input_size": (5, 6)}  # how timm's models give their input size

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.captures:
            x = torch.cat([torch.zeros(batch, 1, 8), x], dim=1)
        return self.fc(x.mean(1))


def tokens(count: int = 4) -> Tensor:
    return torch.randn(count, 5, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two token layers, of which the list `layers` is another name, and a classifier that is `head` as well."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.low, self.high])
        self.fc = self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.high(self.low(x)).mean(1))


TOKENS = torch.randn(4, 5, 6)


# a dry run finds the tokens by itself nowhere, since the model takes no images
PLACES = [{"before": "fc", "heads": 2}, {"after": "high", "heads": 2, "example_inputs": TOKENS}]


def trace(model: nn.Module) -> list[object]:
    """Whatever attach leaves on a model."""
    hooks = [hook for part in model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]
    return hooks + [part for part in model.modules() if "forward" in part.__dict__] + [bf.attachment_of(model)]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.head_a, self.head_b = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.head_a(x), self.head_b(x)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class AuxiliaryHead(nn.Module):
    """A second head for training alone, as GoogLeNet's; it counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.block = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 1)
        self.auxiliary = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5))
        self.head = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.default_cfg = {"input_size": (3, 8, 8)}

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = self.block(self.patch(images)).mean((2, 3))
        if not self.training:
            return (self.head(x),)
        self.seen += len(images)
        self.calls += 1
        return self.head(x), self.auxiliary(x)
