"""Kernels over rows (B x N, C): what stands between the matrix products of the layer, each read and written once."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels._keep import keep_tile

SIZES = ["rows", "period", "row_stride", "row_offset", "threshold", "programs"]


@triton.jit
def counted_row(row, period, row_stride, row_offset):
    """The number a row has in the whole tensor, by which its dropout mask is drawn, when this is a piece of it."""
    return (row // period) * row_stride + row_offset + row % period


@triton.jit(do_not_specialize=SIZES)
def add_norm_forward(
    branch, residual, bias, weight, shift, out, mean, rstd, seed, rows, period, row_stride, row_offset,
    threshold, keep_scale, eps,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BITS: tl.constexpr, SITE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """out = LN(residual + dropout(branch + bias)); the sum takes the place of `branch`, for the backward."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    real = column < C
    mask = (row < rows)[:, None] & real[None, :]
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    added = tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BITS > 0:
        counted = counted_row(row, period, row_stride, row_offset)
        keep = keep_tile(tl.load(seed), SITE, 0, counted, 0, threshold, BC, BITS)
        added = tl.where(keep, added * keep_scale, 0.0)
    total = added + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(mask, total, 0.0)
    if SAVE:
        tl.store(branch + at, total.to(branch.dtype.element_ty), mask=mask)
    middle = tl.sum(total, 1) / C
    centred = tl.where(mask, total - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    scaled = centred * inverse[:, None] * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    scaled += tl.load(shift + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=mask)
    if SAVE:
        tl.store(mean + row, middle, mask=row < rows)
        tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=SIZES)
def add_norm_backward(
    grad, total, mean, rstd, weight, grad_total, grad_branch, partial, seed, rows, period, row_stride, row_offset,
    threshold, keep_scale, programs,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BITS: tl.constexpr, SITE: tl.constexpr,
):  # fmt: skip
    """Gradients of the sum and of the branch; sums over rows for weight, shift and bias, one line for each program."""
    column = tl.arange(0, BC)
    real = column < C
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BITS > 0:
        key = tl.load(seed)
    for_weight = tl.zeros((BR, BC), tl.float32)
    for_shift = tl.zeros((BR, BC), tl.float32)
    for_bias = tl.zeros((BR, BC), tl.float32)
    for first in range(tl.program_id(0) * BR, rows, programs * BR):
        row = first + tl.arange(0, BR)
        inside = row < rows
        mask = inside[:, None] & real[None, :]
        at = row.to(tl.int64)[:, None] * C + column[None, :]
        arrived = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        middle = tl.load(mean + row, mask=inside, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=inside, other=0.0)[:, None]
        normed = tl.where(mask, (tl.load(total + at, mask=mask, other=0.0).to(tl.float32) - middle) * inverse, 0.0)
        for_weight += arrived * normed
        for_shift += arrived
        inner = arrived * scale
        along = tl.sum(inner * normed, 1)[:, None] / C
        inner = (inner - tl.sum(inner, 1)[:, None] / C - normed * along) * inverse
        tl.store(grad_total + at, inner.to(grad_total.dtype.element_ty), mask=mask)
        if BITS > 0:
            counted = counted_row(row, period, row_stride, row_offset)
            keep = keep_tile(key, SITE, 0, counted, 0, threshold, BC, BITS)
            inner = tl.where(keep, inner * keep_scale, 0.0)
        if grad_branch is not None:
            tl.store(grad_branch + at, inner.to(grad_branch.dtype.element_ty), mask=mask)
        for_bias += tl.where(mask, inner, 0.0)
    line = partial + tl.program_id(0) * 3 * C + column
    tl.store(line, tl.sum(for_weight, 0), mask=real)
    tl.store(line + C, tl.sum(for_shift, 0), mask=real)
    tl.store(line + 2 * C, tl.sum(for_bias, 0), mask=real)


@triton.jit(do_not_specialize=SIZES)
def relu_forward(
    hidden, bias, seed, rows, period, row_stride, row_offset, threshold, keep_scale,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BITS: tl.constexpr, SITE: tl.constexpr,
):  # fmt: skip
    """hidden = dropout(relu(hidden + bias)), in place: what is positive afterwards was positive and kept."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    real = column < C
    mask = (row < rows)[:, None] & real[None, :]
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    value = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    # not tl.maximum, which would swallow a NaN
    value = tl.where(value <= 0.0, 0.0, value)
    if BITS > 0:
        counted = counted_row(row, period, row_stride, row_offset)
        keep = keep_tile(tl.load(seed), SITE, 0, counted, 0, threshold, BC, BITS)
        value = tl.where(keep, value * keep_scale, 0.0)
    tl.store(hidden + at, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def relu_backward(
    grad, hidden, partial, rows, keep_scale, programs, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr
):
    """The gradient before `relu_forward`, in place, and its sum over rows, one line for each program."""
    column = tl.arange(0, BC)
    real = column < C
    for_bias = tl.zeros((BR, BC), tl.float32)
    for first in range(tl.program_id(0) * BR, rows, programs * BR):
        row = first + tl.arange(0, BR)
        mask = (row < rows)[:, None] & real[None, :]
        at = row.to(tl.int64)[:, None] * C + column[None, :]
        arrived = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        passed = tl.load(hidden + at, mask=mask, other=0.0) > 0.0
        arrived = tl.where(passed, arrived * keep_scale, 0.0)
        tl.store(grad + at, arrived.to(grad.dtype.element_ty), mask=mask)
        for_bias += arrived
    tl.store(partial + tl.program_id(0) * C + column, tl.sum(for_bias, 0), mask=real)
