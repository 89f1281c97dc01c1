"""Puzzle-Mix's mask energy, and its transport of cells to where the mask shows them."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.mix.graph_cut import GridEnergy


def puzzle_energy(
    saliency: Float[Tensor, "batch height width"],
    pictures: Float[Tensor, "batch channels height width"],
    partner: Int[Tensor, " batch"],
    share: Float[Tensor, " #batch"],
    *,
    blocks: int,
    labels: int = 3,
    beta: float = 1.2,
    gamma: float = 0.5,
    eta: float = 0.2,
    neighbourhood: int = 4,
) -> GridEnergy:
    """E(z) over masks of blocks x blocks cells; z_i, the share of image B in cell i, takes `labels` steps from 0 to 1.

    The paper (Kim et al., 2020) asks for masks that keep salient cells, change little between neighbours,
    join cells where the pictures fit, and keep to lambda. Written out as the released code has it, per pair:

        sum_i (1 - z_i) s_B,i + z_i s_A,i                       the saliency that is lost, each image's sums to 1
      + b sum_ij (z_i - z_j)**2                                  label smoothness, b = beta / (16 blocks)
      + b gamma sum_ij phi_ij(z_i, z_j)                          data smoothness
      - eta / blocks**2 sum_i log Binomial(k_i; labels - 1, share),   z_i = k_i / (labels - 1): the prior

    phi_ij at z of 0 or 1 is the mean absolute difference of colours (in [0, 1], averaged over squares of
    `neighbourhood` pixels) along the seam between cell i and cell j, each from the image its z names. The code writes
    it as a part for each cell and a part times (z_i - z_j)**2, which for z of 0 or 1 is phi plus a constant, and keeps
    that form for the steps in between.

    `neighbourhood` is cut down to what divides a cell: 4 pixels on CIFAR and 2 at 224 pixels with 16 blocks, both as
    published. Two things differ from the code: `share` is clamped to [1e-4, 1 - 1e-4] inside the logarithms (there 1e-8
    is added to each probability, the same bound), and edges are clamped at 0 (there gamma <= 1 guarantees it).
    """
    smoothness = beta / blocks / 16
    lost = cell_saliency(saliency, blocks, blocks)
    cost_a, cost_b = lost[partner], lost.clone()  # taking A loses what is salient in B
    edges = []
    seams = _seams(pictures, partner, blocks, neighbourhood)
    for axis, (aa, ab, ba, bb) in zip((2, 1), seams, strict=True):
        aa, ab, ba, bb = (smoothness * gamma * seam for seam in (aa, ab, ba, bb))
        length = blocks - 1
        cost_a.narrow(axis, 0, length).add_(aa + ab, alpha=0.5)
        cost_b.narrow(axis, 0, length).add_(ba + bb, alpha=0.5)
        cost_a.narrow(axis, 1, length).add_(aa + ba, alpha=0.5)
        cost_b.narrow(axis, 1, length).add_(ab + bb, alpha=0.5)
        edges.append((smoothness + (ab + ba - aa - bb) / 2).clamp(min=0))
    prior = eta / blocks**2 * _unlikeliness(share, labels)
    unary = torch.stack([torch.lerp(cost_a, cost_b, step / (labels - 1)) for step in range(labels)], dim=1)
    return GridEnergy(unary + prior[:, :, None, None], *edges)


def cell_saliency(saliency: Float[Tensor, "batch height width"], rows: int, columns: int) -> Tensor:
    """The saliency of each cell as a part of the whole image's: (batch, rows, columns), sums of 1."""
    height, width = saliency.shape[1:]
    cells = F.avg_pool2d(saliency[:, None].float(), (height // rows, width // columns))[:, 0]
    cells = cells.nan_to_num(0, 0, 0)
    total = cells.sum((1, 2), keepdim=True)
    even = torch.full_like(cells, 1 / (rows * columns))
    return torch.where(total > 0, cells / total.clamp(min=torch.finfo(total.dtype).tiny), even)


def _seams(pictures: Tensor, partner: Tensor, blocks: int, neighbourhood: int) -> list[tuple[Tensor, ...]]:
    """How much colours differ across each seam, rightwards and downwards, for the four choices AA, AB, BA, BB."""
    cell_height, cell_width = pictures.shape[2] // blocks, pictures.shape[3] // blocks
    common = math.gcd(cell_height, cell_width)
    pool = max(size for size in range(1, min(neighbourhood, common) + 1) if common % size == 0)
    own = F.avg_pool2d(pictures.float(), pool)
    images = (own, own[partner])
    high, wide = cell_height // pool, cell_width // pool  # of a cell, in pooled pixels

    def across(first: Tensor, second: Tensor) -> Tensor:
        seam = first[:, :, :, wide - 1 : -1 : wide] - second[:, :, :, wide::wide]
        return F.avg_pool2d(seam.abs().mean(1, keepdim=True), (high, 1))[:, 0]

    def down(first: Tensor, second: Tensor) -> Tensor:
        seam = first[:, :, high - 1 : -1 : high] - second[:, :, high::high]
        return F.avg_pool2d(seam.abs().mean(1, keepdim=True), (1, wide))[:, 0]

    return [tuple(seam(first, second) for first in images for second in images) for seam in (across, down)]


def _unlikeliness(share: Float[Tensor, " #batch"], labels: int) -> Float[Tensor, "#batch labels"]:
    """-log of the binomial probability of each label: convex in the label, as the cut needs it."""
    share = share.float().clamp(1e-4, 1 - 1e-4)
    trials = labels - 1
    parts = [
        math.log(math.comb(trials, step)) + step * share.log() + (trials - step) * torch.log1p(-share)
        for step in range(labels)
    ]
    return -torch.stack(parts, dim=1)


@torch.no_grad()
def transport_plan(
    saliency: Float[Tensor, "batch rows columns"], shown: Bool[Tensor, "batch rows columns"], *, eps: float = 0.8
) -> Int[Tensor, "batch rows*columns"]:
    """For each position of a grid, the cell of the image that is moved there.

    Moving cell i to place j costs eps |i - j|**2 / (n - 1)**2 (in cells, n those of the grid's longer side) less the
    saliency of i where j is shown. As published, it is solved approximately in n rounds: every cell takes its cheapest
    position, of several at one position the cheapest stays, for the others the cost of that position rises by 1.

    The released code stores the plan as a dense matrix and leaves what the mask does not show black; here a position
    without a cell keeps its own. What is shown is the same.
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
        # ties go to the first cell: the result must not depend on the execution order of a device
        bid = torch.where(price <= lowest.gather(1, place), here, cells)
        taker = torch.full_like(place, cells).scatter_reduce(1, place, bid, "amin")
        lost = (taker.gather(1, place) != here).to(price.dtype)
        cost.scatter_(2, place[:, :, None], (price + lost)[:, :, None])
    return torch.where(taker < cells, taker, here)


def move_cells(
    images: Float[Tensor, "batch channels height width"], source: Int[Tensor, "batch cells"], rows: int, columns: int
) -> Float[Tensor, "batch channels height width"]:
    """Permute the cells of images, keeping the memory format: position j of the grid gets cell `source[j]`."""
    batch, channels, height, width = images.shape
    high, wide = height // rows, width // columns
    grid = images.reshape(batch, channels, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    moved = grid[torch.arange(batch, device=images.device)[:, None], source]
    moved = moved.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    last = not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return moved.reshape(batch, channels, height, width).contiguous(memory_format=layout)
