"""Where the images of a detector's batch look at each other: V2's Fig. 5, as arrays and as two numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.analysis.attention_weights import attention_in_pieces
from batchformer.analysis.batch_attention import AttentionOverBatch
from batchformer.analysis.mini_batch import attention_at, place_number, whole_number
from batchformer.analysis.stream_gradients import handle_of
from batchformer.analysis.token_layout import Layout
from batchformer.attach import Attachment
from batchformer.attach.contexts import untouched
from batchformer.errors import UserError


@dataclass(frozen=True)
class ObjectsAndBackground:
    """How much the other images look at positions on objects and at the rest; 1 is uniform attention."""

    objects: float
    background: float

    @property
    def ratio(self) -> float:
        return self.objects / self.background


@torch.no_grad()
def attention_over_scenes(
    model: nn.Module,
    pixel_values: Float[Tensor, "batch 3 height width"],
    pixel_mask: Tensor | None = None,
    *,
    place: int | str = 0,
    level: int = 0,
    layer: int = -1,
) -> AttentionOverBatch:
    """Batch attention of an attached detector in mini-batch inference, over the cells of one of its feature maps.

    The paper shows the largest map of Deformable DETR in the first encoder layer: `level=0`, `place=0`. The cells are
    those of the padded canvas; the mean over the heads.
    """
    attachment = handle_of(model)
    if len(pixel_values) < 2:
        raise UserError("one image has no other to look at: give two or more.")
    number = place_number(attachment, place)
    point = attachment.points[number]
    attention = attention_at(point, layer)
    which = [p.module for p in attachment.points[:number]].count(point.module)
    entered: list[tuple[Tensor, Tensor | None]] = []
    handle = attention.register_forward_pre_hook(
        lambda _, args: entered.append((args[0].detach(), args[1] if len(args) > 1 else None))
    )
    shapes = _MapShapes(attachment, point.paths[0])
    with untouched(attachment.model):
        attachment.model.eval()
        try:
            with attachment.infer_with_batch():
                attachment.model(pixel_values=pixel_values, pixel_mask=pixel_mask)
        finally:
            handle.remove()
            shapes.remove()
    x, valid = entered[which]
    grids = shapes.of(x.shape[1])
    if not 0 <= whole_number("level", level) < len(grids):
        raise UserError(f"level={level}: the detector has {len(grids)} feature maps, 0 the largest.")
    start = sum(rows * columns for rows, columns in grids[:level])
    count = grids[level][0] * grids[level][1]
    cells = slice(start, start + count)
    weights = attention_in_pieces(attention, x[:, cells], None if valid is None else valid[:, cells])
    return AttentionOverBatch(point.paths[0], weights, Layout(count, 0, grids[level]), attention.group_size)


class _MapShapes:
    """Sees the sizes of the feature maps whose cells an encoder gets: in its arguments, or what the backbone gives."""

    def __init__(self, attachment: Attachment, path: str) -> None:
        encoder, _, _ = path.rpartition(".layers.")
        parent, _, _ = encoder.rpartition(".")
        self._listed: list[tuple[int, int]] = []
        self._last: tuple[int, int] | None = None
        try:
            owner = attachment.model.get_submodule(parent)
            backbone = owner.get_submodule("backbone")
        except AttributeError:
            raise UserError(f"{path!r} is no layer of the encoder of one of transformers' detectors.") from None
        self._handles = [
            attachment.model.get_submodule(encoder).register_forward_pre_hook(self._called, with_kwargs=True),
            backbone.register_forward_hook(self._left),
        ]

    def _called(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._listed = [(int(h), int(w)) for h, w in kwargs.get("spatial_shapes_list") or ()]

    def _left(self, module: nn.Module, args: Any, out: Any) -> None:
        while not isinstance(out, Tensor):
            out = out[0] if isinstance(out[0], Tensor) else out[-1]
        self._last = (out.shape[-2], out.shape[-1])

    def of(self, positions: int) -> list[tuple[int, int]]:
        grids = self._listed or [self._last or (0, 0)]
        assert sum(h * w for h, w in grids) == positions, "the cells of the maps are not the positions of the encoder"
        return grids

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def inside_images(
    grid: tuple[int, int], canvas: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Bool[Tensor, "batch row column"]:
    """The cells whose middle is image, not padding."""
    y, x = _middles(grid, canvas)
    return torch.stack([(y < height)[:, None] & (x < width)[None] for height, width in sizes])


def on_objects(
    grid: tuple[int, int], canvas: Sequence[int], boxes: Sequence[Float[np.ndarray, "boxes 4"]]
) -> Bool[Tensor, "batch row column"]:
    """The cells whose middle is in a box of the image; boxes are corners in pixels of the canvas."""
    y, x = _middles(grid, canvas)
    maps = []
    for each in boxes:
        left, top, right, bottom = torch.as_tensor(each, dtype=torch.float32).reshape(-1, 4).T[..., None]
        rows, columns = (top <= y) & (y < bottom), (left <= x) & (x < right)
        maps.append((rows[:, :, None] & columns[:, None, :]).any(0))
    return torch.stack(maps)


def objects_and_background(
    mass: Float[Tensor, "batch row column"],
    objects: Bool[Tensor, "batch row column"],
    inside: Bool[Tensor, "batch row column"],
) -> ObjectsAndBackground:
    """The mean of `mass` (what `AttentionOverBatch.mass_map` gives) on objects and on background, padding left out."""
    on, off = mass[objects & inside], mass[~objects & inside]
    return ObjectsAndBackground(on.mean().item(), off.mean().item())


def _middles(grid: tuple[int, int], canvas: Sequence[int]) -> tuple[Tensor, Tensor]:
    y, x = ((torch.arange(cells) + 0.5) * side / cells for cells, side in zip(grid, canvas, strict=True))
    return y, x
