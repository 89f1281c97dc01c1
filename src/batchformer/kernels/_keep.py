"""The device side of `random_bits`: masks for a tile, written either way round."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels.random_bits import ROUNDS

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def keep_tile(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
              BITS: tl.constexpr):  # fmt: skip
    """Which elements of the tile (len(row), COLUMNS) stay; `first_column` is 0 or a multiple of 32."""
    PER_WORD: tl.constexpr = min(32 // BITS, COLUMNS)
    WORDS: tl.constexpr = COLUMNS // PER_WORD
    ROWS: tl.constexpr = row.shape[0]
    word = (first_column // (32 // BITS) + tl.arange(0, WORDS)).to(tl.int32)[None, :]
    zero = row[:, None] * 0 + word * 0
    drawn, _, _, _ = tl.philox(seed, zero + word, zero + row[:, None], zero + problem, zero + site, _ROUNDS)
    shift = (tl.arange(0, PER_WORD) * BITS).to(tl.uint32)[None, None, :]
    value = (tl.broadcast_to(drawn[:, :, None], (ROWS, WORDS, PER_WORD)) >> shift) & ((1 << BITS) - 1)
    return tl.reshape(value, (ROWS, COLUMNS)).to(tl.int32) >= threshold


@triton.jit
def keep_tile_turned(seed, site: tl.constexpr, problem, row, first_column, threshold, COLUMNS: tl.constexpr,
                     BITS: tl.constexpr):  # fmt: skip
    """The same as (COLUMNS, len(row)): the transpose, without moving anything."""
    PER_WORD: tl.constexpr = min(32 // BITS, COLUMNS)
    WORDS: tl.constexpr = COLUMNS // PER_WORD
    ROWS: tl.constexpr = row.shape[0]
    word = (first_column // (32 // BITS) + tl.arange(0, WORDS)).to(tl.int32)[:, None]
    zero = row[None, :] * 0 + word * 0
    drawn, _, _, _ = tl.philox(seed, zero + word, zero + row[None, :], zero + problem, zero + site, _ROUNDS)
    shift = (tl.arange(0, PER_WORD) * BITS).to(tl.uint32)[None, :, None]
    value = (tl.broadcast_to(drawn[:, None, :], (WORDS, PER_WORD, ROWS)) >> shift) & ((1 << BITS) - 1)
    return tl.reshape(value, (COLUMNS, ROWS)).to(tl.int32) >= threshold
