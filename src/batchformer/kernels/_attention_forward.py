"""Forward of batch attention: one program for a block of queries of one (group, position, head).

Queries, keys and values are read where the input projection has left them, in (B, N, 3C): the samples of a position are
N x 3C elements apart, a head of one sample is a contiguous run of its width. Neighbouring programs take neighbouring
heads and positions, so together they read whole rows.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels._keep import ones_narrow_tile, zero_dropped

# One compiled kernel serves every size: Triton would else compile anew for sizes of 1 and for multiples of 16.
SIZES = ["batch", "positions", "heads", "group", "blocks", "first_position", "threshold"]


@triton.jit
def find_problem(number, blocks, positions, heads):
    """Program number -> (block of the group, head, position, group): neighbours share keys and values."""
    block = number % blocks
    rest = number // blocks
    head = rest % heads
    rest = rest // heads
    return block, head, rest % positions, rest // positions


@triton.jit
def load_rows(base, sample, stride, inside, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """(len(sample), BD) of which D columns exist; with EVEN every sample does, else those that are inside."""
    column = tl.arange(0, BD)
    pointers = base + sample.to(tl.int64)[:, None] * stride + column[None, :]
    if EVEN and D == BD:
        return tl.load(pointers)
    mask = inside[:, None]
    if D < BD:
        mask = mask & (column[None, :] < D)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(base, sample, stride, inside, value, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    column = tl.arange(0, BD)
    pointers = base + sample.to(tl.int64)[:, None] * stride + column[None, :]
    value = value.to(base.dtype.element_ty)
    if EVEN and D == BD:
        tl.store(pointers, value)
    else:
        mask = inside[:, None]
        if D < BD:
            mask = mask & (column[None, :] < D)
        tl.store(pointers, value, mask=mask)


@triton.jit
def hide(score, valid, query, key, inside, start, position, positions, HAS_VALID: tl.constexpr, EVEN: tl.constexpr):
    """-inf where a query (row) may not look: beyond the group, or at what is not valid and not itself."""
    if HAS_VALID:
        seen = tl.load(valid + (start + key).to(tl.int64) * positions + position, mask=inside, other=0) != 0
        itself = (query[:, None] == key[None, :]) & inside[None, :]
        score = tl.where(seen[None, :] | itself, score, -float("inf"))
    elif not EVEN:
        score = tl.where(inside[None, :], score, -float("inf"))
    return score


@triton.jit(do_not_specialize=SIZES)
def attend_forward(
    qkv, out, lse, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    block, head, position, part = find_problem(tl.program_id(0), blocks, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    stride = positions.to(tl.int64) * 3 * width
    base = qkv + position.to(tl.int64) * 3 * width + head * D
    problem = (first_position + position) * heads + head

    query = block * BM + tl.arange(0, BM)
    query_inside = query < length
    q = load_rows(base, start + query, stride, query_inside, D, BD, EVEN)
    if BITS > 0:
        word = tl.load(seed)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    for first in range(0, BN if SINGLE else length, BN):
        key = first + tl.arange(0, BN)
        key_inside = key < length
        k = load_rows(base + width, start + key, stride, key_inside, D, BD, EVEN)
        v = load_rows(base + 2 * width, start + key, stride, key_inside, D, BD, EVEN)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score = hide(score, valid, query, key, key_inside, start, position, positions, HAS_VALID, EVEN)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shift = new_peak
        if HAS_VALID:  # a whole block of keys may be hidden
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        # First the difference: a product that the compiler joins with it is not rounded as the one in the peak was, and
        # of scores far beyond those of any training a weight of infinity would be left.
        weight = tl.exp2((score - shift[:, None]) * scale_log2)
        if SINGLE:
            total = tl.sum(weight, 1)
        else:
            shrink = tl.exp2((peak - shift) * scale_log2)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None]
        if BITS > 0:
            ones = ones_narrow_tile(word, 0, problem, start + query, first, threshold, BN, BITS)
            weight = zero_dropped(weight, ones)
        mixed = tl.dot(weight.to(v.dtype), v, mixed, input_precision=PRECISION)
        peak = new_peak
    safe = tl.where(total == 0.0, 1.0, total)
    mixed = mixed * (keep_scale / safe)[:, None]
    stride_out = positions.to(tl.int64) * width
    store_rows(out + position.to(tl.int64) * width + head * D, start + query, stride_out, query_inside, mixed, D, BD,
               EVEN)  # fmt: skip
    if not SINGLE:  # the backward of a single tile sums again
        at = (position * heads + head).to(tl.int64) * batch + start + query
        tl.store(lse + at, peak + tl.log2(safe) / scale_log2, mask=query_inside)
