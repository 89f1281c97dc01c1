"""The loss of detectors with a focal loss, weighted as published."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss


def focal_detection_loss(
    logits: Tensor,
    labels: list[dict[str, Tensor]],
    device: torch.device,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]:
    """Deformable DETR's loss (focal classification, L1, GIoU) with `config.cls_loss_coefficient`, published as 2.

    transformers weighs the classification of its focal detectors with 1, whatever their configuration says. Boxes are
    counted in each process by itself; released code takes the mean over all processes.
    """
    loss, parts, auxiliary_outputs = DeformableDetrForObjectDetectionLoss(
        logits, labels, device, pred_boxes, config, outputs_class, outputs_coord, **kwargs
    )
    classification = sum(value for name, value in parts.items() if name.startswith("loss_ce"))
    return loss + (config.cls_loss_coefficient - 1) * classification, parts, auxiliary_outputs
