"""Where the tokens of a model lie on its image: prefix tokens, rows and columns of the patches, side of the channels.

Shared by everything that reads tokens: TransMix and similar methods (`mix`), pictures and Grad-CAM
(`analysis`). What a model says about itself comes first (attributes of timm's models, configurations of transformers);
what it does not say follows from the shape of the image, because patches are square.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError

Channels = Literal["first", "last"]

_CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")
_OTHER_PREFIX_TOKENS = ("dist_token", "distillation_token", "reg_token", "register_tokens")
_MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class TokenLayout:
    """`prefix` tokens (class, distillation, registers), then the patches in a grid of rows and columns.

    `grid` is None where the positions are not a picture (a pooled feature, another ratio than the image's).
    """

    positions: int
    prefix: int
    grid: tuple[int, int] | None

    def index(self, position: int | tuple[int, int]) -> int:
        """The number of a position: itself, or that of the patch at (row, column)."""
        pair = isinstance(position, tuple | list)
        given: Any = position if pair else [position]
        try:
            numbers = tuple(map(operator.index, given))  # numpy's and torch's numbers too
        except TypeError:
            numbers = ()
        if len(numbers) != 1 + pair:
            raise UserError(f"position={position!r} is neither the number of a position nor (row, column) of a patch.")
        if len(numbers) == 1:
            if not 0 <= numbers[0] < self.positions:
                raise UserError(f"there is no position {position}: the insertion has {self.positions}, counted from 0.")
            return numbers[0]
        if self.grid is None:
            raise UserError(
                f"the {self.positions} positions of this insertion do not form a grid: give a position number."
            )
        row, column = numbers
        if not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise UserError(
                f"there is no patch {position}: the grid has {self.grid[0]} rows and {self.grid[1]} columns."
            )
        return self.prefix + row * self.grid[1] + column


def layout_of(x: Tensor, channels: str, images: Tensor, model: nn.Module) -> TokenLayout:
    """The layout of tokens or feature maps that a submodule of the model returned for these images.

    The grid is that of the model's patches, or half of it, a quarter ... in the later stages of a pyramid. Where the
    model does not say its patches or its prefix tokens, the number of tokens decides, if it fits the ratio of the image
    exactly; otherwise there is no grid. Detectors with several feature maps have no single grid.
    """
    if x.ndim == 4:
        rows, columns = x.shape[2:] if channels == "first" else x.shape[1:3]
        return TokenLayout(rows * columns, 0, (rows, columns))
    if x.ndim != 3:
        return TokenLayout(1, 0, None)
    if images.ndim != 4 or _has_other_token_order(model):
        return TokenLayout(x.shape[1], 0, None)
    height, width = images.shape[-2:]
    positions, declared = x.shape[1], _declared_prefix(model)
    counted = prefix_tokens(model)[1]
    # 0 as well: before the class token joins there is no prefix, whatever the model says.
    likely = {0, 1, counted} if declared is None else {0, declared}
    for first_grid in patch_grids(model, height, width):
        for stage, (rows, columns) in enumerate(_halved(first_grid)):
            prefix = positions - rows * columns
            unknown = declared is None and stage == 0
            if prefix in likely or (unknown and 0 <= prefix <= _MOST_PREFIX_TOKENS):
                return TokenLayout(positions, prefix, (rows, columns))
    guesses = dict.fromkeys((counted, *range(_MOST_PREFIX_TOKENS)) if declared is None else (declared,))
    for prefix in guesses:
        grid = _grid_like_image(positions - prefix, height, width, exact=True)
        if grid is not None:
            return TokenLayout(positions, prefix, grid)
    return TokenLayout(positions, 0, None)


def token_grid(tokens: int, height: int, width: int, patch: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Rows and columns of tokens that are known to cover the whole image, and nothing else.

    Those of the model's patches, with what is left at the border dropped or padded. Else (the patches are cut from a
    feature map, or tokens are merged later) those most like the image in shape, if one square stride leads to them.
    """
    for rows, columns in _grids_of_patches(patch, height, width):
        if rows * columns == tokens:
            return rows, columns
    grid = _grid_like_image(tokens, height, width, exact=False)
    if grid is None:
        raise UserError(
            f"{tokens} tokens do not form a grid with the aspect ratio of an image of {height} x {width} pixels: "
            "pass grid=(rows, columns)."
        )
    return grid


def prefix_tokens(model: nn.Module) -> tuple[bool, int]:
    """Whether there is a class token, and how many tokens stand before those of the image."""
    has_class, count = False, 0
    for module in model.modules():
        for name in (*_CLASS_TOKENS, *_OTHER_PREFIX_TOKENS):
            token = getattr(module, name, None)
            if isinstance(token, Tensor) and (token.ndim == 3 or name == "class_embedding"):
                width = token.shape[1] if token.ndim == 3 else 1
                has_class, count = has_class or name in _CLASS_TOKENS, count + width
    declared = _declared_prefix(model)
    return has_class, count if declared is None else declared


def patch_size(model: nn.Module) -> tuple[int, int]:
    """Height and width of the largest patch the model cuts its images into; (1, 1) where it does not say."""
    largest = (1, 1)
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            size: Any = getattr(owner, "patch_size", None)
            size = (size, size) if isinstance(size, int) else size
            if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size):
                largest = (max(largest[0], size[0]), max(largest[1], size[1]))
    return largest


def patch_grids(model: nn.Module, height: int, width: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of the patches of such images, as far as the model tells them; the surest first."""
    for module in model.modules():
        embedding: Any = getattr(module, "patch_embed", None)
        if callable(of_images := getattr(embedding, "dynamic_feat_size", None)):
            yield of_images((height, width))
        elif getattr(embedding, "img_size", None) == (height, width) and getattr(embedding, "grid_size", None):
            yield embedding.grid_size
    patch = patch_size(model)
    if patch != (1, 1):
        yield from _grids_of_patches(patch, height, width)


def attribute_of(model: nn.Module, name: str, default: Any = None) -> Any:
    """An attribute of the outermost module that has it: the model may be wrapped."""
    return next((getattr(module, name) for module in model.modules() if hasattr(module, name)), default)


def side_of_channels(maps: Tensor, images: Tensor) -> Channels:
    """Maps have the ratio of the images; read with the channels on the wrong side they do not."""
    if maps.ndim != 4 or images.ndim != 4:
        return "last"
    ratio = images.shape[-2] / images.shape[-1]
    difference = {"first": maps.shape[2] / maps.shape[3] - ratio, "last": maps.shape[1] / maps.shape[2] - ratio}
    return "last" if abs(difference["last"]) < abs(difference["first"]) else "first"


def as_tokens(x: Tensor, channels: str) -> Float[Tensor, "batch position dim"]:
    """Features, tokens or maps with their positions in one row, detached."""
    x = x.detach()
    if x.ndim == 4 and channels == "first":
        x = x.movedim(1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _declared_prefix(model: nn.Module) -> int | None:
    """As timm's models say it; the model may be wrapped."""
    found = (getattr(module, "num_prefix_tokens", None) for module in model.modules())
    return next((count for count in found if isinstance(count, int)), None)


def _has_other_token_order(model: nn.Module) -> bool:
    """Whether tokens are not those of one map row by row, however many there are.

    Deformable DETR's are of maps of several sizes, Hiera's are unrolled by the units that its pretraining masks.
    """
    configs = (getattr(module, "config", None) for module in model.modules())
    several = any((getattr(config, "num_feature_levels", None) or 1) > 1 for config in configs)
    return several or any(hasattr(module, "reroll") for module in model.modules())


def _grids_of_patches(patch: tuple[int, int], height: int, width: int) -> list[tuple[int, int]]:
    """With the rest at the border dropped, and with it padded."""
    return [(height // patch[0], width // patch[1]), (-(-height // patch[0]), -(-width // patch[1]))]


def _halved(grid: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The grid and those of later stages, which merge patches by two and two."""
    while True:
        yield grid
        coarser = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        if coarser == grid:
            return
        grid = coarser


def _grid_like_image(tokens: int, height: int, width: int, *, exact: bool) -> tuple[int, int] | None:
    """The rows and columns most like the image in shape, if they are like it enough.

    Not `exact`, one square stride must lead to them: a side of n tokens, rounded either way, has a stride between
    side / (n + 1) and side / (n - 1). `exact`, the rows must follow from the columns: where the number of prefix tokens
    is a guess too, most numbers of tokens would make some grid by the first rule.
    """
    if tokens < 1:
        return None
    ratio = height / width
    rows = min(
        (rows for rows in range(1, tokens + 1) if tokens % rows == 0),
        key=lambda rows: max(rows * rows / tokens / ratio, ratio * tokens / rows / rows),
    )
    columns = tokens // rows
    if exact:
        return (rows, columns) if abs(rows / columns - ratio) < 0.5 / columns else None
    smallest = max(height / (rows + 1), width / (columns + 1))
    largest = min(side / (count - 1) if count > 1 else math.inf for side, count in ((height, rows), (width, columns)))
    return (rows, columns) if smallest < largest else None
