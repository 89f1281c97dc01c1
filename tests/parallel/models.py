"""Two small models with a BatchFormer attached: before the classifier, and at the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import batchformer as bf


class Tokens(nn.Module):
    """Three tokens for each image: fewer than the four processes of the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.default_cfg = {"input_size": (3, 4)}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x).tanh()).tanh().mean(1))


def make_token_model(scope: str) -> nn.Module:
    torch.manual_seed(0)
    model = Tokens().double()
    bf.attach(model, after=["block"], heads=2, dropout=0.0, layers=2, scope=scope)
    return model.train()


def make_classifier(scope: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    bf.attach(model, heads=2, dropout=0.0, scope=scope)
    return model.train()


def images_and_labels(total: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(total, 3, 4, dtype=torch.float64, generator=generator), torch.arange(total) % 3
