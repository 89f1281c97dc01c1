"""The losses of detectors: in full precision, and with a focal loss weighted as published.

Under autocast a detector gives classes and boxes in half precision, and transformers would match and compare them in
it: boxes of an image of 1333 pixels in steps of five, and with float16 the logarithms in the costs of the matching
overflow as soon as a query is sure, which then is matched last instead of first. Released code has no half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss
from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss, ForSegmentationLoss

Losses = tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]


def detection_loss(
    logits: Tensor,
    labels: list[dict[str, Tensor]],
    device: torch.device,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **kwargs: Any,
) -> Losses:
    """DETR's loss (cross entropy, L1, GIoU) by transformers.

    Boxes are counted in each process by itself; released code takes the mean over all processes.
    """
    layers = full(outputs_class), full(outputs_coord)
    with torch.autocast(logits.device.type, enabled=False):
        return ForObjectDetectionLoss(full(logits), labels, device, full(pred_boxes), config, *layers, **kwargs)


def focal_detection_loss(
    logits: Tensor,
    labels: list[dict[str, Tensor]],
    device: torch.device,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **kwargs: Any,
) -> Losses:
    """Deformable DETR's loss (focal classification, L1, GIoU) with `config.cls_loss_coefficient`, published as 2.

    transformers weighs the classification of its focal detectors with 1, whatever their configuration says. Boxes are
    counted as in `detection_loss`.
    """
    layers = full(outputs_class), full(outputs_coord)
    with torch.autocast(logits.device.type, enabled=False):
        loss, parts, auxiliary_outputs = DeformableDetrForObjectDetectionLoss(
            full(logits), labels, device, full(pred_boxes), config, *layers, **kwargs
        )
        classification = sum(value for name, value in parts.items() if name.startswith("loss_ce"))
        return loss + (config.cls_loss_coefficient - 1) * classification, parts, auxiliary_outputs


def segmentation_loss(
    logits: Tensor,
    labels: list[dict[str, Tensor]],
    device: torch.device,
    pred_boxes: Tensor,
    pred_masks: Tensor,
    config: Any,
    outputs_class: Tensor | None = None,
    outputs_coord: Tensor | None = None,
    **kwargs: Any,
) -> Losses:
    """`detection_loss` and those of the masks (focal, dice), by transformers."""
    boxes, masks, layers = full(pred_boxes), full(pred_masks), (full(outputs_class), full(outputs_coord))
    with torch.autocast(logits.device.type, enabled=False):
        return ForSegmentationLoss(full(logits), labels, device, boxes, masks, config, *layers, **kwargs)


def full(values: Any) -> Any:
    """Half precision to float32; float64 and None stay."""
    return values.float() if isinstance(values, Tensor) and values.dtype in (torch.float16, torch.bfloat16) else values
