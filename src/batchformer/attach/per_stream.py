"""Computations done separately for each stream: BatchNorm after an insertion, and the loss inside a detector."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from batchformer.attach.dry_run import argument_names
from batchformer.attach.insertion import InstanceForward, weak_reference
from batchformer.nn import BatchFormer
from batchformer.nn.streams import plain_count

BatchNormMode = Literal["separate", "joint"]
_ATTRIBUTE = "_loss_function"  # where transformers' models keep a loss of one's own
PROPOSAL_LOSS = "proposal_loss"  # a method of `models.TwoStageDeformableDetr`: what the encoder's proposals add to it
_ROWS_SECOND = ("outputs_class", "outputs_coord")  # (decoder layer, batch, query, ...), for the auxiliary losses


class SeparateNorm(InstanceForward):
    """A BatchNorm after the insertion: each stream has its own statistics; only plain rows update the running ones.

    Published code normalises both streams together (`batch_norm="joint"`): then plain rows are not what the plain model
    computes, and the running statistics, all that is left at test time, are those of a mixture.
    """

    def __init__(self, layer: nn.Module, module: BatchFormer, parent: nn.Module, name: str) -> None:
        super().__init__(layer)
        self.module, self._parent, self.child = module, weak_reference(parent), name

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        by_batch = self.layer.training or self.layer.running_mean is None
        if self.removed or not self.module.active or not by_batch:
            return self.original(x, *args, **kwargs)
        rows = x.shape[0]
        # with streams="split" half of two or three images is one, which has no statistics: both go together then
        if self.module.streams == "split" and (rows < 2 or rows // 2 * x[0, 0].numel() < 2):
            return self.original(x, *args, **kwargs)
        plain = plain_count(rows, self.module.streams)
        normal = self.original(x[:plain], *args, **kwargs)
        tracks, self.layer.track_running_stats = self.layer.track_running_stats, False  # type: ignore[assignment]
        try:
            related = self.original(x[plain:], *args, **kwargs)
        finally:
            self.layer.track_running_stats = tracks
        return torch.cat([normal, related])

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
        self._parent = weak_reference(state["_parent"])


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


def follow_replaced(norms: Iterable[SeparateNorm]) -> None:
    """Move those whose BatchNorm was replaced onto the one the model has now."""
    for norm in norms:
        if norm.replaced:
            norm.follow()


class MeanOfStreams(InstanceForward):
    """In the place of a detector's loss: the model's own loss of each stream, then their mean.

    The published code doubles the list of targets and divides by twice the boxes: the same mean, as long as there is a
    box. Without one (images of background only) the number of boxes is taken as 1, and a focal loss, a sum over all
    queries divided by it, would be the sum of both streams instead; likewise where the mean number of boxes of several
    processes is below 1. Here each stream is normalised by itself, so the mean it is, always; and the matching never
    compares predictions of one stream with the targets of the other.
    """

    def __init__(self, model: nn.Module, module: BatchFormer, method: str | None = None) -> None:
        """`method`: of a model that computes a part of its loss there, instead of its `loss_function`."""
        super().__init__(model, method or _ATTRIBUTE)
        self.module = module
        self.criterion: Any = None if method else model.loss_function
        own = getattr(type(model), method) if method else self.criterion
        self.names = argument_names(own.forward if isinstance(own, nn.Module) else own)
        self.losses: tuple[Tensor, Tensor] | None = None  # of plain and related rows, in the last training forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        logits, labels = given.get("logits"), given.get("labels")
        doubled = self.module.active and self.module.streams == "duplicate"
        if self.removed or not doubled or logits is None or labels is None or len(labels) != len(logits):
            return self._own(*args, **kwargs)
        rows = len(logits)
        half = plain_count(rows, "duplicate")
        parts = (
            {name: _rows_of(name, value, rows, 0, half) for name, value in given.items()},
            {name: _rows_of(name, value, rows, half, rows) for name, value in given.items()},
        )
        plain, related = (self._own(**part) for part in parts)
        losses = [one[0] if isinstance(one, tuple) else one for one in (plain, related)]
        self.losses = (losses[0].detach(), losses[1].detach())
        return _mean_of(plain, related)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.criterion is None else self.criterion(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "losses": None}


def _rows_of(name: str, value: Any, rows: int, start: int, end: int) -> Any:
    if isinstance(value, Tensor) and name in _ROWS_SECOND:
        return value[:, start:end]
    if isinstance(value, Tensor | list) and len(value) == rows:
        return value[start:end]
    return value


def _mean_of(plain: Any, related: Any) -> Any:
    """Numbers become their mean, rows (of auxiliary outputs) are stacked, whatever they are kept in."""
    if isinstance(plain, Tensor):
        return torch.cat([plain, related]) if plain.ndim else (plain + related) / 2
    if isinstance(plain, dict):
        return {key: _mean_of(value, related[key]) for key, value in plain.items()}
    if isinstance(plain, tuple | list):
        return type(plain)(_mean_of(a, b) for a, b in zip(plain, related, strict=True))
    return plain
