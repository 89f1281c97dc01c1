"""BatchNorm behind an insertion: each stream by its own statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.insertion import InstanceForward, weakly
from batchformer.errors import UserError
from batchformer.nn import BatchFormer
from batchformer.nn.streams import plain_count

BatchNormMode = Literal["separate", "joint"]


class SeparateNorm(InstanceForward):
    """A BatchNorm behind the insertion: each stream by its own statistics; only plain rows move the running ones.

    Published code normalises both streams together (`batch_norm="joint"`): then plain rows are not what the plain model
    computes, and the running statistics, all that is left at test time, are those of a mixture.
    """

    def __init__(self, layer: nn.Module, module: BatchFormer, parent: nn.Module, name: str) -> None:
        super().__init__(layer)
        self.module, self._parent, self.child = module, weakly(parent), name

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        by_batch = self.layer.training or self.layer.running_mean is None
        if self.removed or not self.module.active or not by_batch or self.too_few(x):
            return self.original(x, *args, **kwargs)
        plain = plain_count(x.shape[0], self.module.streams)
        normal = self.original(x[:plain], *args, **kwargs)
        tracks, self.layer.track_running_stats = self.layer.track_running_stats, False  # type: ignore[assignment]
        try:
            related = self.original(x[plain:], *args, **kwargs)
        finally:
            self.layer.track_running_stats = tracks
        return torch.cat([normal, related])

    def too_few(self, x: Tensor) -> bool:
        """With streams="split" half of two or three images is one, which has no statistics: both go together then."""
        rows = x.shape[0]
        return self.module.streams == "split" and (rows < 2 or rows // 2 * x[0, 0].numel() < 2)

    @property
    def parent(self) -> Any:
        """What the BatchNorm is a part of; held weakly, since it may be the model (see `InstanceForward`)."""
        return None if self._parent is None else self._parent()

    @property
    def replaced(self) -> bool:
        """Whether another BatchNorm has taken the place of the one it was put on (`convert_sync_batchnorm` does so)."""
        parent = self.parent
        now = None if parent is None else parent._modules.get(self.child)
        return now is not self.layer and isinstance(now, _BatchNorm)

    def follow(self) -> None:
        self.take_away()
        self.layer = self.parent.get_submodule(self.child)
        self.put()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._parent = weakly(state["_parent"])


def separate_norms(
    model: nn.Module, module: BatchFormer, paths: Iterable[str], batch_norm: BatchNormMode
) -> list[SeparateNorm]:
    """One for each BatchNorm among `paths`; none where all rows are related or both streams go together."""
    if batch_norm == "joint" or module.streams == "single":
        return []
    norms = []
    for path in paths:
        above, _, name = path.rpartition(".")
        if isinstance(layer := model.get_submodule(path), _BatchNorm):
            norms.append(SeparateNorm(layer, module, model.get_submodule(above), name))
    return norms


def check_batch_norm(batch_norm: Any) -> None:
    if batch_norm not in get_args(BatchNormMode):
        raise UserError(f'batch_norm={batch_norm!r} must be "separate" or "joint" (as published).')
