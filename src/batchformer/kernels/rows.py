"""Bias, dropout, residual, LayerNorm and ReLU between the matrix products, on rows (R, C)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.kernels._rows import add_norm_backward, add_norm_forward, relu_backward, relu_forward
from batchformer.kernels.random_bits import Drop, Site
from batchformer.kernels.tiles import padded


class Piece(NamedTuple):
    """Which rows these are of the whole tensor: `period` rows in a run, runs `stride` apart, the first at `offset`."""

    period: int
    stride: int
    offset: int

    def skip(self, rows: int) -> Piece:
        """The piece that starts so many rows later; only within one run."""
        return self._replace(offset=self.offset + rows)


def whole(rows: int) -> Piece:
    return Piece(max(rows, 1), 0, 0)


def add_norm(
    branch: Float[Tensor, "rows dim"],
    residual: Float[Tensor, "rows dim"],
    bias: Float[Tensor, " dim"],
    weight: Float[Tensor, " dim"],
    shift: Float[Tensor, " dim"],
    eps: float,
    drop: Drop,
    site: Site,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    dtype: torch.dtype,
    save: bool = True,
) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, " ..."]]:
    """LN(residual + dropout(branch + bias)), and (mean, 1 / deviation) of each row.

    With `save` the sum is written over `branch`: no other pass needs what stood there.
    """
    rows, width = branch.shape
    out = torch.empty_like(branch, dtype=dtype)
    statistics = branch.new_empty((2, rows if save else 0), dtype=torch.float32)
    shape = _shape(width)
    add_norm_forward[(-(-rows // shape.rows),)](
        branch, residual, bias, weight, shift, out, statistics[0], statistics[1], seed, rows, *piece,
        drop.threshold, drop.scale, eps, C=width, BC=shape.width, BR=shape.rows, BITS=drop.bits, SITE=int(site),
        SAVE=save, num_warps=shape.warps,
    )  # fmt: skip
    return out, statistics


class AddNormGradients(NamedTuple):
    total: Float[Tensor, "rows dim"]
    branch: Float[Tensor, "rows dim"]
    parameters: Float[Tensor, "3 dim"]  # weight, shift, bias


def add_norm_gradients(
    grad: Float[Tensor, "rows dim"],
    total: Float[Tensor, "rows dim"],
    statistics: Float[Tensor, "2 rows"],
    weight: Float[Tensor, " dim"],
    drop: Drop,
    site: Site,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    into: Float[Tensor, "rows dim"],
) -> AddNormGradients:
    """`total` is what `add_norm` left in `branch`; the gradient of the residual is written to `into`."""
    rows, width = total.shape
    branch = None if drop.bits == 0 and into.dtype == total.dtype else torch.empty_like(total)
    shape = _shape(width)
    programs = _programs(rows, shape.rows, total.device)
    partial = total.new_empty((programs, 3, width), dtype=torch.float32)
    add_norm_backward[(programs,)](
        grad, total, statistics[0], statistics[1], weight, into, branch, partial, seed, rows, *piece, drop.threshold,
        drop.scale, programs, C=width, BC=shape.width, BR=shape.rows, BITS=drop.bits, SITE=int(site),
        num_warps=shape.warps,
    )  # fmt: skip
    return AddNormGradients(into, into if branch is None else branch, partial.sum(0))


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
    shape = _shape(width)
    relu_forward[(-(-rows // shape.rows),)](
        hidden, bias, seed, rows, *piece, drop.threshold, drop.scale, C=width, BC=shape.width, BR=shape.rows,
        BITS=drop.bits, SITE=int(site), num_warps=shape.warps,
    )  # fmt: skip
    return hidden


def relu_gradient_(
    grad: Float[Tensor, "rows dim"], hidden: Float[Tensor, "rows dim"], drop: Drop
) -> Float[Tensor, " dim"]:
    """The gradient before `relu_`, in place, and that of the bias. No mask is drawn: what passed is positive."""
    rows, width = hidden.shape
    shape = _shape(width)
    programs = _programs(rows, shape.rows, grad.device)
    partial = grad.new_empty((programs, width), dtype=torch.float32)
    relu_backward[(programs,)](
        grad, hidden, partial, rows, drop.scale, programs, C=width, BC=shape.width, BR=shape.rows,
        num_warps=shape.warps,
    )  # fmt: skip
    return partial.sum(0)


class _Shape(NamedTuple):
    rows: int
    width: int
    warps: int


@cache
def _shape(width: int) -> _Shape:
    """About 16 elements for each thread: enough loads under way, and registers left for the sums of the backward."""
    columns = padded(width)
    return _Shape(max(1, 2048 // columns), columns, 4 if columns <= 2048 else 8)


def _programs(rows: int, per_program: int, device: torch.device) -> int:
    """Programs that go through all rows in turns: a few for each multiprocessor, so that little is left to sum."""
    return max(1, min(-(-rows // per_program), 4 * _multiprocessors(device)))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
