"""The losses of long-tailed recognition that a recipe may choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, LogitAdjustedLoss


@dataclass
class LossOptions:
    """The loss and its hyperparameters.

    Args:
        name: the loss; ldam also turns the classifier into a cosine classifier.
        tau: logit_adjustment: strength of the adjustment.
        max_margin: ldam: margin of the rarest class.
        scale: ldam: factor of the cosines.
        reweight_epoch: ldam: first epoch with class weights; null means never.
        beta: ldam: of the effective number behind the class weights.
    """

    name: Literal["cross_entropy", "balanced_softmax", "logit_adjustment", "ldam"] = "balanced_softmax"
    tau: float = 1.0
    max_margin: float = 0.5
    scale: float = 30.0
    reweight_epoch: int | None = None
    beta: float = 0.9999


def build_criterion(loss: LossOptions, class_counts: Sequence[int], reduction: str = "mean") -> nn.Module:
    """The loss; with `reduction="none"` that of each row, which LDAM does not give."""
    if loss.name == "cross_entropy":
        return nn.CrossEntropyLoss(reduction=reduction)
    if loss.name == "balanced_softmax":
        return BalancedSoftmaxLoss(class_counts, reduction)
    if loss.name == "logit_adjustment":
        return LogitAdjustedLoss(class_counts, loss.tau, reduction)
    if loss.name == "ldam" and reduction == "mean":
        return LDAMLoss(class_counts, loss.max_margin, loss.scale, loss.reweight_epoch, loss.beta)
    raise UserError(f"loss.name={loss.name!r} must be one of cross_entropy, balanced_softmax, logit_adjustment, ldam.")
