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
from batchformer.losses.ride import RideLoss, RoutingLoss

__all__ = ["BalancedSoftmaxLoss", "DistillationLoss", "LDAMLoss", "LogitAdjustedLoss", "PaCoLoss", "RideLoss",
           "RoutingLoss", "checked_counts", "coral_penalty", "irm_penalty", "margin_disparity", "rows_by_domain",
           "vrex_penalty"]  # fmt: skip
from batchformer.losses.paco import PaCoLoss
