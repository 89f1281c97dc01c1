"""The losses of detectors: in full precision, weighted as published, divided by the boxes of all processes.

Under autocast a detector outputs classes and boxes in half precision, and transformers would match and compare them in
it: boxes of an image of 1333 pixels in steps of five, and with float16 the logarithms in the matching costs overflow
for a confident query, which is then matched last instead of first. Released code has no half precision.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

from batchformer.models.detector_criterion import Parts, decoder_losses, layer_losses, mean_boxes, weighted

Losses = tuple[Tensor, Parts, list[dict[str, Tensor]] | None]
PUBLISHED_CLASS_WEIGHT = 2  # with a focal loss


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
    """DETR's loss (cross entropy, L1, GIoU), computed with transformers' criterion.

    Boxes are counted over all processes (`mean_boxes`). The cross entropy is a mean over the queries of each process,
    in released code too.
    """
    last = {"logits": full(logits), "pred_boxes": full(pred_boxes)}
    criterion = _softmax_criterion(config, last["logits"], ("labels", "boxes", "cardinality"))
    return _decoder_losses(criterion, last, labels, config, outputs_class, outputs_coord, _weights(config))


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
    counted over all processes (`mean_boxes`), and everything is divided by their number.
    """
    last, weights = {"logits": full(logits), "pred_boxes": full(pred_boxes)}, _weights(config, _class_weight(config))
    return _decoder_losses(_focal_criterion(config), last, labels, config, outputs_class, outputs_coord, weights)


def proposal_loss(
    logits: Tensor, labels: list[dict[str, Tensor]], box_logits: Tensor, config: Any
) -> tuple[Tensor, Parts]:
    """The loss of two-stage Deformable DETR's proposals, one for each cell of the encoder's output.

    Deformable DETR, appendix A.4: the encoder's output gets a head of its own, foreground or background, trained by the
    Hungarian loss. As released: all objects are of class 0, the proposals are matched with them by the same costs, and
    the same loss with the same weights is added to that of the decoder, its parts with the ending _enc. All cells take
    part, padded ones too (as background), and so do the logits of the head's other classes, which are never right.
    """
    any_object = [{**one, "class_labels": torch.zeros_like(one["class_labels"])} for one in labels]
    with torch.autocast(logits.device.type, enabled=False):
        boxes = mean_boxes(labels, logits.device)
        found = full(logits)[None], full(box_logits).sigmoid()[None]  # of one layer
        (parts,), _ = layer_losses(_focal_criterion(config), *found, any_object, boxes)
        (loss,) = weighted([parts], _weights(config, _class_weight(config)))
    return loss, {f"{name}_enc": value for name, value in parts.items()}


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
    """`detection_loss` plus the mask losses (focal, dice), computed with transformers' criterion."""
    last = {"logits": full(logits), "pred_boxes": full(pred_boxes), "pred_masks": full(pred_masks)}
    criterion = _softmax_criterion(config, last["logits"], ("labels", "boxes", "cardinality", "masks"))
    masks = {"loss_mask": config.mask_loss_coefficient, "loss_dice": config.dice_loss_coefficient}
    return _decoder_losses(criterion, last, labels, config, outputs_class, outputs_coord, _weights(config) | masks)


def _decoder_losses(
    criterion: Any, last: dict[str, Tensor], labels: Any, config: Any, classes: Any, boxes: Any, weights: dict
) -> Losses:
    layers: tuple[Any, Any] = (full(classes), full(boxes)) if config.auxiliary_loss else (None, None)
    with torch.autocast(last["logits"].device.type, enabled=False):
        return decoder_losses(criterion, last, *layers, labels, weights)


def full(values: Any) -> Any:
    """Cast half precision to float32; float64 and None are unchanged."""
    return values.float() if isinstance(values, Tensor) and values.dtype in (torch.float16, torch.bfloat16) else values


def softmax_matcher(config: Any) -> HungarianMatcher:
    """The Hungarian matcher of DETR's losses."""
    return HungarianMatcher(*_costs(config))


def _softmax_criterion(config: Any, logits: Tensor, losses: tuple[str, ...]) -> Any:
    return _kept_softmax_criterion(
        _costs(config), config.num_labels, config.eos_coefficient, losses, logits.device, logits.dtype
    )


@lru_cache(maxsize=8)  # holds the class weights on the device, which are slow to copy there
def _kept_softmax_criterion(
    costs: tuple[float, float, float], labels: int, nothing: float, losses: tuple[str, ...], device: torch.device,
    dtype: torch.dtype,
) -> Any:  # fmt: skip
    with torch.inference_mode(False):  # may be created in a validation and then used in training
        return ImageLoss(HungarianMatcher(*costs), labels, nothing, list(losses)).to(device, dtype)


def _focal_criterion(config: Any) -> Any:
    matcher = DeformableDetrHungarianMatcher(*_costs(config))
    return DeformableDetrImageLoss(matcher, config.num_labels, config.focal_alpha, ["labels", "boxes", "cardinality"])


def _costs(config: Any) -> tuple[float, float, float]:
    return config.class_cost, config.bbox_cost, config.giou_cost


def _class_weight(config: Any) -> float:
    return getattr(config, "cls_loss_coefficient", PUBLISHED_CLASS_WEIGHT)


def _weights(config: Any, classes: float = 1) -> dict[str, float]:
    boxes = {"loss_bbox": config.bbox_loss_coefficient, "loss_giou": config.giou_loss_coefficient}
    return {"loss_ce": classes, **boxes}
