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
    return ((drawn >> (column % 32).to(tl.uint32)) & 1) != 0
