"""Cutout (DeVries and Taylor, 2017): one square of each image becomes black."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor


def cutout(
    images: UInt8[Tensor, "n 3 height width"], row: Int[Tensor, " n"], column: Int[Tensor, " n"], size: int
) -> UInt8[Tensor, "n 3 height width"]:
    """Zero the size x size square around (row, column), clipped at the border; before normalisation.

    The centre is uniform over the image, so squares at the border are smaller: this is the usual Cutout, and not a
    square that always lies inside.
    """
    inside_rows = _near(row, images.shape[2], size)
    inside_columns = _near(column, images.shape[3], size)
    hole = inside_rows[:, None, :, None] & inside_columns[:, None, None, :]
    return images.masked_fill(hole, 0)


def _near(centre: Tensor, length: int, size: int) -> Tensor:
    position = torch.arange(length, device=centre.device)
    first = centre.view(-1, 1) - size // 2
    return (position >= first) & (position < first + size // 2 * 2)
