"""The loss that transformers' detectors compute inside `forward`, as the mean over both streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach.insertion import InstanceForward
from batchformer.attach.padding import argument_names
from batchformer.nn import BatchFormer
from batchformer.nn.streams import plain_count

_ATTRIBUTE = "_loss_function"  # where transformers' models keep a loss of one's own
PROPOSAL_LOSS = "proposal_loss"  # a method of `models.TwoStageDeformableDetr`: what the encoder's proposals add to it
_ROWS_SECOND = ("outputs_class", "outputs_coord")  # (decoder layer, batch, query, ...), for the auxiliary losses


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
            {name: _part(name, value, rows, 0, half) for name, value in given.items()},
            {name: _part(name, value, rows, half, rows) for name, value in given.items()},
        )
        plain, related = (self._own(**part) for part in parts)
        losses = [one[0] if isinstance(one, tuple) else one for one in (plain, related)]
        self.losses = (losses[0].detach(), losses[1].detach())
        return _joined(plain, related)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.criterion is None else self.criterion(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "losses": None}


def _part(name: str, value: Any, rows: int, start: int, end: int) -> Any:
    if isinstance(value, Tensor) and name in _ROWS_SECOND:
        return value[:, start:end]
    if isinstance(value, Tensor | list) and len(value) == rows:
        return value[start:end]
    return value


def _joined(plain: Any, related: Any) -> Any:
    """Numbers become their mean, rows (of auxiliary outputs) are stacked, whatever they are kept in."""
    if isinstance(plain, Tensor):
        return torch.cat([plain, related]) if plain.ndim else (plain + related) / 2
    if isinstance(plain, dict):
        return {key: _joined(value, related[key]) for key, value in plain.items()}
    if isinstance(plain, tuple | list):
        return type(plain)(_joined(a, b) for a, b in zip(plain, related, strict=True))
    return plain
