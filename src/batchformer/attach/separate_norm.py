"""BatchNorm behind an insertion: each stream by its own statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.insertion import InstanceForward
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.streams import plain_count

BatchNormMode = Literal["separate", "joint"]


class SeparateNorm(InstanceForward):
    """A BatchNorm behind the insertion: each stream by its own statistics; only plain rows move the running ones.

    Published code normalises both streams together (`batch_norm="joint"`): then plain rows are not what the plain model
    computes, and the running statistics, all that is left at test time, are those of a mixture.
    """

    def __init__(self, layer: nn.Module, module: BatchFormer, path: str) -> None:
        super().__init__(layer)
        self.module, self.path = module, path

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = plain_count(x.shape[0], self.module.streams)
        if self.removed or not self.module.active or not self.layer.training or plain == x.shape[0]:
            return self.original(x, *args, **kwargs)
        normal = self.original(x[:plain], *args, **kwargs)
        tracks, self.layer.track_running_stats = self.layer.track_running_stats, False  # type: ignore[assignment]
        try:
            related = self.original(x[plain:], *args, **kwargs)
        finally:
            self.layer.track_running_stats = tracks
        return torch.cat([normal, related])

    def move_to(self, layer: nn.Module) -> None:
        """To the layer that stands in the place of the one it was put on."""
        self.take_away()
        self.layer = layer
        self.put()


def separate_norms(
    model: nn.Module, module: BatchFormer, paths: Iterable[str], batch_norm: BatchNormMode
) -> list[SeparateNorm]:
    """One for each BatchNorm among `paths`; none where all rows are related or both streams go together."""
    if batch_norm == "joint" or module.streams == "single":
        return []
    named = [(path, model.get_submodule(path)) for path in paths]
    return [SeparateNorm(layer, module, path) for path, layer in named if isinstance(layer, _BatchNorm)]


def check_batch_norm(batch_norm: Any) -> None:
    if batch_norm not in get_args(BatchNormMode):
        raise UserError(f'batch_norm={batch_norm!r} must be "separate" or "joint" (as published).')


def follow_replaced(model: nn.Module, norms: list[SeparateNorm]) -> None:
    """Back onto the model's BatchNorms, where somebody has replaced them since (`convert_sync_batchnorm` does).

    That replaces all of them or none, so it is enough to look at the first.
    """
    if norms and model.get_submodule(norms[0].path) is not norms[0].layer:
        for norm in norms:
            norm.move_to(model.get_submodule(norm.path))
