"""Where tokens lie on the image: how many stand before those of the patches, and the rows and columns of these."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from batchformer.errors import UserError

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
        numbers = _numbers(position)
        if len(numbers) == 1:
            if not 0 <= numbers[0] < self.positions:
                raise UserError(f"there is no position {position}: the insertion has {self.positions}, 0 the first.")
            return numbers[0]
        if self.grid is None:
            raise UserError(f"the {self.positions} positions of this insertion are no grid: give the number of one.")
        row, column = numbers
        if not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise UserError(
                f"there is no patch {position}: the grid has {self.grid[0]} rows and {self.grid[1]} columns."
            )
        return self.prefix + row * self.grid[1] + column


def _numbers(position: Any) -> tuple[int, ...]:
    """One number, or two of a row and a column; those of numpy and torch, too."""
    pair = isinstance(position, tuple | list)
    try:
        numbers = tuple(int(operator.index(one)) for one in (position if pair else [position]))
    except TypeError:
        numbers = ()
    if len(numbers) != 1 + pair:
        raise UserError(f"position={position!r} is neither the number of a position nor (row, column) of a patch.")
    return numbers


def layout_of(x: Tensor, channels: str, images: Tensor, model: nn.Module) -> Layout:
    """Of tokens or maps that a submodule of the model gives back for these images.

    Of tokens the model may say it: the grid of its patches (halved in the later stages of a pyramid), how many tokens
    stand before them. What it does not say is guessed: patches are square, so the grid has the ratio of the image. Of
    detectors with several maps there is no one grid: `detection_attention` has those.
    """
    if x.ndim == 4:
        rows, columns = x.shape[2:] if channels == "first" else x.shape[1:3]
        return Layout(rows * columns, 0, (rows, columns))
    if x.ndim != 3:
        return Layout(1, 0, None)
    if images.ndim != 4 or _lie_otherwise(model):
        return Layout(x.shape[1], 0, None)
    height, width = images.shape[-2:]
    positions, said = x.shape[1], _prefix_said(model)
    # None at all before the class token joins, whatever the model says.
    likely = {0, 1} if said is None else {0, said}
    for level, (rows, columns) in enumerate(_halved(_patch_grid(model, height, width))):
        prefix = positions - rows * columns
        if prefix in likely or (said is None and level == 0 and 0 <= prefix <= _MOST_PREFIX_TOKENS):
            return Layout(positions, prefix, (rows, columns))
    for prefix in range(_MOST_PREFIX_TOKENS) if said is None else (said,):
        grid = _grid(positions - prefix, height / width)
        if grid is not None:
            return Layout(positions, prefix, grid)
    return Layout(positions, 0, None)


def _lie_otherwise(model: nn.Module) -> bool:
    """Whether tokens are not those of one map row by row, however many there are.

    Deformable DETR's are of maps of several sizes, Hiera's are unrolled by the units that its pretraining masks.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    several = any((getattr(config, "num_feature_levels", None) or 1) > 1 for config in configs)
    return several or any(hasattr(module, "reroll") for module in model.modules())


def side_of_channels(maps: Tensor, images: Tensor) -> Literal["first", "last"]:
    """Maps are as high over wide as the images; read with the channels on the wrong side they are not."""
    if maps.ndim != 4 or images.ndim != 4:
        return "last"
    ratio = images.shape[-2] / images.shape[-1]
    away = {"first": maps.shape[2] / maps.shape[3], "last": maps.shape[1] / maps.shape[2]}
    return "last" if abs(away["last"] - ratio) < abs(away["first"] - ratio) else "first"


def _prefix_said(model: nn.Module) -> int | None:
    """As timm's models say it; the model may be wrapped."""
    found = (getattr(module, "num_prefix_tokens", None) for module in model.modules())
    return next((count for count in found if isinstance(count, int)), None)


def _patch_grid(model: nn.Module, height: int, width: int) -> tuple[int, int] | None:
    """Rows and columns of the patches of such images, where timm's patch embedding or transformers' config tell."""
    for module in model.modules():
        embedding: Any = getattr(module, "patch_embed", None)
        if callable(of_images := getattr(embedding, "dynamic_feat_size", None)):
            return of_images((height, width))
        if (grid := getattr(embedding, "grid_size", None)) and getattr(embedding, "img_size", None) == (height, width):
            return grid
        patch = getattr(getattr(module, "config", None), "patch_size", None)
        patch = (patch, patch) if isinstance(patch, int) else patch
        if isinstance(patch, tuple | list) and len(patch) == 2:
            return height // patch[0], width // patch[1]
    return None


def _halved(grid: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    """The grid and those of later stages, which merge patches by two and two."""
    while grid is not None:
        yield grid
        coarser = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        grid = coarser if coarser != grid else None


def _grid(patches: int, ratio: float) -> tuple[int, int] | None:
    """Rows and columns of so many patches of an image with this height over width."""
    if patches < 1:
        return None
    rows = round(math.sqrt(patches * ratio))
    if rows < 1 or patches % rows:
        return None
    columns = patches // rows
    return (rows, columns) if abs(rows / columns - ratio) < 0.5 / columns else None
