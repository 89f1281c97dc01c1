"""Forward of batch attention: one program for a block of queries of one (group, position, head).

Queries, keys and values are read where the input projection has left them, in (B, N, 3C): the samples of a position are
N x 3C elements apart, a head of one sample is a contiguous run of its width. Neighbouring programs take neighbouring
heads and positions, so together they read whole rows.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels._keep import keep_tile

# One compiled kernel serves every size: Triton would else compile anew for sizes of 1 and for multiples of 16.
SIZES = ["batch", "positions", "heads", "group", "blocks", "first_position", "threshold"]


@triton.jit
def find_problem(pid, blocks, positions, heads):
    """Program number -> (block of the group, head, position, group): neighbours share keys and values."""
    block = pid % blocks
    rest = pid // blocks
    head = rest % heads
    rest = rest // heads
    return block, head, rest % positions, rest // positions


@triton.jit
def rows_at(base, sample, stride, inside, D: tl.constexpr, BD: tl.constexpr):
    """Pointers and mask of the rows of some samples: (len(sample), BD), of which D columns exist."""
    column = tl.arange(0, BD)
    pointers = base + sample.to(tl.int64)[:, None] * stride + column[None, :]
    mask = inside[:, None]
    if D < BD:
        mask = mask & (column[None, :] < D)
    return pointers, mask


@triton.jit
def visible(valid, sample, inside, position, positions, HAS_VALID: tl.constexpr):
    """Which keys anybody may look at."""
    seen = inside
    if HAS_VALID:
        seen = tl.load(valid + sample.to(tl.int64) * positions + position, mask=inside, other=0) != 0
    return seen


@triton.jit(do_not_specialize=SIZES)
def attend_forward(
    qkv, out, lse, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr,
    SINGLE: tl.constexpr, PRECISION: tl.constexpr,
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
    pointers, mask = rows_at(base, start + query, stride, query_inside, D, BD)
    q = tl.load(pointers, mask=mask, other=0.0)
    if BITS > 0:
        key_seed = tl.load(seed)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    for first in range(0, BN if SINGLE else length, BN):
        key = first + tl.arange(0, BN)
        key_inside = key < length
        key_at, key_mask = rows_at(base, start + key, stride, key_inside, D, BD)
        k = tl.load(key_at + width, mask=key_mask, other=0.0)
        v = tl.load(key_at + 2 * width, mask=key_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        seen = visible(valid, start + key, key_inside, position, positions, HAS_VALID)[None, :]
        if HAS_VALID:
            seen = seen | ((query[:, None] == key[None, :]) & key_inside[None, :])
        score = tl.where(seen, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weight, 1)
        if BITS > 0:
            keep = keep_tile(key_seed, 0, problem, start + query, first, threshold, BN, BITS)
            weight = tl.where(keep, weight, 0.0)
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        peak = new_peak
    safe = tl.where(total == 0.0, 1.0, total)
    mixed = mixed * (keep_scale / safe)[:, None]
    stride_out = positions.to(tl.int64) * width
    pointers, mask = rows_at(out + position.to(tl.int64) * width + head * D, start + query, stride_out,
                             query_inside, D, BD)  # fmt: skip
    tl.store(pointers, mixed.to(out.dtype.element_ty), mask=mask)
    if not SINGLE:  # the backward of a single tile sums again
        at = (position * heads + head).to(tl.int64) * batch + start + query
        tl.store(lse + at, peak + tl.log2(safe), mask=query_inside)
