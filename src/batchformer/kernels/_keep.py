"""The device side of `random_bits`: the mask of a tile."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels.random_bits import ROUNDS

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def keep_tile(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
              BITS: tl.constexpr):  # fmt: skip
    """Which elements of the tile (len(row), COLUMNS) stay; `first_column` is 0 or a multiple of COLUMNS."""
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
    # The bit spread over its word, by a shift of 31: the compiler must not know, or makes a comparison of it again.
    return (drawn << (31 - place)).to(tl.int32, bitcast=True) >> (30 + threshold)


@triton.jit
def zero_dropped(value, ones):
    """What the mask leaves of `value`. For values that are rounded to half precision next, a comparison would be
    taken behind the rounding, on half words, and its outcome packed to wait there: twice the instructions."""
    return (value.to(tl.int32, bitcast=True) & ones).to(tl.float32, bitcast=True)


@triton.jit
def _draw_narrow(seed, site: tl.constexpr, problem, row, first_column, COLUMNS: tl.constexpr):
    """For each element of the tile the word that holds its bit, and the bit's place in there."""
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
