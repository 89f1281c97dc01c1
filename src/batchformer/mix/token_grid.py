"""How a model lays tokens over an image: how many stand before those of the image, its patches, rows and columns."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from batchformer.errors import UserError

_CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")
_OTHER_TOKENS = ("dist_token", "distillation_token", "reg_token", "register_tokens")


def prefix_tokens(model: nn.Module) -> tuple[bool, int]:
    """Whether there is a class token, and how many tokens stand before those of the image."""
    has_class, count = False, 0
    for module in model.modules():
        for name in (*_CLASS_TOKENS, *_OTHER_TOKENS):
            token = getattr(module, name, None)
            if isinstance(token, Tensor) and (token.ndim == 3 or name == "class_embedding"):
                width = token.shape[1] if token.ndim == 3 else 1
                has_class, count = has_class or name in _CLASS_TOKENS, count + width
    said = said_by(model, "num_prefix_tokens")  # timm's models say it
    return has_class, said if isinstance(said, int) else count


def patch_size(model: nn.Module) -> tuple[int, int]:
    """Height and width of the largest patch the model cuts its images into; (1, 1) where it does not say."""
    largest = (1, 1)
    for module in model.modules():
        size: Any = getattr(module, "patch_size", None)
        size = (size, size) if isinstance(size, int) else size
        if isinstance(size, tuple | list) and len(size) == 2 and all(isinstance(side, int) for side in size):
            largest = (max(largest[0], size[0]), max(largest[1], size[1]))
    return largest


def token_grid(tokens: int, height: int, width: int, patch: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """The rows and columns that so many tokens make of an image.

    Those of the model's patches, with what is left at the border dropped or padded. Else (the patches are cut from a
    feature map, or tokens are merged later) those most like the image in shape, if one square stride leads to them.
    """
    for rows, columns in ((height // patch[0], width // patch[1]), (-(-height // patch[0]), -(-width // patch[1]))):
        if rows * columns == tokens:
            return rows, columns
    wanted = height / width
    rows = min(
        (rows for rows in range(1, tokens + 1) if tokens % rows == 0),
        key=lambda rows: max(rows * rows / tokens / wanted, wanted * tokens / rows / rows),
    )
    columns = tokens // rows
    # a side of n tokens, rounded either way, has a stride between side / (n + 1) and side / (n - 1)
    lowest = max(height / (rows + 1), width / (columns + 1))
    highest = min(side / (n - 1) if n > 1 else math.inf for side, n in ((height, rows), (width, columns)))
    if lowest >= highest:
        raise UserError(
            f"{tokens} tokens make no grid that is shaped like an image of {height} x {width} pixels: say grid=(rows, "
            f"columns)."
        )
    return rows, columns


def said_by(model: nn.Module, name: str, default: Any = None) -> Any:
    """An attribute of the outermost module that has it: the model may be wrapped."""
    return next((getattr(module, name) for module in model.modules() if hasattr(module, name)), default)
