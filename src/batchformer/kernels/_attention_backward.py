"""Backward of batch attention. Weights and dropout masks are computed again; nothing of size B x B is stored.

Groups that fit one tile take one program for each (group, position, head), which gives all three gradients and needs
neither the output nor its log-sum-exp. Larger ones take two passes, over blocks of keys and over blocks of queries.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels._attention_forward import SIZES, find_problem, rows_at, visible
from batchformer.kernels._keep import keep_tile, keep_tile_turned


@triton.jit(do_not_specialize=SIZES)
def attend_backward_tile(
    qkv, grad_out, grad_qkv, valid, seed, batch, positions, heads, group, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    _, head, position, part = find_problem(tl.program_id(0), 1, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    row = tl.arange(0, BM)
    inside = row < length
    offset = position.to(tl.int64) * 3 * width + head * D
    stride = positions.to(tl.int64) * 3 * width
    pointers, mask = rows_at(qkv + offset, start + row, stride, inside, D, BD)
    q = tl.load(pointers, mask=mask, other=0.0)
    k = tl.load(pointers + width, mask=mask, other=0.0)
    v = tl.load(pointers + 2 * width, mask=mask, other=0.0)
    grad_pointers, _ = rows_at(grad_out + position.to(tl.int64) * width + head * D, start + row,
                               positions.to(tl.int64) * width, inside, D, BD)  # fmt: skip
    grad = tl.load(grad_pointers, mask=mask, other=0.0)

    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    seen = visible(valid, start + row, inside, position, positions, HAS_VALID)[None, :]
    if HAS_VALID:
        seen = seen | ((row[:, None] == row[None, :]) & inside[None, :])
    score = tl.where(seen & inside[:, None], score, -float("inf"))
    peak = tl.max(score, 1)
    weight = tl.exp2(score - tl.where(inside, peak, 0.0)[:, None])
    weight = weight / tl.where(inside, tl.sum(weight, 1), 1.0)[:, None]
    grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    kept = weight
    if BITS > 0:
        problem = (first_position + position) * heads + head
        keep = keep_tile(tl.load(seed), 0, problem, start + row, 0, threshold, BM, BITS)
        grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
        kept = tl.where(keep, weight * keep_scale, 0.0)
    out_pointers, _ = rows_at(grad_qkv + offset, start + row, stride, inside, D, BD)
    grad_v = tl.dot(tl.trans(kept.to(grad.dtype)), grad, input_precision=PRECISION)
    tl.store(out_pointers + 2 * width, grad_v.to(grad_qkv.dtype.element_ty), mask=mask)
    delta = tl.sum(weight * grad_weight, 1)
    grad_score = (weight * (grad_weight - delta[:, None]) * scale).to(q.dtype)
    grad_q = tl.dot(grad_score, k, input_precision=PRECISION)
    tl.store(out_pointers, grad_q.to(grad_qkv.dtype.element_ty), mask=mask)
    grad_k = tl.dot(tl.trans(grad_score), q, input_precision=PRECISION)
    tl.store(out_pointers + width, grad_k.to(grad_qkv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def attend_delta(out, grad_out, delta, batch, positions, heads, blocks, D: tl.constexpr, BD: tl.constexpr,
                 BM: tl.constexpr):  # fmt: skip
    """sum(out * grad_out) of every (position, head, sample)."""
    block, head, position, _ = find_problem(tl.program_id(0), blocks, positions, heads)
    sample = block * BM + tl.arange(0, BM)
    inside = sample < batch
    width = heads * D
    offset, stride = position.to(tl.int64) * width + head * D, positions.to(tl.int64) * width
    pointers, mask = rows_at(out + offset, sample, stride, inside, D, BD)
    grad_pointers, _ = rows_at(grad_out + offset, sample, stride, inside, D, BD)
    product = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) * tl.load(grad_pointers, mask=mask, other=0.0)
    tl.store(delta + (position * heads + head).to(tl.int64) * batch + sample, tl.sum(product, 1), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def attend_backward_keys(
    qkv, grad_out, grad_qkv, lse, delta, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values: every block of queries of the group passes by, turned on its side."""
    block, head, position, part = find_problem(tl.program_id(0), blocks, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    offset, stride = position.to(tl.int64) * 3 * width + head * D, positions.to(tl.int64) * 3 * width
    grad_base, grad_stride = grad_out + position.to(tl.int64) * width + head * D, positions.to(tl.int64) * width
    saved = (position * heads + head).to(tl.int64) * batch + start
    problem = (first_position + position) * heads + head
    if BITS > 0:
        key_seed = tl.load(seed)
    key = block * BN + tl.arange(0, BN)
    key_inside = key < length
    pointers, mask = rows_at(qkv + offset, start + key, stride, key_inside, D, BD)
    k = tl.load(pointers + width, mask=mask, other=0.0)
    v = tl.load(pointers + 2 * width, mask=mask, other=0.0)
    seen_key = visible(valid, start + key, key_inside, position, positions, HAS_VALID)[:, None]
    grad_k = tl.zeros((BN, BD), tl.float32)
    grad_v = tl.zeros((BN, BD), tl.float32)
    for first in range(0, length, BM):
        query = first + tl.arange(0, BM)
        query_inside = query < length
        query_at, query_mask = rows_at(qkv + offset, start + query, stride, query_inside, D, BD)
        q = tl.load(query_at, mask=query_mask, other=0.0)
        query_at, query_mask = rows_at(grad_base, start + query, grad_stride, query_inside, D, BD)
        grad = tl.load(query_at, mask=query_mask, other=0.0)
        log_total = tl.load(lse + saved + query, mask=query_inside, other=0.0)
        mean = tl.load(delta + saved + query, mask=query_inside, other=0.0)
        score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2
        seen = seen_key
        if HAS_VALID:
            seen = seen | ((query[None, :] == key[:, None]) & key_inside[:, None])
        weight = tl.where(seen & query_inside[None, :], tl.exp2(score - log_total[None, :]), 0.0)
        grad_weight = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        kept = weight
        if BITS > 0:
            keep = keep_tile_turned(key_seed, 0, problem, start + query, block * BN, threshold, BN, BITS)
            grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
            kept = tl.where(keep, weight * keep_scale, 0.0)
        grad_v = tl.dot(kept.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
        grad_score = weight * (grad_weight - mean[None, :])
        grad_k = tl.dot(grad_score.to(q.dtype), q, grad_k, input_precision=PRECISION)
    pointers, mask = rows_at(grad_qkv + offset, start + key, stride, key_inside, D, BD)
    tl.store(pointers + width, (grad_k * scale).to(grad_qkv.dtype.element_ty), mask=mask)
    tl.store(pointers + 2 * width, grad_v.to(grad_qkv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def attend_backward_queries(
    qkv, grad_out, grad_qkv, lse, delta, valid, seed, batch, positions, heads, group, blocks, first_position,
    scale, scale_log2, threshold, keep_scale,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_VALID: tl.constexpr, BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries: every block of keys of the group passes by."""
    block, head, position, part = find_problem(tl.program_id(0), blocks, positions, heads)
    start = part * group
    length = tl.minimum(group, batch - start)
    width = heads * D
    offset, stride = position.to(tl.int64) * 3 * width + head * D, positions.to(tl.int64) * 3 * width
    saved = (position * heads + head).to(tl.int64) * batch + start
    problem = (first_position + position) * heads + head
    if BITS > 0:
        key_seed = tl.load(seed)
    query = block * BM + tl.arange(0, BM)
    query_inside = query < length
    pointers, mask = rows_at(qkv + offset, start + query, stride, query_inside, D, BD)
    q = tl.load(pointers, mask=mask, other=0.0)
    pointers, mask = rows_at(grad_out + position.to(tl.int64) * width + head * D, start + query,
                             positions.to(tl.int64) * width, query_inside, D, BD)  # fmt: skip
    grad = tl.load(pointers, mask=mask, other=0.0)
    log_total = tl.load(lse + saved + query, mask=query_inside, other=0.0)[:, None]
    mean = tl.load(delta + saved + query, mask=query_inside, other=0.0)[:, None]
    grad_q = tl.zeros((BM, BD), tl.float32)
    for first in range(0, length, BN):
        key = first + tl.arange(0, BN)
        key_inside = key < length
        key_at, key_mask = rows_at(qkv + offset, start + key, stride, key_inside, D, BD)
        k = tl.load(key_at + width, mask=key_mask, other=0.0)
        v = tl.load(key_at + 2 * width, mask=key_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        seen = visible(valid, start + key, key_inside, position, positions, HAS_VALID)[None, :]
        if HAS_VALID:
            seen = seen | ((query[:, None] == key[None, :]) & key_inside[None, :])
        weight = tl.where(seen, tl.exp2(score - log_total), 0.0)
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if BITS > 0:
            keep = keep_tile(key_seed, 0, problem, start + query, first, threshold, BN, BITS)
            grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
        grad_q = tl.dot((weight * (grad_weight - mean)).to(k.dtype), k, grad_q, input_precision=PRECISION)
    pointers, mask = rows_at(grad_qkv + offset, start + query, stride, query_inside, D, BD)
    tl.store(pointers, (grad_q * scale).to(grad_qkv.dtype.element_ty), mask=mask)
