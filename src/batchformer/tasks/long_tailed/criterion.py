"""The loss a recipe names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from batchformer.errors import UserError
from batchformer.losses import BalancedSoftmaxLoss, LDAMLoss, LogitAdjustedLoss
from batchformer.training.options import LossOptions


def build_criterion(loss: LossOptions, class_counts: Sequence[int]) -> nn.Module:
    if loss.name == "cross_entropy":
        return nn.CrossEntropyLoss()
    if loss.name == "balanced_softmax":
        return BalancedSoftmaxLoss(class_counts)
    if loss.name == "logit_adjustment":
        return LogitAdjustedLoss(class_counts, loss.tau)
    if loss.name == "ldam":
        return LDAMLoss(class_counts, loss.max_margin, loss.scale, loss.reweight_epoch, loss.beta)
    raise UserError(f"loss.name={loss.name!r} must be one of cross_entropy, balanced_softmax, logit_adjustment, ldam.")
