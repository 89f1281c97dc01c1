"""Mini-batch inference, watched at one insertion: what its attention saw, the tokens with and without it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.analysis.stream_gradients import handle_of
from batchformer.analysis.token_layout import Layout, layout_of
from batchformer.analysis.watch import as_tokens, channels_of
from batchformer.attach import Attachment
from batchformer.attach.contexts import untouched
from batchformer.attach.plan import Point
from batchformer.errors import UserError
from batchformer.nn import BatchAttention


@dataclass
class Inference:
    """One insertion in a forward of the batch: tokens (batch, position, dim) of the plain model, and with all modules.

    They are those that leave the submodule of `path` where the module stands after it, and those that enter it where
    it stands before. `entered` is what entered the batch attention of the layer asked for.
    """

    path: str
    side: str
    attention: BatchAttention
    entered: Tensor
    without: Tensor
    related: Tensor
    layout: Layout


@torch.no_grad()
def infer_watched(model: nn.Module, images: Tensor, place: int | str = 0, layer: int = -1) -> Inference:
    """Two forwards in eval mode, without and with the modules (V2's mini-batch inference); the model stays."""
    attachment = handle_of(model)
    if not isinstance(images, Tensor):
        raise UserError(f"images must be one tensor with the whole batch, not {type(images).__name__}.")
    if len(images) < 2:
        raise UserError("one image has no other to look at: give two or more.")
    number = place_number(attachment, place)
    point = attachment.points[number]
    attention = attention_at(point, layer)
    module, path, channels = point.module, point.paths[0], _channels_at(point)
    entered: list[Tensor] = []
    passed: list[Tensor] = []
    related: list[Tensor] = []
    handles = [
        _watch(attachment.model.get_submodule(path), point.side, passed),
        attention.register_forward_pre_hook(lambda _, args: entered.append(args[0])),
        module.layers[-1].register_forward_hook(lambda _, args, out: related.append(out)),
    ]
    with untouched(attachment.model):
        attachment.model.eval()
        try:
            with attachment.disabled():  # whatever contexts the caller is in
                attachment.model(images)
            with attachment.infer_with_batch():
                attachment.model(images)
        finally:
            for handle in handles:
                handle.remove()
    # A module that serves several places is called once at each, in their order.
    which = [p.module for p in attachment.points[:number]].count(module)
    plain = passed[0].transpose(1, 2) if getattr(point.site, "is_signal", False) else passed[0]
    layout = layout_of(plain, channels, images, attachment.model)
    without = as_tokens(plain, channels).float()
    return Inference(path, point.side, attention, entered[which].detach(), without, related[which].float(), layout)


def _watch(block: nn.Module, side: str, passed: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    """What leaves the block, or what enters it, whatever it is called with."""
    if side == "after":
        return block.register_forward_hook(lambda _, args, out: passed.append(first_tensor(out)))
    return block.register_forward_pre_hook(
        lambda _, args, kwargs: passed.append(first_tensor((*args, *kwargs.values()))), with_kwargs=True
    )


def _channels_at(point: Point) -> str:
    return getattr(point.site, "channels", None) or channels_of(point.module)


def whole_number(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise UserError(f"{name}={value!r} must be a whole number.") from None


def attention_at(point: Point, layer: int) -> BatchAttention:
    """That of one of the module's layers."""
    layers = point.module.layers
    if not -len(layers) <= whole_number("layer", layer) < len(layers):
        raise UserError(
            f"layer={layer}: the module {point.side} {point.paths[0]!r} has {len(layers)} layers, 0 the first."
        )
    attention = layers[layer].self_attn
    assert isinstance(attention, BatchAttention)
    return attention


def place_number(attachment: Attachment, place: int | str) -> int:
    """Of an insertion, by its number or by its path."""
    paths = [point.paths[0] for point in attachment.points]
    if isinstance(place, str):
        if place not in paths:
            raise UserError(f"no module stands at {place!r}: there are {', '.join(map(repr, paths))}.")
        return paths.index(place)
    if not -len(paths) <= whole_number("place", place) < len(paths):
        raise UserError(f"place={place}: there are {len(paths)} insertions, counted from 0.")
    return place % len(paths)


def first_tensor(out: Any) -> Tensor:
    """Of what a submodule gives back: itself, or the first of a tuple."""
    while not isinstance(out, Tensor):
        out = next(item for item in out if isinstance(item, Tensor | tuple | list))
    return out
