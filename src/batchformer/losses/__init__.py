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
           "RoutingLoss", "checked_counts", "contrastive_loss", "coral_penalty", "gradient_penalty", "irm_penalty",
           "margin_disparity", "masked_pixel_loss", "pair_streams", "queue_loss", "rows_by_domain",
           "supervised_contrast", "vrex_penalty"]  # fmt: skip
from batchformer.losses.paco import PaCoLoss
from batchformer.losses.self_supervised import contrastive_loss, masked_pixel_loss, pair_streams, queue_loss
from batchformer.losses.zero_shot import gradient_penalty, supervised_contrast
