"""Losses: one per file, the formula in its docstring."""

from batchformer.losses.balanced_softmax import BalancedSoftmaxLoss
from batchformer.losses.distillation import DistillationLoss
from batchformer.losses.ldam import LDAMLoss
from batchformer.losses.logit_adjustment import LogitAdjustedLoss

__all__ = ["BalancedSoftmaxLoss", "DistillationLoss", "LDAMLoss", "LogitAdjustedLoss"]
