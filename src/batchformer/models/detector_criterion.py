"""How a detector's predictions are compared with the objects: matching, losses of each layer, number of boxes.

Matching and losses are those of transformers, number for number, for all decoder layers together: a training step on a
GPU is as long as its host takes to start the work, and layer by layer this was more than the network. What is not
theirs: the number of boxes the losses are divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers.loss.loss_deformable_detr import DeformableDetrImageLoss

from batchformer.models.detector_matching import Labels, Matches, corners, giou, match_layers
from batchformer.parallel.peer_errors import report_lost_peers

Parts = dict[str, Tensor]
Places = tuple[Tensor, Tensor, Tensor]  # layer, image and query of each matched prediction


@torch.compiler.disable
def mean_boxes(labels: Labels, device: torch.device) -> float:
    """The objects of a batch, in the mean over the processes that train together, and at least 1: as released.

    With it the mean of the processes' gradients, which DDP and FSDP take, is that of one process with all the images,
    however the objects are spread. transformers counts those of each process by itself; and once accelerate is in use
    (its `Accelerator`, transformers' `Trainer`), the objects of all, divided by the number of processes twice.

    Where no gradient is recorded, each process counts its own: their shares of a test set may be of unequal lengths,
    and the longer ones would wait for ever.
    """
    count = float(sum(len(one["class_labels"]) for one in labels))
    if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor(count, device=device)
        assert dist.group.WORLD is not None
        with report_lost_peers(dist.group.WORLD, f"the number of boxes ({count:g})"):
            dist.all_reduce(total)
            count = total.item() / dist.get_world_size()
    return max(1.0, count)


def layer_losses(criterion: Any, predictions: Mapping[str, Tensor], labels: Labels, boxes: float) -> Parts:
    """`criterion`, one of transformers, for one layer's predictions, which are matched with the objects first."""
    return _losses(criterion, predictions["logits"][None], predictions["pred_boxes"][None], labels, boxes)[0][0]


def weighted(parts: Parts, weights: Mapping[str, float]) -> Tensor:
    """Their sum; what has no weight (the cardinality error, to be looked at) does not count."""
    return _weighted([parts], weights)[0]


def decoder_losses(
    criterion: Any,
    last: dict[str, Tensor],
    outputs_class: Tensor | None,
    outputs_coord: Tensor | None,
    labels: Labels,
    weights: Mapping[str, float],
) -> tuple[Tensor, Parts, list[dict[str, Tensor]] | None]:
    """The loss of the last decoder layer and, where they are given, of those before; as transformers returns it.

    That is: the loss, its parts (those of layer i end in _i), and the predictions of the layers before the last.
    """
    boxes = mean_boxes(labels, last["logits"].device)
    logits, found = last["logits"][None], last["pred_boxes"][None]
    earlier = None
    if outputs_class is not None and outputs_coord is not None:
        layers = zip(outputs_class[:-1], outputs_coord[:-1], strict=True)
        earlier = [{"logits": one, "pred_boxes": other} for one, other in layers]
        logits, found = torch.cat([outputs_class[:-1], logits]), torch.cat([outputs_coord[:-1], found])
    (*before, parts), matches = _losses(criterion, logits, found, labels, boxes)
    if "masks" in criterion.losses and "pred_masks" in last:  # only the last layer has them
        parts |= criterion.get_loss("masks", last, labels, matches.of_layer(len(before)), boxes)
    loss, *others = _weighted([parts, *before], weights)
    for of_layer in others:
        loss = loss + of_layer
    parts = parts | {f"{name}_{k}": value for k, of_layer in enumerate(before) for name, value in of_layer.items()}
    return loss, parts, earlier


def _losses(
    criterion: Any,
    logits: Float[Tensor, "layers images queries classes"],
    boxes: Float[Tensor, "layers images queries 4"],
    labels: Labels,
    number: float,
) -> tuple[list[Parts], Matches]:
    """The parts of the loss of each layer, all but those of masks; sums are taken by layers, as transformers does."""
    matches = match_layers(criterion.matcher, logits.detach(), boxes.detach(), labels)
    places = (matches.layer, matches.image, matches.query)
    focal = isinstance(criterion, DeformableDetrImageLoss)
    by_class = _focal_losses if focal else _cross_entropies
    found, wanted = boxes[places], matches.boxes[matches.target]
    per_layer = (len(logits), len(found) // len(logits))
    distances = F.l1_loss(found, wanted, reduction="none").unflatten(0, per_layer)
    overlaps = (1 - giou(corners(found), corners(wanted))).unflatten(0, per_layer)
    columns = {
        "loss_ce": by_class(criterion, logits, places, matches.classes[matches.target], number),
        "loss_bbox": [each.sum() / number for each in distances.unbind()],
        "loss_giou": [each.sum() / number for each in overlaps.unbind()],
        "cardinality_error": _cardinality_errors(logits.detach(), matches.counts, focal),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], matches


def _cross_entropies(criterion: Any, logits: Tensor, places: Places, classes: Tensor, number: float) -> list[Tensor]:
    """DETR's: of every query, most of them with "nothing" (the last class), which counts less."""
    wanted = torch.full(logits.shape[:3], criterion.num_classes, dtype=torch.int64, device=logits.device)
    wanted[places] = classes
    pairs = zip(logits.unbind(), wanted.unbind(), strict=True)
    return [F.cross_entropy(one.transpose(1, 2), other, criterion.empty_weight) for one, other in pairs]


def _focal_losses(criterion: Any, logits: Tensor, places: Places, classes: Tensor, number: float) -> list[Tensor]:
    """Deformable DETR's: every class of every query by itself, a sum divided by the number of boxes."""
    alpha = criterion.focal_alpha
    wanted = torch.zeros_like(logits, requires_grad=False)
    wanted[(*places, classes)] = 1
    absent, found = 1 - wanted, logits.sigmoid()
    right = found * wanted + (1 - found) * absent
    losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none") * (1 - right) ** 2
    if alpha >= 0:
        losses = (alpha * wanted + (1 - alpha) * absent) * losses
    return [each.sum() / number * logits.shape[2] for each in losses.mean(2).unbind()]


@torch.no_grad()
def _cardinality_errors(logits: Tensor, counts: list[int], focal: bool) -> list[Tensor]:
    """How far the number of objects found in an image is from the true one; a measure, not a loss."""
    there = logits.sigmoid().amax(-1) > 0.5 if focal else logits.argmax(-1) != logits.shape[-1] - 1
    true = torch.tensor(counts, dtype=torch.float32).to(logits.device, non_blocking=True)
    return list((there.sum(-1).float() - true).abs().mean(1).unbind())


def _weighted(layers: list[Parts], weights: Mapping[str, float]) -> list[Tensor]:
    """The sum of each layer's parts that have a weight; the first layer may have some that the others have not."""
    terms = {name: [parts[name] for parts in layers if name in parts] for name in weights if name in layers[0]}
    in_all = [weights[name] * torch.stack(each) for name, each in terms.items() if len(each) == len(layers)]
    loss, *rest = torch.stack(in_all).sum(0).unbind()
    for name, each in terms.items():
        if len(each) < len(layers):
            loss = loss + weights[name] * each[0]
    return [loss, *rest]
