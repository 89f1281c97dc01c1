"""Triton kernels over rows (B x N, C), between the matrix products of the layer; each row is read and written once."""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]

from batchformer.kernels.random_bits import keep_tile

SIZES = ["rows", "period", "row_stride", "row_offset", "threshold", "programs", "adds"]


@triton.jit
def counted_row(row, period, row_stride, row_offset):
    """Index in the whole tensor of a row of a piece; dropout masks are drawn by this index."""
    return (row // period) * row_stride + row_offset + row % period


@triton.jit(do_not_specialize=SIZES)
def take_piece(
    source, target, rows, period, row_stride, row_offset, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr
):
    """Copy the rows of a piece from the whole tensor."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    mask = (row < rows)[:, None] & (column < C)[None, :]
    counted = counted_row(row, period, row_stride, row_offset).to(tl.int64)
    value = tl.load(source + counted[:, None] * C + column[None, :], mask=mask)
    tl.store(target + row.to(tl.int64)[:, None] * C + column[None, :], value.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def add_norm_forward(
    branch, residual, bias, weight, shift, out, statistics, seed, rows, period, row_stride, row_offset,
    threshold, keep_scale, eps,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BITS: tl.constexpr, SITE: tl.constexpr,
):  # fmt: skip
    """out = LN(residual + dropout(branch + bias)). With `statistics`, for the backward, the sum overwrites `branch`,
    and mean and 1 / deviation of each row are stored."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    column = tl.arange(0, BC)
    real = column < C
    mask = (row < rows)[:, None] & real[None, :]
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    added = tl.load(branch + at, mask=mask, other=0.0).to(tl.float32)
    carried = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BITS > 0:
        counted = counted_row(row, period, row_stride, row_offset)
        keep = keep_tile(tl.load(seed), SITE, 0, counted, 0, threshold, BC, BITS)
        added = tl.where(keep, added * keep_scale, 0.0)
    total = added + carried  # zero in padding columns
    if statistics is not None:
        tl.store(branch + at, total.to(branch.dtype.element_ty), mask=mask)
    middle = tl.sum(total, 1) / C
    centred = total - middle[:, None]
    if C < BC:
        centred = tl.where(real[None, :], centred, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    scaled = centred * inverse[:, None] * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    scaled += tl.load(shift + column, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=mask)
    if statistics is not None:
        tl.store(statistics + 2 * row, middle, mask=row < rows)
        tl.store(statistics + 2 * row + 1, inverse, mask=row < rows)


@triton.jit
def _places(row, rows, counted, column, C: tl.constexpr):
    """Bounds mask of these rows, and the offsets of their elements in the piece and in the whole tensor."""
    mask = (row < rows)[:, None] & (column < C)[None, :]
    return mask, row.to(tl.int64)[:, None] * C + column[None, :], counted.to(tl.int64)[:, None] * C + column[None, :]


@triton.jit(do_not_specialize=SIZES)
def add_norm_backward(
    grad, total, statistics, residual, bias, weight, grad_total, grad_branch, lines, seed,
    rows, period, row_stride, row_offset, threshold, keep_scale, eps, programs, adds,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BITS: tl.constexpr, SITE: tl.constexpr,
    WHOLE_GRAD: tl.constexpr, WHOLE_TOTAL: tl.constexpr,
):  # fmt: skip
    """Gradients of the sum and of the branch; partial sums over rows for weight, shift and bias, one line per program,
    accumulated into the line where `adds` is 1.

    `grad` may be `grad_total` (in place): a row is read before it is written. With WHOLE_... that tensor is the whole
    one, and the others are a piece of it. With `residual` and `bias`, `total` is still the output of the matrix product
    and there are no statistics: both are recomputed as in `add_norm_forward`, with its rounding, and not written.
    """
    column = tl.arange(0, BC)
    real = column < C
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if BITS > 0:
        word = tl.load(seed)
    for_weight = tl.zeros((BR, BC), tl.float32)
    for_shift = tl.zeros((BR, BC), tl.float32)
    for_bias = tl.zeros((BR, BC), tl.float32)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    mask, at, at_whole = _places(row, rows, counted_row(row, period, row_stride, row_offset), column, C)
    next_arrived = tl.load(grad + (at_whole if WHOLE_GRAD else at), mask=mask, other=0.0)
    next_summed = tl.load(total + at, mask=mask, other=0.0)
    if residual is not None:
        next_carried = tl.load(residual + at, mask=mask, other=0.0)
        offset = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    for first in range(tl.program_id(0) * BR, rows, programs * BR):
        arrived, summed = next_arrived.to(tl.float32), next_summed.to(tl.float32)
        if residual is not None:
            carried = next_carried.to(tl.float32)
        # Prefetch: the rows of the next iteration are loaded while these are processed.
        row = first + programs * BR + tl.arange(0, BR)
        mask, at, at_whole = _places(row, rows, counted_row(row, period, row_stride, row_offset), column, C)
        next_arrived = tl.load(grad + (at_whole if WHOLE_GRAD else at), mask=mask, other=0.0)
        next_summed = tl.load(total + at, mask=mask, other=0.0)
        if residual is not None:
            next_carried = tl.load(residual + at, mask=mask, other=0.0)
        row = first + tl.arange(0, BR)
        counted = counted_row(row, period, row_stride, row_offset)
        mask, at, at_whole = _places(row, rows, counted, column, C)
        if residual is not None:
            summed += offset
            if BITS > 0:
                keep = keep_tile(word, SITE, 0, counted, 0, threshold, BC, BITS)
                summed = tl.where(keep, summed * keep_scale, 0.0)
            summed += carried
            middle = (tl.sum(summed, 1) / C)[:, None]
            centred = summed - middle
            if C < BC:
                centred = tl.where(real[None, :], centred, 0.0)
            inverse = (1.0 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps))[:, None]
            inverse = tl.where((row < rows)[:, None], inverse, 0.0)
            summed = summed.to(total.dtype.element_ty).to(tl.float32)
        else:
            inside = row < rows
            middle = tl.load(statistics + 2 * row, mask=inside, other=0.0)[:, None]
            inverse = tl.load(statistics + 2 * row + 1, mask=inside, other=0.0)[:, None]
        # Padding rows are zeros throughout; padding columns are, wherever they enter a sum that is used.
        # Factors of a whole row are multiplied once for the row: this kernel is limited by arithmetic as much as by
        # memory.
        normed = summed * inverse - middle * inverse
        for_weight += arrived * normed
        for_shift += arrived
        inner = arrived * scale
        along = tl.sum(inner * normed, 1)[:, None] * (inverse / C)
        mean = tl.sum(inner, 1)[:, None] * (inverse / C)
        inner = inner * inverse - (normed * along + mean)
        tl.store(grad_total + (at_whole if WHOLE_TOTAL else at), inner.to(grad_total.dtype.element_ty), mask=mask)
        if BITS > 0:
            if residual is None:
                keep = keep_tile(word, SITE, 0, counted, 0, threshold, BC, BITS)
            inner = tl.where(keep, inner * keep_scale, 0.0)
        if grad_branch is not None:
            tl.store(grad_branch + at, inner.to(grad_branch.dtype.element_ty), mask=mask)
        for_bias += inner
    line = lines + tl.program_id(0) * 3 * C + column
    before = real & (adds == 1)
    tl.store(line, tl.sum(for_weight, 0) + tl.load(line, mask=before, other=0.0), mask=real)
    tl.store(line + C, tl.sum(for_shift, 0) + tl.load(line + C, mask=before, other=0.0), mask=real)
    tl.store(line + 2 * C, tl.sum(for_bias, 0) + tl.load(line + 2 * C, mask=before, other=0.0), mask=real)


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
    # not tl.maximum, which does not propagate NaN
    value = tl.where(value <= 0.0, 0.0, value)
    if BITS > 0:
        counted = counted_row(row, period, row_stride, row_offset)
        keep = keep_tile(tl.load(seed), SITE, 0, counted, 0, threshold, BC, BITS)
        value = tl.where(keep, value * keep_scale, 0.0)
    tl.store(hidden + at, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def relu_backward(
    grad, hidden, lines, rows, keep_scale, programs, adds, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr
):
    """Gradient of the input of `relu_forward`, in place, and its partial sums over rows, one line per program."""
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
    line = lines + tl.program_id(0) * C + column
    tl.store(line, tl.sum(for_bias, 0) + tl.load(line, mask=real & (adds == 1), other=0.0), mask=real)


@triton.jit
def _sum_part(part, out, rows, width, block, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    for first in range(0, rows, LINES):
        row = first + tl.arange(0, LINES)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(part + at, mask=(row < rows)[:, None] & real[None, :], other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows0", "rows1", "rows2", "rows3", "rows4", "rows5", "width0", "width1", "width2",
                               "width3", "width4", "width5"])  # fmt: skip
def sum_lines(
    part0, part1, part2, part3, part4, part5, out, rows0, rows1, rows2, rows3, rows4, rows5,
    width0, width1, width2, width3, width4, width5, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums over the rows of up to six matrices (rows, width), concatenated in `out`."""
    block = tl.program_id(0)
    blocks0, blocks1, blocks2 = tl.cdiv(width0, COLUMNS), tl.cdiv(width1, COLUMNS), tl.cdiv(width2, COLUMNS)
    blocks3, blocks4 = tl.cdiv(width3, COLUMNS), tl.cdiv(width4, COLUMNS)
    if block < blocks0:
        _sum_part(part0, out, rows0, width0, block, LINES, COLUMNS)
    else:
        block, out = block - blocks0, out + width0
        if block < blocks1:
            _sum_part(part1, out, rows1, width1, block, LINES, COLUMNS)
        else:
            block, out = block - blocks1, out + width1
            if block < blocks2:
                _sum_part(part2, out, rows2, width2, block, LINES, COLUMNS)
            else:
                block, out = block - blocks2, out + width2
                if block < blocks3:
                    _sum_part(part3, out, rows3, width3, block, LINES, COLUMNS)
                else:
                    block, out = block - blocks3, out + width3
                    if block < blocks4:
                        _sum_part(part4, out, rows4, width4, block, LINES, COLUMNS)
                    else:
                        _sum_part(part5, out + width4, rows5, width5, block - blocks4, LINES, COLUMNS)
