"""The energy of Puzzle-Mix's mask over a grid of cells, and the labels of its minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError
from batchformer.mix.grid_cut import cut_grid


@dataclass(frozen=True)
class GridEnergy:
    """E(l) = sum_i unary[l_i, i] + sum_ij edge_ij ((l_i - l_j) / (labels - 1))**2 over neighbours i, j of a grid.

    `unary` must be convex in the label and the edges not below 0.
    """

    unary: Float[Tensor, "batch labels height width"]
    right: Float[Tensor, "batch height width-1"]
    down: Float[Tensor, "batch height-1 width"]

    def of(self, labels: Int[Tensor, "batch height width"]) -> Float[Tensor, " batch"]:
        """The energy of a labelling of each grid."""
        level = labels.to(self.unary.dtype) / (self.unary.shape[1] - 1)
        cells = self.unary.gather(1, labels.long()[:, None])
        right = self.right * (level[:, :, 1:] - level[:, :, :-1]) ** 2
        down = self.down * (level[:, 1:] - level[:, :-1]) ** 2
        return cells.sum((1, 2, 3)) + right.sum((1, 2)) + down.sum((1, 2))


@torch.no_grad()
def least_energy(energy: GridEnergy) -> Int[Tensor, "batch height width"]:
    """The labels of the least energy, of two or three labels; the global minimum, found by one or two binary cuts.

    Puzzle-Mix runs alpha-beta swap, which ends in a local minimum. With differences of labels squared and a unary cost
    that is convex in the label the energy is L-natural-convex (Murota), which lets binary cuts find the minimum: from
    the middle label, the best set of cells to raise (by submodularity of the energy under shifts a global minimiser
    then lies nowhere above the result and at most one label below it), then the best set to lower.

    Costs are rounded to integers, as there; by powers of two, so that integer costs stay exact, and to 27 bits.
    """
    unary, right, down = energy.unary.detach(), energy.right.detach(), energy.down.detach()
    labels = unary.shape[1]
    if labels not in (2, 3):
        raise UserError(f"the graph cut knows 2 or 3 labels, and the energy has {labels}.")
    if unary.device.type == "cpu":  # elsewhere looking would make the host wait for the device
        _check(unary, right, down)
    edge = 1 / (labels - 1) ** 2
    scale = _scale(unary, right, down)
    right, down = _whole(right * edge, scale), _whole(down * edge, scale)
    steps = _whole(unary[:, 1:] - unary[:, :-1], scale)  # what it costs a cell to be raised from each label
    if labels == 2:
        return cut_grid(-steps[:, 0], right, down).long()
    raised = cut_grid(-steps[:, 1], right, down).long()
    gain = torch.where(raised.bool(), steps[:, 1], steps[:, 0]) + _lowered(raised, right, down)
    return 1 + raised - cut_grid(gain, right, down).long()


def _lowered(labels: Tensor, right: Tensor, down: Tensor) -> Int[Tensor, "batch height width"]:
    """What lowering a cell alone saves on its edges, apart from the edge that a cut pays anyway.

    (d - b_i + b_j)**2 = d**2 - 2 d (b_i - b_j) + (b_i - b_j)**2 for labels d apart, lowered by b.
    """
    saved = torch.zeros_like(labels, dtype=torch.int32)
    across, along = labels.to(torch.int32).diff(dim=2) * right * 2, labels.to(torch.int32).diff(dim=1) * down * 2
    saved[:, :, 1:] += across
    saved[:, :, :-1] -= across
    saved[:, 1:] += along
    saved[:, :-1] -= along
    return saved


def _scale(unary: Tensor, right: Tensor, down: Tensor) -> Float[Tensor, "batch 1 1"]:
    """The largest power of two that keeps every sum of the cut below 2**30."""
    steps = (unary[:, 1:] - unary[:, :-1]).abs().sum((1, 2, 3))
    total = steps + 4 * right.sum((1, 2)) + 4 * down.sum((1, 2))
    exponent = torch.floor(28 - torch.log2(total.clamp(min=torch.finfo(total.dtype).tiny))).clamp(max=100)
    return torch.exp2(exponent)[:, None, None]


def _whole(values: Tensor, scale: Tensor) -> Tensor:
    scale = scale.view(-1, *(1,) * (values.ndim - 1))
    return torch.round(values * scale).to(torch.int32)


def _check(unary: Tensor, right: Tensor, down: Tensor) -> None:
    height, width = unary.shape[2:]
    if right.shape[1:] != (height, width - 1) or down.shape[1:] != (height - 1, width):
        raise UserError(
            f"a grid of {height} x {width} cells has edges (height, width - 1) and (height - 1, width), not "
            f"{tuple(right.shape[1:])} and {tuple(down.shape[1:])}."
        )
    if not all(part.isfinite().all() for part in (unary, right, down)):
        raise UserError("the energy of the mask is not finite: look at the loss the saliency comes from.")
    if any(len(edges.flatten()) and edges.min() < 0 for edges in (right, down)):
        raise UserError("the energy of the mask has edges below 0, which no cut can minimise: lower gamma.")
    bend = unary.diff(n=2, dim=1)
    if bend.numel() and bend.min() < -1e-5 * unary.abs().max():
        raise UserError("the energy of the mask is not convex in the label; the cut would not be exact.")
