"""Puzzle-Mix's transport: blocks of an image moved to where its mask shows them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@torch.no_grad()
def transport_plan(
    saliency: Float[Tensor, "batch rows columns"],
    shown: Bool[Tensor, "batch rows columns"],
    *,
    eps: float = 0.8,
) -> Int[Tensor, "batch rows*columns"]:
    """For each place of a grid, the cell of the image that goes there.

    Moving cell i to place j costs eps |i - j|**2 / (n - 1)**2 (in cells, n those of the grid's longer side) less the
    saliency of i where j is shown. As published, it is solved approximately in n rounds: every cell takes its cheapest
    place, of several at one place the cheapest stays, the others find that place dearer by 1.

    The released code holds the plan as a dense matrix, and what it does not show it leaves black; here a place that
    nobody takes keeps its own cell. What is shown is the same.
    """
    rows, columns = saliency.shape[1:]
    cells = rows * columns
    here = torch.arange(cells, device=saliency.device)
    y, x = here // columns, here % columns
    distance = ((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).to(saliency.dtype)
    steps = max(rows, columns)
    cost = eps / max(steps - 1, 1) ** 2 * distance - saliency.flatten(1)[:, :, None] * shown.flatten(1)[:, None, :]
    taker = here.expand(len(cost), cells)
    for _ in range(steps):
        price, place = cost.min(2)
        lowest = torch.full_like(price, torch.inf).scatter_reduce(1, place, price, "amin")
        # of equal prices the first cell: the order in which a device sees them must not matter
        bid = torch.where(price <= lowest.gather(1, place), here, cells)
        taker = torch.full_like(place, cells).scatter_reduce(1, place, bid, "amin")
        lost = (taker.gather(1, place) != here).to(price.dtype)
        cost.scatter_(2, place[:, :, None], (price + lost)[:, :, None])
    return torch.where(taker < cells, taker, here)


def move_cells(
    images: Float[Tensor, "batch channels height width"], source: Int[Tensor, "batch cells"], rows: int, columns: int
) -> Float[Tensor, "batch channels height width"]:
    """The images put together anew, in the memory format they had: in place j of the grid cell `source[j]`."""
    batch, channels, height, width = images.shape
    high, wide = height // rows, width // columns
    grid = images.reshape(batch, channels, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = grid[torch.arange(batch, device=images.device)[:, None], source]
    moved = moved.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    last = not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return moved.reshape(batch, channels, height, width).contiguous(memory_format=layout)
