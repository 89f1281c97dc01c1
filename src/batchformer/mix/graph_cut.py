"""Labels of least energy over grids of cells, by minimum cuts batched over many small grids."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.errors import UserError


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
        raise UserError(f"the graph cut is for 2 or 3 labels, and the energy has {labels}.")
    if unary.device.type == "cpu":  # on other devices the check would synchronise the host
        _check(unary, right, down)
    edge = 1 / (labels - 1) ** 2
    scale = _scale(unary, right, down)
    right, down = _rounded(right * edge, scale), _rounded(down * edge, scale)
    steps = _rounded(unary[:, 1:] - unary[:, :-1], scale)  # what it costs a cell to be raised from each label
    if labels == 2:
        return cut_grid(-steps[:, 0], right, down).long()
    raised = cut_grid(-steps[:, 1], right, down).long()
    gain = torch.where(raised.bool(), steps[:, 1], steps[:, 0]) + _lowered(raised, right, down)
    return 1 + raised - cut_grid(gain, right, down).long()


def _lowered(labels: Tensor, right: Tensor, down: Tensor) -> Int[Tensor, "batch height width"]:
    """Gain of lowering one cell, from its edges, without the cost of the edges that are cut.

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


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
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


_SWEEPS = 16  # between two exact labellings: few enough to stop soon, many enough to make good use of the labels


@torch.no_grad()
def cut_grid(
    gain: Int[Tensor, "batch height width"],
    right: Int[Tensor, "batch height width-1"],
    down: Int[Tensor, "batch height-1 width"],
) -> Bool[Tensor, "batch height width"]:
    """The set of cells with the largest sum of `gain` minus the edges that leave it, for each grid; exact.

    That is the minimum cut of a graph where cells with a gain are connected to the source, those with a loss to the
    sink, and neighbours by the edges `right` and `down` (none below 0). Of several best sets it is the largest.

    Push-relabel (Goldberg and Tarjan, 1988), all cells of all grids in parallel: a cell with excess pushes it to
    neighbours one step nearer to a cell with a deficit; the distances are kept as lower bounds by relabelling all cells
    after each sweep (valid, since labels only grow) and recomputed exactly every few sweeps, which also finds the cells
    that reach no deficit any more. When no excess reaches one, those cells are the set; finished grids are removed from
    the batch. All numbers are 32-bit integers: sums of gains and four times an edge must stay below 2**30.

    On a CUDA device all of it is one launch (`triton_kernels`), without host synchronisation.
    """
    batch, height, width = gain.shape
    if gain.is_cuda and (in_one_launch := _kernel(gain.device, height * width)) is not None:
        room = _edges(right, down).permute(2, 0, 1).contiguous()
        cells, _ = in_one_launch(gain.to(torch.int32).reshape(batch, -1).contiguous(), room, width)
        return cells.view(batch, height, width)
    ahead, back = _neighbours(height, width, gain.device)
    # the batch is the last dimension: a neighbour is then a contiguous row
    excess = gain.to(torch.int32).reshape(batch, -1).T.contiguous()
    room = _edges(right, down)
    unreached = torch.zeros_like(excess, dtype=torch.bool)
    working: Tensor | None = None  # the columns of `unreached` still in excess and room; None is all of them
    far = height * width + 1
    while True:
        distance = _distances(excess, room, ahead, far)
        cut_off = distance >= far
        if working is None:
            unreached = cut_off
        else:
            unreached[:, working] = cut_off
        busy = ((excess > 0) & ~cut_off).any(0)
        left = busy.nonzero()[:, 0]
        if not len(left):
            return unreached.T.reshape(batch, height, width)
        if len(left) <= 0.75 * len(busy):
            working = left if working is None else working[left]
            excess, room, distance = excess[:, left], room[:, :, left], distance[:, left]
        for _ in range(_SWEEPS):
            excess, room, distance = _sweep(excess, room, distance, ahead, back, far)


def _sweep(
    excess: Int[Tensor, "cells batch"],
    room: Int[Tensor, "4 cells batch"],
    distance: Int[Tensor, "cells batch"],
    ahead: Int[Tensor, " 4*cells"],
    back: Int[Tensor, " 4*cells"],
    far: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One push-relabel sweep: every cell pushes its excess to neighbours one step nearer, then is relabelled."""
    # arithmetic in place of conditions: integer comparisons are slow on a CPU
    beyond = distance.index_select(0, ahead).view_as(room)
    nearer = (distance - beyond).clamp_(min=0)  # 1 or 0 where there is room: labels are never more than a step apart
    pushed = nearer.mul_(room)
    rest = excess.clamp(min=0)
    for direction in pushed:
        torch.minimum(direction, rest, out=direction)
        rest = rest - direction
    change = pushed.flatten(0, 1).index_select(0, back).view_as(room).sub_(pushed)
    room = room + change
    excess = excess + change.sum(0, dtype=torch.int32)
    allowed = torch.add(beyond, room.clamp(max=1), alpha=-far).amin(0).add_(far + 1)
    distance = distance.maximum(allowed).clamp_(max=far).mul_((excess + 1).clamp_(0, 1))
    return excess, room, distance


def _distances(excess: Tensor, room: Tensor, ahead: Tensor, far: int) -> Int[Tensor, "cells batch"]:
    """Distance of each cell to the nearest one with a deficit, along edges with room; `far` where there is no path."""
    distance = (excess + 1).clamp_(0, 1).mul_(far)
    closed = room.clamp(max=1).sub_(1).mul_(-far)
    while True:
        before = distance
        for _ in range(8):  # convergence is checked every eighth step: the check synchronises the host
            beyond = distance.index_select(0, ahead).view_as(room)
            distance = distance.minimum(beyond.add_(closed).amin(0).add_(1))
        if torch.equal(distance, before):
            return distance


def _edges(right: Tensor, down: Tensor) -> Int[Tensor, "4 cells batch"]:
    """Residual capacity (room) to the right, left, down and up; none over the border of the grid."""
    batch, height, width = len(right), right.shape[1], down.shape[2]
    room = torch.zeros(4, height, width, batch, dtype=torch.int32, device=right.device)
    room[0, :, :-1] = room[1, :, 1:] = right.permute(1, 2, 0).to(torch.int32)
    room[2, :-1] = room[3, 1:] = down.permute(1, 2, 0).to(torch.int32)
    return room.flatten(1, 2)


@lru_cache(256)
def _kernel(device: torch.device, cells: int) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None:
    """The cut as one launch, if it runs here: Triton may be missing, or what it needs to build its launcher."""
    try:
        from batchformer.mix.triton_kernels import LARGEST_GRID, cut_grid_in_one_launch

        if cells > LARGEST_GRID:
            return None
        gain = torch.zeros(1, cells, dtype=torch.int32, device=device)
        cut_grid_in_one_launch(gain, gain.new_zeros(1, 4, cells), cells)
    except Exception as error:
        warnings.warn(f"the graph cut runs without its Triton kernel, which is slower: {error}", stacklevel=2)
        return None
    return cut_grid_in_one_launch


@lru_cache(256)
def _neighbours(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the four neighbours of each cell, and of the pushes from these neighbours to the cell.

    Over the border it is an arbitrary cell: the capacity is 0, so it is never used.
    """
    cells = height * width
    here = torch.arange(cells, device="cpu")
    ahead = torch.stack([(here + step) % cells for step in (1, -1, width, -width)])
    opposite = torch.tensor([1, 0, 3, 2], device="cpu")[:, None]
    return ahead.flatten().to(device), (opposite * cells + ahead).flatten().to(device)
