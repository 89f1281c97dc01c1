"""Mini-batch inference, watched at one insertion: what its attention saw, the tokens with and without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.analysis.stream_gradients import handle_of
from batchformer.analysis.token_layout import Layout, layout_of
from batchformer.analysis.untouched import untouched
from batchformer.analysis.watch import as_tokens, channels_of
from batchformer.attach import Attachment
from batchformer.errors import UserError
from batchformer.nn import BatchAttention


@dataclass
class Inference:
    """One insertion in a forward of the batch: tokens (batch, position, dim) of the plain model, and with all modules.

    `entered` is what entered the batch attention of the layer asked for.
    """

    path: str
    attention: BatchAttention
    entered: Tensor
    without: Tensor
    related: Tensor
    layout: Layout


@torch.no_grad()
def infer_watched(model: nn.Module, images: Tensor, place: int | str = 0, layer: int = -1) -> Inference:
    """Two forwards in eval mode, without and with the modules (V2's mini-batch inference); the model stays."""
    attachment = handle_of(model)
    if len(images) < 2:
        raise UserError("one image has no other to look at: give two or more.")
    number = _number(attachment, place)
    point = attachment.points[number]
    module, path = point.module, point.paths[0]
    if not -len(module.layers) <= layer < len(module.layers):
        raise UserError(f"layer={layer}: the module after {path!r} has {len(module.layers)} layers, 0 the first.")
    attention = module.layers[layer].self_attn
    assert isinstance(attention, BatchAttention)
    entered: list[Tensor] = []
    left: list[Any] = []
    block = attachment.model.get_submodule(path)
    handles = [
        attention.register_forward_pre_hook(lambda _, args: entered.append(args[0])),
        block.register_forward_hook(lambda _, args, out: left.append(first_tensor(out).detach())),
    ]
    with untouched(attachment.model):
        attachment.model.eval()
        try:
            attachment.model(images)
            with attachment.infer_with_batch():
                attachment.model(images)
        finally:
            for handle in handles:
                handle.remove()
    # A module that serves several places is called once at each, in their order.
    which = [p.module for p in attachment.points[:number]].count(module)
    tokens = [as_tokens(x, channels_of(module)).float() for x in left]
    layout = layout_of(left[0], channels_of(module), images, attachment.model)
    return Inference(path, attention, entered[which].detach(), tokens[0], tokens[1], layout)


def _number(attachment: Attachment, place: int | str) -> int:
    paths = [point.paths[0] for point in attachment.points]
    if isinstance(place, str):
        if place not in paths:
            raise UserError(f"no module stands at {place!r}: there are {', '.join(map(repr, paths))}.")
        return paths.index(place)
    if not -len(paths) <= place < len(paths):
        raise UserError(f"place={place}: there are {len(paths)} insertions, counted from 0.")
    return place % len(paths)


def first_tensor(out: Any) -> Tensor:
    """Of what a submodule gives back: itself, or the first of a tuple."""
    while not isinstance(out, Tensor):
        out = next(item for item in out if isinstance(item, Tensor | tuple | list))
    return out
