"""Dropout masks of the kernels from a counter-based generator.

Whether an element is kept depends on nothing but (seed, site, problem, row, column): not on tile sizes, not on the
order of programs, not on the device. The backward pass draws the mask again instead of reading it; the same seed gives
the same mask. The counter is Philox4x32 with 7 rounds, the fewest that pass every published test of randomness. Its
four words serve as many neighbouring columns as the probability allows: 128 for 0.5, 16 for a multiple of 1/256, else 8
(the probability is then rounded to a multiple of 1/65536).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from torch import Tensor

ROUNDS = 7
_ROUNDS = tl.constexpr(ROUNDS)


class Site(IntEnum):
    """The four places of a layer with dropout; each draws its own bits."""

    ATTENTION = 0
    ATTENDED = 1
    HIDDEN = 2
    MLP = 3


@dataclass(frozen=True)
class Drop:
    """A probability as the kernels see it: an element is dropped when its `bits` random bits are below `threshold`."""

    bits: int  # 0: nothing is dropped, and nothing is drawn
    threshold: int
    scale: float

    @staticmethod
    def of(probability: float) -> Drop:
        if probability <= 0.0:
            return Drop(0, 0, 1.0)
        bits = 1 if probability == 0.5 else 8 if (probability * 256).is_integer() else 16
        threshold = round(probability * 2**bits)
        dropped = threshold / 2**bits
        return Drop(bits, threshold, 0.0 if dropped >= 1.0 else 1.0 / (1.0 - dropped))


def draw_seed(device: torch.device) -> Tensor:
    """A seed of torch's generator of the device, without host synchronisation; a captured CUDA graph draws a new one at
    every replay."""
    return torch.randint(1 << 62, (1,), device=device)


@triton.jit
def keep_tile(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
              BITS: tl.constexpr):  # fmt: skip
    """Keep mask of the tile (len(row), COLUMNS); `first_column` is 0 or a multiple of COLUMNS."""
    PER_WORD: tl.constexpr = min(32 // BITS, COLUMNS)
    WORDS: tl.constexpr = COLUMNS // PER_WORD
    ROWS: tl.constexpr = row.shape[0]
    word = (first_column // (32 // BITS) + tl.arange(0, WORDS)).to(tl.int32)[None, :]
    zero = row[:, None] * 0 + word * 0
    a, b, c, d = tl.philox(seed, zero + word // 4, zero + row[:, None], zero + problem, zero + site, _ROUNDS)
    drawn = tl.where(word % 4 < 2, tl.where(word % 2 == 0, a, b), tl.where(word % 2 == 0, c, d))
    shift = (tl.arange(0, PER_WORD) * BITS).to(tl.uint32)[None, None, :]
    value = (tl.broadcast_to(drawn[:, :, None], (ROWS, WORDS, PER_WORD)) >> shift) & ((1 << BITS) - 1)
    return tl.reshape(value, (ROWS, COLUMNS)).to(tl.int32) >= threshold


@triton.jit
def keep_narrow_tile(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
                     BITS: tl.constexpr):  # fmt: skip
    """The same for at most 128 columns: where one bit serves an element, one draw for each row is enough."""
    if BITS != 1:
        return keep_tile(seed, site, problem, row, first_column, threshold, COLUMNS, BITS)
    drawn, place = _draw_narrow(seed, site, problem, row, first_column, COLUMNS)
    return (drawn & (tl.full((1, COLUMNS), 1, tl.uint32) << place)) != 0


@triton.jit
def ones_narrow_tile(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
                     BITS: tl.constexpr):  # fmt: skip
    """The mask of `keep_narrow_tile` as words of ones and zeros, for `zero_dropped`."""
    if BITS != 1:
        keep = keep_tile(seed, site, problem, row, first_column, threshold, COLUMNS, BITS)
        return tl.where(keep, -1, 0)
    drawn, place = _draw_narrow(seed, site, problem, row, first_column, COLUMNS)
    # Sign-extend the bit over its word by a shift of 31, not as a constant: the compiler would make it a comparison.
    return (drawn << (31 - place)).to(tl.int32, bitcast=True) >> (30 + threshold)


@triton.jit
def zero_dropped(value, ones):
    """`value` where the mask is one, else 0. For values that are rounded to half precision next, the compiler would
    move a comparison behind the rounding, to half words, and pack its result: twice the instructions."""
    return (value.to(tl.int32, bitcast=True) & ones).to(tl.float32, bitcast=True)


@triton.jit
def _draw_narrow(seed, site: tl.constexpr, problem, row, first_column, COLUMNS: tl.constexpr):
    """For each element of the tile, the word that holds its bit and the bit's position in that word."""
    zero = row * 0
    a, b, c, d = tl.philox(seed, zero + first_column // 128, row, zero + problem, zero + site, _ROUNDS)
    column = tl.arange(0, COLUMNS)[None, :]
    if COLUMNS == 128:
        drawn = tl.where(column < 64, tl.where(column < 32, a[:, None], b[:, None]),
                         tl.where(column < 96, c[:, None], d[:, None]))  # fmt: skip
    else:
        in_upper = first_column % 128 >= 64
        even, odd = tl.where(in_upper, c, a), tl.where(in_upper, d, b)
        if COLUMNS == 64:
            drawn = tl.where(column < 32, even[:, None], odd[:, None])
        else:
            drawn = tl.where(first_column % 64 >= 32, odd, even)[:, None]
            column = column + first_column % 32
    return drawn, (column % 32).to(tl.uint32)
