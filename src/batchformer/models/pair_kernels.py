"""Triton kernels of what the comparator does with each pair of a row and a class: no pair leaves the registers.

The rows of one side lie along the lanes; the sum goes step by step, so that a pair costs three instructions.
"""

import torch
import triton  # type: ignore[import-untyped, import-not-found]
import triton.language as tl  # type: ignore[import-untyped, import-not-found]
from jaxtyping import Float
from torch import Tensor

_TILE, _WIDTH = 64, 128  # rows and classes, or rows and numbers of each, of a program
_PROGRAMS = 1024  # about eight for each processor of a large card: a sum is cut into parts to have so many


@triton.jit
def _relu_sums(u, v, w, out, rows, classes, dim, part, TILE: tl.constexpr):
    row, of_class = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.program_id(2) * part
    sums = tl.zeros((TILE, TILE), tl.float32)
    for k in range(first, tl.minimum(first + part, dim)):
        of_row = tl.load(u + k * rows + row, mask=row < rows, other=0.0)
        other = tl.load(v + k * classes + of_class, mask=of_class < classes, other=0.0)
        sums += tl.maximum(of_row[:, None] + other[None, :], 0.0) * tl.load(w + k)
    there = (row < rows)[:, None] & (of_class < classes)[None, :]
    tl.store(out + (tl.program_id(2) * rows + row[:, None]) * classes + of_class[None, :], sums, mask=there)


@triton.jit
def _gated_sums(u, v, given, out, rows, others, dim, part, TILE: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < dim)[None, :]
    at = row[:, None] * dim + column[None, :]
    of_row = tl.load(u + at, mask=there, other=0.0)
    first = tl.program_id(2) * part
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    for k in range(first, tl.minimum(first + part, others)):
        other = tl.load(v + k * dim + column, mask=column < dim, other=0.0)
        passed = tl.load(given + k * rows + row, mask=row < rows, other=0.0)
        sums += tl.where(of_row + other[None, :] > 0, passed[:, None], 0.0)
    tl.store(out + tl.program_id(2) * rows * dim + at, sums, mask=there)


def _parts(programs: int, steps: int) -> tuple[int, int]:
    """Into how many parts a sum of so many steps is cut, and steps of a part, for enough programs."""
    part = triton.cdiv(steps, max(1, min(_PROGRAMS // programs, steps // 32)))
    return triton.cdiv(steps, part), part


def relu_sums(
    u: Float[Tensor, "rows dim"], v: Float[Tensor, "classes dim"], w: Float[Tensor, " dim"]
) -> Float[Tensor, "rows classes"]:
    """sum_d w_d relu(u_id + v_cd) for all rows i and classes c."""
    (rows, dim), classes = u.shape, len(v)
    tiles = triton.cdiv(rows, _TILE), triton.cdiv(classes, _TILE)
    parts, part = _parts(tiles[0] * tiles[1], dim)
    out = u.new_empty(parts, rows, classes)
    with torch.cuda.device_of(u):  # Triton launches on torch's current device
        _relu_sums[(*tiles, parts)](
            u.T.contiguous(), v.T.contiguous(), w.contiguous(), out, rows, classes, dim, part, TILE=_TILE
        )
    return out.sum(0)


def gated_sums(
    u: Float[Tensor, "rows dim"], v: Float[Tensor, "others dim"], given: Float[Tensor, "others rows"]
) -> Float[Tensor, "rows dim"]:
    """sum_c given_ci [u_id + v_cd > 0] for all rows i and numbers d."""
    (rows, dim), others = u.shape, len(v)
    tiles = triton.cdiv(rows, _TILE // 2), triton.cdiv(dim, _WIDTH)
    parts, part = _parts(tiles[0] * tiles[1], others)
    out = u.new_empty(parts, rows, dim)
    with torch.cuda.device_of(u):
        _gated_sums[(*tiles, parts)](
            u.contiguous(), v.contiguous(), given.contiguous(), out, rows, others, dim, part,
            TILE=_TILE // 2, WIDTH=_WIDTH,
        )  # fmt: skip
    return out.sum(0)
