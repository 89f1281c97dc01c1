"""Batch attention straight out of the input projection: (B, N, 3C) in, (B, N, C) out, and the gradient back."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.kernels import _attention_backward as _backward
from batchformer.kernels._attention_forward import attend_forward
from batchformer.kernels.launch import Kernel
from batchformer.kernels.random_bits import Drop
from batchformer.kernels.tiles import Plan, Tiles, plan

_FORWARD = Kernel(attend_forward)
_TILE, _QUERIES = Kernel(_backward.attend_backward_tile), Kernel(_backward.attend_backward_queries)
_KEYS = Kernel(_backward.attend_backward_keys)


class Problem(NamedTuple):
    """What does not change between forward and backward."""

    batch: int
    positions: int
    heads: int
    head: int
    group: int
    plan: Plan
    drop: Drop
    first_position: int

    @property
    def groups(self) -> int:
        return -(-self.batch // self.group)

    @property
    def scale(self) -> float:
        return self.head**-0.5

    def is_even(self, tiles: Tiles) -> bool:
        """Whether every tile is full."""
        return not (self.batch % self.group or self.group % tiles.queries or self.group % tiles.keys)


def problem_of(
    qkv: Float[Tensor, "batch position 3*dim"], heads: int, group_size: int | None, dropout: float,
    first_position: int = 0,
) -> Problem:  # fmt: skip
    """`first_position`: where `qkv` is a piece of a longer one, so that it gets the dropout mask of its place there."""
    return _problem(*qkv.shape, heads, group_size, dropout, first_position, qkv.element_size())


@lru_cache(maxsize=256)
def _problem(batch: int, positions: int, width: int, heads: int, group_size: int | None, dropout: float,
             first_position: int, element_size: int) -> Problem:  # fmt: skip
    head, group = width // (3 * heads), min(group_size or batch, batch)
    tiles = plan(group, head, element_size)
    return Problem(batch, positions, heads, head, group, tiles, Drop.of(dropout), first_position)


def forward(
    problem: Problem, qkv: Float[Tensor, "batch position 3*dim"], valid: Bool[Tensor, "batch position"] | None,
    seed: Int[Tensor, " 1"] | None,
) -> tuple[Float[Tensor, "batch position dim"], Float[Tensor, " ..."] | None]:  # fmt: skip
    """The mixed values, and the logarithms of the sums of the softmax, None where the backward can do without. They are
    measured as scores are before they are scaled."""
    it, tiles = problem, problem.plan.forward
    out = torch.empty((it.batch, it.positions, it.heads * it.head), dtype=qkv.dtype, device=qkv.device)
    lse = None
    if not it.plan.single:
        lse = torch.empty(it.positions * it.heads * it.batch, dtype=torch.float32, device=qkv.device)
    blocks = -(-it.group // tiles.queries)
    _FORWARD(
        it.groups * it.positions * it.heads * blocks, (qkv, out, lse, valid, seed),
        (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, it.scale * math.log2(math.e),
         it.drop.threshold, it.drop.scale),
        (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys, it.plan.single), *tiles[2:],
    )  # fmt: skip
    return out, lse


class Gradients(NamedTuple):
    qkv: Float[Tensor, "batch position 3*dim"]
    sums: list[Float[Tensor, "lines dim"]]  # of queries, keys and values: to be summed for the gradient of a bias


def backward(
    problem: Problem, grad_out: Float[Tensor, "batch position dim"], qkv: Float[Tensor, "batch position 3*dim"],
    out: Float[Tensor, "batch position dim"] | None, lse: Float[Tensor, " ..."] | None,
    valid: Bool[Tensor, "batch position"] | None, seed: Int[Tensor, " 1"] | None, wants_sums: bool = False,
) -> Gradients:  # fmt: skip
    """The gradient of `qkv`. `out` and `lse` are needed only where a group does not fit one tile."""
    it = problem
    grad_qkv = torch.empty_like(qkv)
    scales = (it.scale, it.scale * math.log2(math.e), it.drop.threshold, it.drop.scale)
    each = it.groups * it.positions
    if it.plan.single:
        tiles = it.plan.backward_keys
        query_sums, value_sums = (_lines(it, each, wants_sums, qkv) for _ in range(2))
        _TILE(
            each * it.heads, (qkv, grad_out, grad_qkv, query_sums, value_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries), *tiles[2:],
        )  # fmt: skip
    else:
        assert lse is not None
        means = torch.empty_like(lse)
        tiles = it.plan.backward_queries
        blocks = -(-it.group // tiles.queries)
        query_sums = _lines(it, each * blocks, wants_sums, qkv)
        _QUERIES(
            each * it.heads * blocks, (qkv, out, grad_out, grad_qkv, lse, means, query_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys), *tiles[2:],
        )  # fmt: skip
        tiles = it.plan.backward_keys
        blocks = -(-it.group // tiles.keys)
        value_sums = _lines(it, each * blocks, wants_sums, qkv)
        _KEYS(
            each * it.heads * blocks, (qkv, grad_out, grad_qkv, lse, means, value_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys), *tiles[2:],
        )  # fmt: skip
    if query_sums is None or value_sums is None:
        return Gradients(grad_qkv, [])
    return Gradients(grad_qkv, [query_sums, query_sums[:0], value_sums])


def _lines(problem: Problem, lines: int, wanted: bool, like: Tensor) -> Tensor | None:
    if not wanted:
        return None
    return torch.empty((lines, problem.heads * problem.head), dtype=torch.float32, device=like.device)


def _constants(problem: Problem, qkv: Tensor, valid: Tensor | None, tiles: Tiles) -> tuple[int | bool | str, ...]:
    exact = qkv.dtype == torch.float32 and is_exact()
    return (
        problem.head, problem.plan.head, valid is not None, problem.drop.bits, "ieee" if exact else "tf32",
        problem.is_even(tiles),
    )  # fmt: skip


def is_exact() -> bool:
    """Whether products of single precision are to be exact. torch has two ways to say so, and refuses to answer by the
    first once somebody has used the second."""
    try:
        return not torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision != "tf32"
