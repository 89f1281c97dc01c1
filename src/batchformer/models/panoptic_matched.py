"""The mask head on the queries that the loss reads and on no others: the same loss and gradients for less work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


@contextmanager
def only_matched_masks(network: Any, labels: Sequence[dict[str, Tensor]]) -> Iterator[None]:
    """Inside, a `DetrForSegmentation` in training computes masks of queries matched with an object; others are 0.

    DETR computes a mask for every one of its 100 queries, and its mask losses read those of the few that are matched
    with an object of the image. Which they are is known from classes and boxes, before the head. `labels` are those of
    the images; with two streams they are matched with both.
    """
    wanted: list[Bool[Tensor, "rows queries"]] = []

    def match(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        queries = args[0] if args else kwargs["query_states"]
        wanted.append(_matched(network, queries.detach(), labels))

    head = network.mask_head
    handle = network.bbox_attention.register_forward_pre_hook(match, with_kwargs=True)
    head.__dict__["forward"] = lambda **given: _some_masks(head, wanted.pop(), **given)
    try:
        yield
    finally:
        handle.remove()
        del head.__dict__["forward"]


@torch.no_grad()
def _matched(
    network: Any, queries: Float[Tensor, "rows queries dim"], labels: Sequence[dict[str, Tensor]]
) -> Bool[Tensor, "rows queries"]:
    """By the matcher of the loss, on what the loss is going to match, in its precision."""
    from batchformer.models.detector_loss import full, softmax_matcher

    rows = len(queries)
    outputs = {
        "logits": full(network.detr.class_labels_classifier(queries)),
        "pred_boxes": full(network.detr.bbox_predictor(queries).sigmoid()),
    }
    with torch.autocast(queries.device.type, enabled=False):
        matches = softmax_matcher(network.config)(outputs, list(labels) * (rows // len(labels)))
    found = torch.zeros(queries.shape[:2], dtype=torch.bool)
    for row, (source, _) in enumerate(matches):
        found[row, source] = True
    if not found.any():  # a batch without any object: the head is called all the same, as every process must do it
        found[0, 0] = True
    return found.to(queries.device)


def _some_masks(
    head: Any,
    wanted: Bool[Tensor, "rows queries"],
    features: Float[Tensor, "rows dim height width"],
    attention_masks: Float[Tensor, "rows queries heads height width"],
    fpn_features: Sequence[Float[Tensor, "rows _ _ _"]],
) -> Float[Tensor, "rows*queries 1 _ _"]:
    row, query = wanted.nonzero(as_tuple=True)
    masks = type(head).forward(
        head,
        features=features[row],
        attention_masks=attention_masks[row, query][:, None],
        fpn_features=[each[row] for each in fpn_features],
    )
    every = masks.new_zeros(wanted.numel(), *masks.shape[1:])
    return every.index_copy(0, row * wanted.shape[1] + query, masks)
