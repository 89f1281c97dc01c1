"""One place of insertion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from batchformer.attach.after import After
from batchformer.attach.insertion import InstanceForward, Once
from batchformer.nn import BatchFormer


class Point:
    """One place of insertion: the module, what was put on the submodules of `paths`, and what counts its rows."""

    def __init__(
        self, paths: tuple[str, ...], module: BatchFormer, insertions: Sequence[InstanceForward], feature: Once | After
    ) -> None:
        self.paths, self.module, self.insertions, self.feature = paths, module, list(insertions), feature

    @property
    def side(self) -> str:
        return "after" if isinstance(self.feature, After) else "before"

    def __repr__(self) -> str:
        return f"Point({self.side}={' and '.join(self.paths)}, dim={self.module.dim})"


def move_beside(module: nn.Module, parts: Sequence[nn.Module]) -> None:
    """To the device and precision of the first of the parts that has weights: those of one model may differ."""
    weights = (p for part in parts for p in part.parameters() if p.is_floating_point())
    weight = next(weights, torch.empty(0))
    module.to(device=weight.device, dtype=weight.dtype)
