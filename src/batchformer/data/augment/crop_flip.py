"""Random crop of the zero-padded image and horizontal flip, as one gather over the whole chunk."""

import torch
from jaxtyping import Int, UInt8
from torch import Tensor


def crop_flip(
    padded: UInt8[Tensor, "store 3 padded_height padded_width"],
    index: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    column: Int[Tensor, " n"],
    flip: Int[Tensor, " n"],
    height: int,
    width: int,
) -> UInt8[Tensor, "n 3 height width"]:
    """The (height, width) window at (row, column) of each chosen image, mirrored where `flip` is 1.

    `padded` holds every image of the data set with its zero border already on, so cropping needs no test of bounds.
    """
    n, device = len(index), padded.device
    across = torch.arange(width, device=device)
    mirrored = torch.where(flip.view(n, 1).bool(), width - 1 - across, across)
    rows = row.view(n, 1) + torch.arange(height, device=device)
    columns = column.view(n, 1) + mirrored
    channels = torch.arange(padded.shape[1], device=device)
    return padded[index.view(n, 1, 1, 1), channels.view(1, -1, 1, 1), rows.view(n, 1, -1, 1), columns.view(n, 1, 1, -1)]
