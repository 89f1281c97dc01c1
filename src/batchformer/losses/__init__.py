"""Losses, the formula of each in its docstring."""

from batchformer.losses.classification import (
    BalancedSoftmaxLoss,
    DistillationLoss,
    LDAMLoss,
    LogitAdjustedLoss,
    checked_counts,
)
from batchformer.losses.domains import (
    coral_penalty,
    irm_penalty,
    margin_disparity,
    rows_by_domain,
    vrex_penalty,
)
from batchformer.losses.zero_shot import gradient_penalty, supervised_contrast

__all__ = ["BalancedSoftmaxLoss", "DistillationLoss", "LDAMLoss", "LogitAdjustedLoss", "checked_counts",
           "coral_penalty", "gradient_penalty", "irm_penalty", "margin_disparity", "rows_by_domain",
           "supervised_contrast", "vrex_penalty"]  # fmt: skip
