"""Triton kernels of batch attention, forward and backward.

Queries, keys and values are read in place from the output of the input projection, (B, N, 3C): samples of a position
are N x 3C elements apart, a head of one sample is contiguous. Neighbouring programs take neighbouring
heads and positions, so together they read whole rows. A forward program takes a block of queries of one (group,
position, head).

The backward recomputes weights and dropout masks; nothing of size B x B is stored. Groups that fit one tile take one
program for each (group, position, head), which gives all three gradients and needs neither the output nor its
log-sum-exp. Larger groups take two passes, over blocks of queries and over blocks of keys. The scale of dropout is
applied once, at the end, not element by element.

The backward also writes partial sums over rows for the bias gradient of the input projection, one line of `sums` per
program, for queries and values. That of the keys is zero: a constant added to all keys changes no softmax.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels.random_bits import keep_narrow_tile, ones_narrow_tile, zero_dropped

# Not specialised: Triton would otherwise recompile for sizes of 1 and for multiples of 16.
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
    """Load a (len(sample), BD) tile; columns from D on are 0, and without EVEN so are rows that are not `inside`."""
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
    """Mask scores with -inf: keys beyond the group, and invalid keys other than the query itself."""
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
        if HAS_VALID:  # a whole block of keys may be masked
            shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        # Subtract before scaling: the compiler would fuse product and difference, which rounds differently from the
        # product in the peak; with extreme scores, far beyond those of any training, a weight would be infinite.
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
    if not SINGLE:  # the single-tile backward recomputes the sum
        at = (position * heads + head).to(tl.int64) * batch + start + query
        tl.store(lse + at, peak + tl.log2(safe) / scale_log2, mask=query_inside)


@triton.jit(do_not_specialize=SIZES)
def attend_backward_tile(
    qkv, grad_out, grad_qkv, query_sums, value_sums, valid, seed, batch, positions, heads, group, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    _, head, position, part = find_problem(tl.program_id(0), 1, positions, heads)
    start = part * group
    width = heads * D
    row = tl.arange(0, BM)
    inside = row < tl.minimum(group, batch - start)
    offset, stride = position.to(tl.int64) * 3 * width + head * D, positions.to(tl.int64) * 3 * width
    q = load_rows(qkv + offset, start + row, stride, inside, D, BD, EVEN)
    k = load_rows(qkv + offset + width, start + row, stride, inside, D, BD, EVEN)
    v = load_rows(qkv + offset + 2 * width, start + row, stride, inside, D, BD, EVEN)
    grad = load_rows(grad_out + position.to(tl.int64) * width + head * D, start + row, positions.to(tl.int64) * width,
                     inside, D, BD, EVEN)  # fmt: skip

    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    score = hide(score, valid, row, row, inside, start, position, positions, HAS_VALID, EVEN)
    peak = tl.max(score, 1)
    if HAS_VALID:  # rows beyond the group may have all keys masked
        peak = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp2((score - peak[:, None]) * scale_log2)  # in this order: see the forward
    total = tl.sum(weight, 1)
    if HAS_VALID:
        total = tl.where(total == 0.0, 1.0, total)
    weight = weight * (1.0 / total)[:, None]
    grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    kept = weight
    if BITS > 0:
        problem = (first_position + position) * heads + head
        ones = ones_narrow_tile(tl.load(seed), 0, problem, start + row, 0, threshold, BM, BITS)
        grad_weight, kept = zero_dropped(grad_weight, ones), zero_dropped(weight, ones)
    grad_v = tl.dot(tl.trans(kept.to(grad.dtype)), grad, input_precision=PRECISION) * keep_scale
    store_rows(grad_qkv + offset + 2 * width, start + row, stride, inside, grad_v, D, BD, EVEN)
    line = part * positions + position
    if value_sums is not None:
        _store_sum(value_sums, tl.sum(grad_v, 0), line, width, head, D, BD)
    mean = tl.sum(weight * grad_weight, 1)
    grad_score = (weight * (grad_weight - mean[:, None])).to(q.dtype)
    grad_q = tl.dot(grad_score, k, input_precision=PRECISION) * (scale * keep_scale)
    store_rows(grad_qkv + offset, start + row, stride, inside, grad_q, D, BD, EVEN)
    if query_sums is not None:
        _store_sum(query_sums, tl.sum(grad_q, 0), line, width, head, D, BD)
    grad_k = tl.dot(tl.trans(grad_score), q, input_precision=PRECISION) * (scale * keep_scale)
    store_rows(grad_qkv + offset + width, start + row, stride, inside, grad_k, D, BD, EVEN)


@triton.jit(do_not_specialize=SIZES)
def attend_backward_queries(
    qkv, out, grad_out, grad_qkv, lse, means, sums, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, in a loop over the key blocks of the group. Stores in `means`, for the pass over
    keys, the mean of the gradients of a query's weights, sum(out * grad_out)."""
    block, head, position, part = find_problem(tl.program_id(0), blocks, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    base, stride = qkv + position.to(tl.int64) * 3 * width + head * D, positions.to(tl.int64) * 3 * width
    offset, out_stride = position.to(tl.int64) * width + head * D, positions.to(tl.int64) * width
    problem = (first_position + position) * heads + head
    if BITS > 0:
        word = tl.load(seed)
    query = block * BM + tl.arange(0, BM)
    query_inside = query < length
    saved = (position * heads + head).to(tl.int64) * batch + start + query
    grad = load_rows(grad_out + offset, start + query, out_stride, query_inside, D, BD, EVEN)
    mixed = load_rows(out + offset, start + query, out_stride, query_inside, D, BD, EVEN)
    mean = tl.sum(mixed.to(tl.float32) * grad.to(tl.float32), 1) / keep_scale
    tl.store(means + saved, mean, mask=query_inside)
    q = load_rows(base, start + query, stride, query_inside, D, BD, EVEN)
    log_total = tl.load(lse + saved, mask=query_inside, other=0.0)
    grad_q = tl.zeros((BM, BD), tl.float32)
    for first in range(0, length, BN):
        key = first + tl.arange(0, BN)
        key_inside = key < length
        k = load_rows(base + width, start + key, stride, key_inside, D, BD, EVEN)
        v = load_rows(base + 2 * width, start + key, stride, key_inside, D, BD, EVEN)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score = hide(score, valid, query, key, key_inside, start, position, positions, HAS_VALID, EVEN)
        weight = tl.exp2((score - log_total[:, None]) * scale_log2)
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if BITS > 0:
            keep = keep_narrow_tile(word, 0, problem, start + query, first, threshold, BN, BITS)
            grad_weight = tl.where(keep, grad_weight, 0.0)
        grad_score = weight * (grad_weight - mean[:, None])
        grad_q = tl.dot(grad_score.to(k.dtype), k, grad_q, input_precision=PRECISION)
    grad_q = grad_q * (scale * keep_scale)
    store_rows(grad_qkv + position.to(tl.int64) * 3 * width + head * D, start + query, stride, query_inside, grad_q, D,
               BD, EVEN)  # fmt: skip
    if sums is not None:
        _store_sum(sums, tl.sum(grad_q, 0), (part * positions + position) * blocks + block, width, head, D, BD)


@triton.jit(do_not_specialize=SIZES)
def attend_backward_keys(
    qkv, grad_out, grad_qkv, lse, means, sums, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, in a loop over the query blocks of the group.

    Scores are queries by keys, as in the other passes: transposed, each thread would have to draw the bits of many
    queries instead of two. The gradients are kept transposed until the end: so scores are the second factor of the
    products, out of shared memory. As the first factor, transposed, they would come out of registers, and every product
    would wait for the one before.
    """
    block, head, position, part = find_problem(tl.program_id(0), blocks, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    base, stride = qkv + position.to(tl.int64) * 3 * width + head * D, positions.to(tl.int64) * 3 * width
    grad_base, grad_stride = grad_out + position.to(tl.int64) * width + head * D, positions.to(tl.int64) * width
    saved = (position * heads + head).to(tl.int64) * batch + start
    problem = (first_position + position) * heads + head
    if BITS > 0:
        word = tl.load(seed)
    key = block * BN + tl.arange(0, BN)
    key_inside = key < length
    k = load_rows(base + width, start + key, stride, key_inside, D, BD, EVEN)
    v = load_rows(base + 2 * width, start + key, stride, key_inside, D, BD, EVEN)
    grad_k = tl.zeros((BD, BN), tl.float32)
    grad_v = tl.zeros((BD, BN), tl.float32)
    for first in range(0, length, BM):
        query = first + tl.arange(0, BM)
        query_inside = query < length
        # Rows beyond the group are zeros, and so are their gradients: they need no mask.
        q = load_rows(base, start + query, stride, query_inside, D, BD, EVEN)
        grad = load_rows(grad_base, start + query, grad_stride, query_inside, D, BD, EVEN)
        log_total = tl.load(lse + saved + query, mask=query_inside, other=0.0)
        mean = tl.load(means + saved + query, mask=query_inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        score = hide(score, valid, query, key, key_inside, start, position, positions, HAS_VALID, EVEN)
        weight = tl.exp2((score - log_total[:, None]) * scale_log2)
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        kept = weight
        if BITS > 0:
            ones = ones_narrow_tile(word, 0, problem, start + query, block * BN, threshold, BN, BITS)
            grad_weight, kept = zero_dropped(grad_weight, ones), zero_dropped(weight, ones)
        grad_v = tl.dot(tl.trans(grad), kept.to(grad.dtype), grad_v, input_precision=PRECISION)
        grad_score = weight * (grad_weight - mean[:, None])
        grad_k = tl.dot(tl.trans(q), grad_score.to(q.dtype), grad_k, input_precision=PRECISION)
    grad_v, grad_k = tl.trans(grad_v) * keep_scale, tl.trans(grad_k)
    to = grad_qkv + position.to(tl.int64) * 3 * width + head * D
    store_rows(to + width, start + key, stride, key_inside, grad_k * (scale * keep_scale), D, BD, EVEN)
    store_rows(to + 2 * width, start + key, stride, key_inside, grad_v, D, BD, EVEN)
    if sums is not None:
        grad_v = tl.where(key_inside[:, None], grad_v, 0.0)
        _store_sum(sums, tl.sum(grad_v, 0), (part * positions + position) * blocks + block, width, head, D, BD)


@triton.jit
def _store_sum(sums, value, line, width, head, D: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    tl.store(sums + line.to(tl.int64) * width + head * D + column, value, mask=column < D)
