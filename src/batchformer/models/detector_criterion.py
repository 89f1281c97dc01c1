"""Criterion of the detectors: matching of predictions with objects, losses of each layer, number of boxes.

Matching and losses equal those of transformers, but are computed for all decoder layers together: a training step on a
GPU is bound by kernel launches on the host, and layer by layer these took longer than the network. One difference: the
number of boxes the losses are divided by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher, DeformableDetrImageLoss

from batchformer.parallel.peer_errors import report_lost_peers

Labels = Sequence[Mapping[str, Tensor]]
Parts = dict[str, Tensor]
Places = tuple[Tensor, Tensor, Tensor]  # layer, image and query of each matched prediction
Corners = tuple[Float[Tensor, "*some 2"], Float[Tensor, "*some 2"]]  # the lower x and y, and the higher ones
_FOCAL_ALPHA, _FOCAL_GAMMA, _TINY = 0.25, 2.0, 1e-8  # of Deformable DETR's costs, whatever its loss is weighted with


@torch.compiler.disable
def mean_boxes(labels: Labels, device: torch.device) -> float:
    """Number of objects of a batch, averaged over the processes that train together, at least 1: as released.

    With it the mean of the processes' gradients, which DDP and FSDP take, is that of one process with all the images,
    however the objects are spread. transformers counts those of each process by itself; and once accelerate is in use
    (its `Accelerator`, transformers' `Trainer`), the objects of all, divided by the number of processes twice.

    Without gradients, each process counts its own: their shares of a test set may be of unequal lengths, and a
    collective would hang.
    """
    count = float(sum(len(one["class_labels"]) for one in labels))
    if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        total = torch.tensor(count, device=device)
        assert dist.group.WORLD is not None
        with report_lost_peers(dist.group.WORLD, f"the number of boxes ({count:g})"):
            dist.all_reduce(total)
            count = total.item() / dist.get_world_size()
    return max(1.0, count)


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
    (*before, parts), matches = layer_losses(criterion, logits, found, labels, boxes)
    if "masks" in criterion.losses and "pred_masks" in last:  # only the last layer has them
        parts |= criterion.get_loss("masks", last, labels, matches.of_layer(len(before)), boxes)
    loss, *others = weighted([parts, *before], weights)
    for of_layer in others:
        loss = loss + of_layer
    parts = parts | {f"{name}_{k}": value for k, of_layer in enumerate(before) for name, value in of_layer.items()}
    return loss, parts, earlier


def layer_losses(
    criterion: Any,
    logits: Float[Tensor, "layers images queries classes"],
    boxes: Float[Tensor, "layers images queries 4"],
    labels: Labels,
    number: float,
) -> tuple[list[Parts], LayerMatches]:
    """Match predictions with objects; the parts of each layer's loss by `criterion`, one of transformers.

    Without those of masks; reduced layer by layer, as transformers does.
    """
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
    """DETR's classification loss over all queries; most have the class "nothing" (the last), which is weighted less."""
    wanted = torch.full(logits.shape[:3], criterion.num_classes, dtype=torch.int64, device=logits.device)
    wanted[places] = classes
    pairs = zip(logits.unbind(), wanted.unbind(), strict=True)
    return [F.cross_entropy(one.transpose(1, 2), other, criterion.empty_weight) for one, other in pairs]


def _focal_losses(criterion: Any, logits: Tensor, places: Places, classes: Tensor, number: float) -> list[Tensor]:
    """Deformable DETR's binary focal loss per class and query, summed and divided by the number of boxes."""
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


def weighted(layers: list[Parts], weights: Mapping[str, float]) -> list[Tensor]:
    """Weighted sum of each layer's parts that have a weight (the cardinality error, only logged, has none).

    The first layer may have parts that the others lack.
    """
    terms = {name: [parts[name] for parts in layers if name in parts] for name in weights if name in layers[0]}
    in_all = [weights[name] * torch.stack(each) for name, each in terms.items() if len(each) == len(layers)]
    loss, *rest = torch.stack(in_all).sum(0).unbind()
    for name, each in terms.items():
        if len(each) < len(layers):
            loss = loss + weights[name] * each[0]
    return [loss, *rest]


@dataclass(frozen=True)
class LayerMatches:
    """The matched pairs of all layers, sorted by layer and image; every layer has equally many.

    `classes` and `boxes` are the concatenated objects of all images, and `target` is an index into these.
    """

    layer: Int[Tensor, " pairs"]
    image: Int[Tensor, " pairs"]
    query: Int[Tensor, " pairs"]
    target: Int[Tensor, " pairs"]
    classes: Int[Tensor, " objects"]
    boxes: Float[Tensor, "objects 4"]
    counts: list[int]  # objects of each image
    on_host: Int[np.ndarray, "4 pairs"]  # the four above

    def of_layer(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """(queries, objects) of each image, objects numbered within the image: on the host, as in transformers."""
        first = np.cumsum([0, *self.counts])
        some = self.on_host[1:, self.on_host[0] == layer]
        return [
            (torch.from_numpy(some[1, some[0] == k]), torch.from_numpy(some[2, some[0] == k] - first[k]))
            for k in range(len(self.counts))
        ]


@torch.compiler.disable
@torch.no_grad()
def match_layers(
    matcher: Any,
    logits: Float[Tensor, "layers images queries classes"],
    boxes: Float[Tensor, "layers images queries 4"],
    labels: Labels,
) -> LayerMatches:
    """The result of `matcher`, one of transformers, for all layers at once.

    transformers synchronises layer by layer, for the costs and for two checks that boxes are valid, and computes the
    costs of every prediction with the objects of all images. Here the costs are the same, but with an image's own
    objects only, for all layers, and are copied to the host once, together with the result of the check.
    """
    classes, objects = [one["class_labels"] for one in labels], [one["boxes"] for one in labels]
    counts = [len(one) for one in objects]
    padded = pad_sequence(objects, batch_first=True)
    found, wanted = corners(boxes[..., None, :]), corners(padded[:, None])
    costs = matcher.bbox_cost * torch.cdist(boxes, padded.expand(len(boxes), -1, -1, -1), p=1)
    costs = costs + matcher.class_cost * _class_costs(matcher, logits, pad_sequence(classes, batch_first=True))
    costs = costs + matcher.giou_cost * -giou(found, wanted)
    largest = torch.finfo(costs.dtype).max
    costs = torch.nan_to_num(costs, nan=largest, posinf=largest, neginf=largest)
    are_boxes = _are_boxes(*found) & _are_boxes(*wanted)
    on_host = torch.cat([costs.flatten(), are_boxes.to(costs.dtype)[None]]).cpu().numpy()
    if not on_host[-1]:
        raise ValueError("predicted boxes, or those of the labels, are not boxes: a side is negative or not a number")
    pairs = _pairs(on_host[:-1].reshape(costs.shape), counts)
    layer, image, query, target = torch.from_numpy(pairs).to(logits.device, non_blocking=True).unbind()
    return LayerMatches(layer, image, query, target, torch.cat(classes), torch.cat(objects), counts, pairs)


def corners(boxes: Float[Tensor, "*some 4"]) -> Corners:
    """Lower and upper corners of boxes given by centre and size."""
    centre, size = boxes.chunk(2, dim=-1)
    half = 0.5 * size
    return centre - half, centre + half


def giou(one: Corners, two: Corners) -> Float[Tensor, "*some"]:
    """Element-wise generalised IoU of boxes."""
    (low, high), (other_low, other_high) = one, two
    areas = _area(low, high) + _area(other_low, other_high)
    both = _area(torch.max(low, other_low), torch.min(high, other_high), least=0)
    union = areas - both
    around = _area(torch.min(low, other_low), torch.max(high, other_high), least=0)
    return both / union - (around - union) / around


def _area(low: Tensor, high: Tensor, least: float | None = None) -> Float[Tensor, "*some"]:
    sides = high - low
    width, height = (sides if least is None else sides.clamp(min=least)).unbind(-1)
    return width * height


def _are_boxes(low: Tensor, high: Tensor) -> Tensor:
    return (high >= low).all()


def _class_costs(
    matcher: Any, logits: Float[Tensor, "layers images queries classes"], classes: Int[Tensor, "images objects"]
) -> Float[Tensor, "layers images queries objects"]:
    wanted = classes[:, None].expand(*logits.shape[:3], -1)
    if not isinstance(matcher, DeformableDetrHungarianMatcher):
        return -logits.softmax(-1).gather(-1, wanted)
    found = logits.sigmoid()
    absent = (1 - _FOCAL_ALPHA) * (found**_FOCAL_GAMMA) * (-(1 - found + _TINY).log())
    present = _FOCAL_ALPHA * ((1 - found) ** _FOCAL_GAMMA) * (-(found + _TINY).log())
    return (present - absent).gather(-1, wanted)


def _pairs(costs: Float[np.ndarray, "layers images queries objects"], counts: list[int]) -> Int[np.ndarray, "4 pairs"]:
    """Layer, image, query and object (index among all) of the cheapest assignment, for each layer and image."""
    layers, images, queries = costs.shape[:3]
    first = np.cumsum([0, *counts])
    found = [
        linear_sum_assignment(of_layer[image, :, : counts[image]]) for of_layer in costs for image in range(images)
    ]
    matched = np.minimum(counts, queries)
    image = np.tile(np.repeat(np.arange(images), matched), layers)
    layer = np.repeat(np.arange(layers), matched.sum())
    query, target = (np.concatenate(side) for side in zip(*found, strict=True))
    return np.stack([layer, image, query, target + first[image]])
