"""The loss over both streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.nn.streams import plain_rows, related_rows, repeat_targets


class TwoStreamLoss(nn.Module):
    """Any criterion on the outputs of an attached model: targets are repeated to match the rows.

    `scale="mean"` is Algorithm 1: the criterion over the 2B rows stacked, so the mean of both streams.
    `scale="released"` is what the released BalancedSoftmax code computes, L_related + L_plain + L_stacked, which for a
    criterion that averages is 1.5 (L_plain + L_related): three times the mean. It multiplies the learning rate of
    everything by three, in effect. Where there is one stream only (eval, baseline, `streams="single"`) both are the
    criterion itself. A criterion that compares rows or knows them by their place (contrastive, JSD over augmentation
    splits) is no mean over rows: compute that for each stream by itself (docs/attach.md).
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor], scale: Literal["mean", "released"] = "mean") -> None:
        super().__init__()
        if scale not in ("mean", "released"):
            raise UserError(f'scale={scale!r} must be "mean" (Algorithm 1) or "released" (the published code).')
        if isinstance(criterion, type) or not callable(criterion):
            raise UserError(
                f"TwoStreamLoss needs something it can call with outputs and targets, got {criterion!r}: make the "
                "criterion first, TwoStreamLoss(nn.CrossEntropyLoss())."
            )
        self.criterion, self.scale = criterion, scale

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        repeated = repeat_targets(targets, outputs)
        if self.scale == "mean" or repeated is targets:
            return self.criterion(outputs, repeated)
        return 1.5 * (self.criterion(plain_rows(outputs), targets) + self.criterion(related_rows(outputs), targets))

    def extra_repr(self) -> str:
        return f"scale={self.scale!r}"
