"""Mini-batch inference, watched at one insertion: what its attention saw, the tokens with and without it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.analysis.stream_gradients import handle_of
from batchformer.analysis.untouched import untouched
from batchformer.analysis.watch import as_tokens, channels_of
from batchformer.attach import Attachment
from batchformer.errors import UserError
from batchformer.nn import BatchAttention

_MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """Where the positions of an insertion lie: `prefix` tokens (class, registers), then a grid of rows and columns.

    `grid` is None where the positions are not a picture (a pooled feature, another ratio than the image's).
    """

    positions: int
    prefix: int
    grid: tuple[int, int] | None

    def index(self, position: int | tuple[int, int]) -> int:
        """The number of a position: itself, or that of the patch at (row, column)."""
        if isinstance(position, int):
            if not 0 <= position < self.positions:
                raise UserError(f"there is no position {position}: the insertion has {self.positions}, 0 the first.")
            return position
        if self.grid is None:
            raise UserError(f"the {self.positions} positions of this insertion are no grid: give the number of one.")
        row, column = position
        if not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise UserError(
                f"there is no patch {position}: the grid has {self.grid[0]} rows and {self.grid[1]} columns."
            )
        return self.prefix + row * self.grid[1] + column


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


def layout_of(x: Tensor, channels: str, images: Tensor, model: nn.Module) -> Layout:
    """Of tokens or maps that a submodule of the model gives back for these images."""
    if x.ndim == 4:
        rows, columns = x.shape[2:] if channels == "first" else x.shape[1:3]
        return Layout(rows * columns, 0, (rows, columns))
    if x.ndim != 3:
        return Layout(1, 0, None)
    positions, ratio = x.shape[1], images.shape[-2] / images.shape[-1]
    named = getattr(model, "num_prefix_tokens", 0)
    hints = [named] if isinstance(named, int) else []
    for prefix in (*hints, *range(_MOST_PREFIX_TOKENS)):
        grid = _grid(positions - prefix, ratio)
        if grid is not None:
            return Layout(positions, prefix, grid)
    return Layout(positions, 0, None)


def _grid(patches: int, ratio: float) -> tuple[int, int] | None:
    """Rows and columns of so many patches of an image with this height over width."""
    if patches < 1:
        return None
    rows = round(math.sqrt(patches * ratio))
    if rows < 1 or patches % rows:
        return None
    columns = patches // rows
    return (rows, columns) if abs(rows / columns - ratio) < 0.5 / columns else None
