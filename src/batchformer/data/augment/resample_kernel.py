"""Triton kernel of a resized crop: both matrix products in one launch, with the intermediate result on chip.

The tensor operations of `resample` write the enlarged images about ten times as floats before they are bytes.
"""

import torch
import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from jaxtyping import Float, UInt8
from torch import Tensor

MOST_PIXELS = 64  # of a side of the images: a program loads a whole image
_TILE = 64


@triton.jit
def _whole(values):
    return tl.minimum(tl.maximum(tl.floor(values + 0.5), 0.0), 255.0)


@triton.jit
def _resample(
    images,
    across,  # weights along a line: (2, n or 1, size, columns), the coarse part first
    down,  # and along a column: (2, n or 1, size, rows)
    out,
    rows,
    columns,
    size,
    across_part,
    across_image,
    down_part,
    down_image,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    plane = image * tl.num_programs(1) + tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.program_id(2) * TILE + tl.arange(0, TILE)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    pixels = tl.load(images + plane * rows * columns + row[:, None] * columns + column[None, :], mask=there, other=0)
    pixels = pixels.to(tl.float32).to(tl.float16)  # eight bits, as the weights have: exact
    weights = across + image * across_image + x[None, :] * columns + column[:, None]
    there = (column < columns)[:, None] & (x < size)[None, :]
    coarse = tl.load(weights, mask=there, other=0.0).to(tl.float16)
    fine = tl.load(weights + across_part, mask=there, other=0.0).to(tl.float16)
    lines = _whole(tl.dot(pixels, coarse) + tl.dot(pixels, fine)).to(tl.float16)
    for first in range(0, size, TILE):
        y = first + tl.arange(0, TILE)
        part = down + image * down_image + y[:, None] * rows + row[None, :]
        known = (y < size)[:, None] & (row < rows)[None, :]
        large = tl.load(part, mask=known, other=0.0).to(tl.float16)
        small = tl.load(part + down_part, mask=known, other=0.0).to(tl.float16)
        values = _whole(tl.dot(large, lines) + tl.dot(small, lines))
        wanted = (y < size)[:, None] & (x < size)[None, :]
        tl.store(out + (plane * size + y[:, None]) * size + x[None, :], values.to(tl.uint8), mask=wanted)


def resample_in_one_launch(
    images: UInt8[Tensor, "n channels rows columns"],
    across: Float[Tensor, "2 #n size columns"],
    down: Float[Tensor, "2 #n size rows"],
) -> UInt8[Tensor, "n channels size size"]:
    """Every line times `across`, whole numbers, every column times `down`, whole numbers."""
    n, channels, rows, columns = images.shape
    size = across.shape[2]
    images, across, down = images.contiguous(), across.contiguous(), down.contiguous()
    out = torch.empty(n, channels, size, size, dtype=torch.uint8, device=images.device)
    with torch.cuda.device_of(images):  # Triton launches on torch's current device
        _resample[(n, channels, triton.cdiv(size, _TILE))](
            images, across, down, out, rows, columns, size,
            across.stride(0), across.stride(1) if across.shape[1] > 1 else 0,
            down.stride(0), down.stride(1) if down.shape[1] > 1 else 0,
            ROWS=max(16, triton.next_power_of_2(rows)), COLUMNS=max(16, triton.next_power_of_2(columns)), TILE=_TILE,
        )  # fmt: skip
    return out
