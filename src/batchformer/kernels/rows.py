"""Bias, dropout, residual, LayerNorm and ReLU between the matrix products, on rows (R, C)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.kernels import _row_kernels as kernels
from batchformer.kernels.launch import Kernel, RowTiles, row_tiles
from batchformer.kernels.random_bits import Drop, Site

_ADD_NORM, _ADD_NORM_BACKWARD = Kernel(kernels.add_norm_forward), Kernel(kernels.add_norm_backward)
_RELU, _RELU_BACKWARD = Kernel(kernels.relu_forward), Kernel(kernels.relu_backward)
_SUM_LINES, _TAKE_PIECE = Kernel(kernels.sum_lines), Kernel(kernels.take_piece)
_PARTS, _LINES, _COLUMNS, _SUM_WARPS = 6, 512, 16, 8
# Lines beyond which one program for a few columns would take too long; torch sums those in two steps.
_MANY_LINES = 2**14


class Piece(NamedTuple):
    """Strided selection of rows of a whole tensor: runs of `period` rows, `stride` apart, the first at `offset`."""

    period: int
    stride: int
    offset: int

    def skip(self, rows: int) -> Piece:
        """The piece that starts `rows` later; only within one run."""
        return Piece(self.period, self.stride, self.offset + rows)


def whole(rows: int) -> Piece:
    return Piece(max(rows, 1), 0, 0)


def take_piece(whole: Float[Tensor, "*rows dim"], rows: int, piece: Piece) -> Float[Tensor, "rows dim"]:
    """The rows of the piece as a contiguous tensor; faster than torch's copy of strided rows."""
    width = whole.shape[-1]
    tiles = row_tiles(width)
    taken = torch.empty((rows, width), dtype=whole.dtype, device=whole.device)
    _TAKE_PIECE(-(-rows // tiles.rows), (whole, taken), (rows, *piece), (width, tiles.width, tiles.rows), tiles.warps)
    return taken


def add_norm(
    branch: Float[Tensor, "rows dim"],
    residual: Float[Tensor, "*rows dim"],
    bias: Float[Tensor, " dim"],
    weight: Float[Tensor, " dim"],
    shift: Float[Tensor, " dim"],
    eps: float,
    drop: Drop,
    site: Site,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    out: Float[Tensor, "rows dim"],
    statistics: Float[Tensor, "rows 2"] | None,
) -> None:
    """LN(residual + dropout(branch + bias)) to `out`, and (mean, 1 / deviation) of each row to `statistics`.

    With `statistics` the sum is written over `branch`: no other pass needs the branch.
    """
    rows, width = branch.shape
    tiles = row_tiles(width)
    _ADD_NORM(
        -(-rows // tiles.rows), (branch, residual, bias, weight, shift, out, statistics, seed),
        (rows, *piece, drop.threshold, drop.scale, eps), (width, tiles.width, tiles.rows, drop.bits, int(site)),
        tiles.warps,
    )  # fmt: skip


class Added(NamedTuple):
    """What `add_norm` adds to a branch, and the eps of its LayerNorm."""

    residual: Float[Tensor, "rows dim"]
    bias: Float[Tensor, " dim"]
    eps: float


def add_norm_gradients(
    grad: Float[Tensor, "*rows dim"],
    total: Float[Tensor, "rows dim"],
    known: Float[Tensor, "rows 2"] | Added,
    weight: Float[Tensor, " dim"],
    drop: Drop,
    site: Site,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    into: Float[Tensor, "*rows dim"],
    whole_grad: bool = False,
    whole_into: bool = False,
    lines: Float[Tensor, "lines 3*dim"] | None = None,
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, "lines 3*dim"]]:
    """The gradient of the branch, and partial sums (lines) for those of weight, shift and bias; that of the residual is
    written to `into`, which may be `grad` itself. `total` and `known` are what `add_norm` wrote to `branch` and
    `statistics`; or the branch it would be given, and what it would add: then it need not be called.

    With `whole_grad` and `whole_into` those are the whole tensors, of which the others are the piece. `lines` of
    another piece are accumulated into.
    """
    rows, width = total.shape
    is_one = drop.bits == 0 and into.dtype == total.dtype and not whole_into
    branch = None if is_one else torch.empty_like(total)
    tiles = row_tiles(width)
    if isinstance(known, Added):
        # the normalised sum is computed again, which takes more registers: fewer programs fit at once
        tiles, statistics = tiles._replace(programs=max(1, 2 * tiles.programs // 3)), None
        residual, bias, eps = known
    else:
        statistics, residual, bias, eps = known, None, None, 0.0
    lines, adds = _lines(lines, rows, 3 * width, tiles, total)
    programs = lines.shape[0]
    _ADD_NORM_BACKWARD(
        programs, (grad, total, statistics, residual, bias, weight, into, branch, lines, seed),
        (rows, *piece, drop.threshold, drop.scale, eps, programs, adds),
        (width, tiles.width, tiles.backward_rows, drop.bits, int(site), whole_grad, whole_into), tiles.backward_warps,
    )  # fmt: skip
    return into if branch is None else branch, lines


def relu_(
    hidden: Float[Tensor, "rows dim"],
    bias: Float[Tensor, " dim"],
    drop: Drop,
    site: Site,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
) -> Float[Tensor, "rows dim"]:
    """dropout(relu(hidden + bias)), in place."""
    rows, width = hidden.shape
    tiles = row_tiles(width)
    _RELU(-(-rows // tiles.rows), (hidden, bias, seed), (rows, *piece, drop.threshold, drop.scale),
          (width, tiles.width, tiles.rows, drop.bits, int(site)), tiles.warps)  # fmt: skip
    return hidden


def relu_gradient_(
    grad: Float[Tensor, "rows dim"],
    hidden: Float[Tensor, "rows dim"],
    drop: Drop,
    lines: Float[Tensor, "lines dim"] | None = None,
) -> Float[Tensor, "lines dim"]:
    """Gradient of the input of `relu_`, in place, and partial sums (lines) for that of the bias. No mask is drawn:
    kept elements are positive."""
    rows, width = hidden.shape
    tiles = row_tiles(width)
    lines, adds = _lines(lines, rows, width, tiles, grad)
    programs = lines.shape[0]
    _RELU_BACKWARD(programs, (grad, hidden, lines), (rows, drop.scale, programs, adds),
                   (width, tiles.width, tiles.backward_rows), tiles.backward_warps)  # fmt: skip
    return lines


def sum_lines(
    parts: list[Float[Tensor, "lines width"]], sizes: list[int], dtype: torch.dtype
) -> tuple[Float[Tensor, " size"], ...]:
    """Sum each part over its lines, all in one launch; the concatenated sums are split into `sizes`. A part without
    lines gives zeros."""
    parts = [part.sum(0, keepdim=True) if part.shape[0] > _MANY_LINES else part for part in parts]
    lines, widths = zip(*[part.shape for part in parts], strict=True)
    out = parts[0].new_empty(sum(widths), dtype=dtype)
    missing = (0,) * (_PARTS - len(parts))
    # where there is no part there are no lines to read: any address will do
    _SUM_LINES(sum([-(-width // _COLUMNS) for width in widths]), (*parts, *parts[:1] * len(missing), out),
               (*lines, *missing, *widths, *missing), (_LINES, _COLUMNS), _SUM_WARPS)  # fmt: skip
    return torch.unsafe_split_with_sizes(out, sizes)


def _lines(
    given: Tensor | None, rows: int, width: int, tiles: RowTiles, like: Tensor
) -> tuple[Float[Tensor, "lines width"], int]:
    """Buffer of one line per program, and 1 where it already holds sums to be added to.

    Programs loop over all rows, a few of them on each multiprocessor: few lines are left to sum.
    """
    if given is not None:
        return given, 1
    programs = max(1, min(-(-rows // tiles.backward_rows), tiles.programs * _multiprocessors(like.device)))
    return like.new_empty((programs, width), dtype=torch.float32), 0


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
