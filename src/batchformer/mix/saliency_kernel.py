"""Centre against surround on a GPU: all sizes of the surround in one launch.

The tensor operations of `saliency` write some dozen maps for each size; at 224 pixels that is most of their time.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from jaxtyping import Float, Int
from torch import Tensor


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
    with torch.cuda.device_of(grey):  # Triton launches where torch is, which need not be where they are
        _centre_surround[grid](grey, integral, on, off, height, width, *surrounds, BLOCK=block)
    return on, off
