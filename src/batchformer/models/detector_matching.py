"""Which prediction is to find which object: for all decoder layers at once, waiting for the device once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.loss.loss_deformable_detr import DeformableDetrHungarianMatcher

Labels = Sequence[Mapping[str, Tensor]]
Corners = tuple[Float[Tensor, "*some 2"], Float[Tensor, "*some 2"]]  # the lower x and y, and the higher ones
_FOCAL_ALPHA, _FOCAL_GAMMA, _TINY = 0.25, 2.0, 1e-8  # of Deformable DETR's costs, whatever its loss is weighted with


@dataclass(frozen=True)
class Matches:
    """The pairs of all layers, layer after layer and image after image; every layer has as many.

    `classes` and `boxes` are the objects of all images, one after another, and `target` counts among these.
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
        """The queries of each image and its objects, counted from its first: on the host, as transformers has them."""
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
) -> Matches:
    """What `matcher`, one of transformers, finds for each of the layers by itself.

    transformers computes costs, waits for them and for two looks at whether boxes are numbers, layer by layer, and the
    costs are those of every prediction with the objects of all images. Here they are the same, of an image's own
    objects only, for all layers, and come to the host in one piece, with what that look has found.
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
    return Matches(layer, image, query, target, torch.cat(classes), torch.cat(objects), counts, pairs)


def corners(boxes: Float[Tensor, "*some 4"]) -> Corners:
    """Of boxes given by centre and size."""
    centre, size = boxes.chunk(2, dim=-1)
    half = 0.5 * size
    return centre - half, centre + half


def giou(one: Corners, two: Corners) -> Float[Tensor, "*some"]:
    """The generalised IoU of boxes in the same places."""
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
    """Layer, image, query and object (among all) of the cheapest assignment of each layer's each image."""
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
