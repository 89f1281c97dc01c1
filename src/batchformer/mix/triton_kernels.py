"""Triton kernels: the minimum cut of small grids (Puzzle-Mix), and centre against surround (SaliencyMix).

Both compute what the tensor operations of `graph_cut` and `saliency_mix` do, in one launch where those take some
thousands (the cut) or write a dozen maps for each size of the surround. A separate file, because Triton is optional.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from jaxtyping import Bool, Float, Int
from torch import Tensor

LARGEST_GRID = 1024  # cells of a grid; a program keeps ten numbers for each
_ROUNDS = 2000  # of labelling and pushing, where ten are many: an upper bound against endless loops, never met


@triton.jit
def _cut(gain, room, cut_off, unfinished, cells, width, far, rounds, BLOCK: tl.constexpr):
    # push-relabel, one program for each grid, everything in its registers
    grid = tl.program_id(0)
    here = tl.arange(0, BLOCK)
    inside = here < cells
    # over a border this is an arbitrary cell: the capacity is 0, so it is never used
    to_right, to_left = (here + 1) % BLOCK, (here + BLOCK - 1) % BLOCK
    to_below, to_above = (here + width) % BLOCK, (here + BLOCK - width) % BLOCK
    excess = tl.load(gain + grid * cells + here, mask=inside, other=0)
    rooms = room + grid * 4 * cells + here
    right = tl.load(rooms, mask=inside, other=0)
    left = tl.load(rooms + cells, mask=inside, other=0)
    below = tl.load(rooms + 2 * cells, mask=inside, other=0)
    above = tl.load(rooms + 3 * cells, mask=inside, other=0)
    distance = tl.where(excess < 0, 0, far)
    busy = tl.max((here == 0).to(tl.int32), axis=0)  # 1, as a device scalar
    while (busy > 0) & (rounds > 0):
        rounds -= 1
        distance = tl.where(excess < 0, 0, far)
        changed = busy
        while changed > 0:
            by_right = tl.where(right > 0, tl.gather(distance, to_right, 0), far)
            by_left = tl.where(left > 0, tl.gather(distance, to_left, 0), far)
            by_below = tl.where(below > 0, tl.gather(distance, to_below, 0), far)
            by_above = tl.where(above > 0, tl.gather(distance, to_above, 0), far)
            nearest = tl.minimum(tl.minimum(by_right, by_left), tl.minimum(by_below, by_above))
            nearer = tl.minimum(distance, nearest + 1)
            changed = tl.max((nearer != distance).to(tl.int32), axis=0)
            distance = nearer
        busy = tl.max(((excess > 0) & (distance < far)).to(tl.int32), axis=0)
        for _ in range(0, 16 * busy):
            at_right, at_left = tl.gather(distance, to_right, 0), tl.gather(distance, to_left, 0)
            at_below, at_above = tl.gather(distance, to_below, 0), tl.gather(distance, to_above, 0)
            rest = tl.maximum(excess, 0)
            go_right = tl.where(at_right == distance - 1, tl.minimum(right, rest), 0)
            rest -= go_right
            go_left = tl.where(at_left == distance - 1, tl.minimum(left, rest), 0)
            rest -= go_left
            go_below = tl.where(at_below == distance - 1, tl.minimum(below, rest), 0)
            rest -= go_below
            go_above = tl.where(at_above == distance - 1, tl.minimum(above, rest), 0)
            gained_right = tl.gather(go_left, to_right, 0) - go_right
            gained_left = tl.gather(go_right, to_left, 0) - go_left
            gained_below = tl.gather(go_above, to_below, 0) - go_below
            gained_above = tl.gather(go_below, to_above, 0) - go_above
            right += gained_right
            left += gained_left
            below += gained_below
            above += gained_above
            excess += gained_right + gained_left + gained_below + gained_above
            by_right = tl.where(right > 0, at_right, far)
            by_left = tl.where(left > 0, at_left, far)
            by_below = tl.where(below > 0, at_below, far)
            by_above = tl.where(above > 0, at_above, far)
            allowed = tl.minimum(tl.minimum(by_right, by_left), tl.minimum(by_below, by_above)) + 1
            distance = tl.where(excess < 0, 0, tl.minimum(tl.maximum(distance, allowed), far))
    tl.store(cut_off + grid * cells + here, (distance >= far).to(tl.int8), mask=inside)
    tl.store(unfinished + grid, busy)


def cut_grid_in_one_launch(
    gain: Int[Tensor, "batch cells"], room: Int[Tensor, "batch 4 cells"], width: int
) -> tuple[Bool[Tensor, "batch cells"], Int[Tensor, " batch"]]:
    """The cells of the cut, and for each grid 1 if it stopped at the bound on the rounds."""
    batch, cells = gain.shape
    cut_off = torch.empty(batch, cells, dtype=torch.int8, device=gain.device)
    unfinished = torch.empty(batch, dtype=torch.int32, device=gain.device)
    block = max(32, triton.next_power_of_2(cells))
    warps = max(1, min(8, block // 64))
    with torch.cuda.device_of(gain):  # Triton launches on torch's current device
        _cut[(batch,)](gain, room, cut_off, unfinished, cells, width, cells + 1, _ROUNDS, BLOCK=block, num_warps=warps)
    return cut_off.bool(), unfinished


@triton.jit
def _difference(integral, centre, y, x, height, width, inside, reach):
    top, bottom = tl.maximum(y - reach + 1, 0), tl.minimum(y + reach + 1, height)
    left, right = tl.maximum(x - reach + 1, 0), tl.minimum(x + reach + 1, width)
    above, below = integral + top * (width + 1), integral + bottom * (width + 1)
    total = tl.load(below + right, mask=inside, other=0) - tl.load(above + right, mask=inside, other=0)
    total -= tl.load(below + left, mask=inside, other=0) - tl.load(above + left, mask=inside, other=0)
    others = tl.maximum((bottom - top) * (right - left) - 1, 1)
    mean = tl.div_rn(total.to(tl.float32) - centre, others.to(tl.float32))  # rounded as a CPU rounds
    return (centre - mean).to(tl.int32)


@triton.jit
def _centre_surround(
    grey,
    integral,
    on,
    off,
    height,
    width,
    R0: tl.constexpr,
    R1: tl.constexpr,
    R2: tl.constexpr,
    R3: tl.constexpr,
    R4: tl.constexpr,
    R5: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < height * width
    y, x = pixel // width, pixel % width
    place = image * height * width + pixel
    centre = tl.load(grey + place, mask=inside, other=0.0)
    own = integral + image * (height + 1) * (width + 1)
    brighter = tl.zeros([BLOCK], tl.int32)
    darker = tl.zeros([BLOCK], tl.int32)
    for size in tl.static_range(6):
        reach = (
            R0 if size == 0 else R1 if size == 1 else R2 if size == 2 else R3 if size == 3 else R4 if size == 4 else R5
        )
        difference = _difference(own, centre, y, x, height, width, inside, reach)
        brighter += tl.maximum(difference, 0)
        darker += tl.maximum(-difference, 0)
    tl.store(on + place, brighter.to(tl.float32), mask=inside)
    tl.store(off + place, darker.to(tl.float32), mask=inside)


def centre_surround_in_one_launch(
    grey: Float[Tensor, "batch height width"],
    integral: Int[Tensor, "batch height+1 width+1"],
    surrounds: tuple[int, int, int, int, int, int],
) -> tuple[Float[Tensor, "batch height width"], Float[Tensor, "batch height width"]]:
    """What is brighter and what is darker than its surrounds, summed over the sizes."""
    batch, height, width = grey.shape
    on, off = torch.empty_like(grey), torch.empty_like(grey)
    block = 512
    grid = (triton.cdiv(height * width, block), batch)
    with torch.cuda.device_of(grey):  # Triton launches on torch's current device
        _centre_surround[grid](grey, integral, on, off, height, width, *surrounds, BLOCK=block)
    return on, off
