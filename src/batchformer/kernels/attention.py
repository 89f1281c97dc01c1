"""Batch attention on the output of the input projection: (B, N, 3C) in, (B, N, C) out, and its gradient."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import _attention_kernels as kernels
from batchformer.kernels.launch import AttentionTiles, Kernel, Tiles, attention_tiles
from batchformer.kernels.random_bits import Drop

_FORWARD, _TILE = Kernel(kernels.attend_forward), Kernel(kernels.attend_backward_tile)
_QUERIES, _KEYS = Kernel(kernels.attend_backward_queries), Kernel(kernels.attend_backward_keys)


class Problem(NamedTuple):
    """Sizes, tiles and dropout of one call; the same in forward and backward."""

    batch: int
    positions: int
    heads: int
    head: int
    group: int
    tiles: AttentionTiles
    drop: Drop
    first_position: int

    @property
    def groups(self) -> int:
        return -(-self.batch // self.group)

    @property
    def scale(self) -> float:
        return self.head**-0.5


@lru_cache(maxsize=256)
def problem_of(
    batch: int, positions: int, width: int, dtype: torch.dtype, heads: int, group_size: int | None, dropout: float,
    first_position: int = 0,
) -> Problem:  # fmt: skip
    """The `Problem` of a call with `qkv` of this width. `first_position`: offset in a tensor that it is a slice of, for
    the dropout mask."""
    head, group = width // (3 * heads), min(group_size or batch, batch)
    tiles = attention_tiles(group, head, dtype.itemsize)
    return Problem(batch, positions, heads, head, group, tiles, Drop.of(dropout), first_position)


def forward(
    problem: Problem, qkv: Float[Tensor, "*rows 3*dim"], valid: Bool[Tensor, "batch position"] | None,
    seed: Int[Tensor, " 1"] | None,
) -> tuple[Float[Tensor, "*rows dim"], Float[Tensor, " ..."] | None]:  # fmt: skip
    """The mixed values, and the log-sum-exp of the unscaled scores, None where the backward does not need it."""
    it, tiles = problem, problem.tiles.forward
    out = qkv.new_empty((*qkv.shape[:-1], it.heads * it.head))
    lse = None
    if not it.tiles.single:
        lse = qkv.new_empty(it.positions * it.heads * it.batch, dtype=torch.float32)
    blocks = -(-it.group // tiles.queries)
    _FORWARD(
        it.groups * it.positions * it.heads * blocks, (qkv, out, lse, valid, seed),
        (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, it.scale * math.log2(math.e),
         it.drop.threshold, it.drop.scale),
        (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys, it.tiles.single), *tiles[2:],
    )  # fmt: skip
    return out, lse


class Gradients(NamedTuple):
    qkv: Float[Tensor, "*rows 3*dim"]
    query_sums: Float[Tensor, "lines dim"] | None  # partial sums for the gradient of a bias; those of keys are zero
    value_sums: Float[Tensor, "lines dim"] | None


def backward(
    problem: Problem, grad_out: Float[Tensor, "*rows dim"], qkv: Float[Tensor, "*rows 3*dim"],
    out: Float[Tensor, "*rows dim"] | None, lse: Float[Tensor, " ..."] | None,
    valid: Bool[Tensor, "batch position"] | None, seed: Int[Tensor, " 1"] | None, wants_sums: bool = False,
) -> Gradients:  # fmt: skip
    """The gradient of `qkv`. `out` and `lse` are needed only where a group does not fit one tile."""
    it = problem
    grad_qkv = torch.empty_like(qkv)
    scales = (it.scale, it.scale * math.log2(math.e), it.drop.threshold, it.drop.scale)
    each = it.groups * it.positions
    if it.tiles.single:
        tiles = it.tiles.backward_keys
        query_sums, value_sums = _lines(it, each, wants_sums, qkv), _lines(it, each, wants_sums, qkv)
        _TILE(
            each * it.heads, (qkv, grad_out, grad_qkv, query_sums, value_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries), *tiles[2:],
        )  # fmt: skip
    else:
        assert lse is not None
        means = torch.empty_like(lse)
        tiles = it.tiles.backward_queries
        blocks = -(-it.group // tiles.queries)
        query_sums = _lines(it, each * blocks, wants_sums, qkv)
        _QUERIES(
            each * it.heads * blocks, (qkv, out, grad_out, grad_qkv, lse, means, query_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys), *tiles[2:],
        )  # fmt: skip
        tiles = it.tiles.backward_keys
        blocks = -(-it.group // tiles.keys)
        value_sums = _lines(it, each * blocks, wants_sums, qkv)
        _KEYS(
            each * it.heads * blocks, (qkv, grad_out, grad_qkv, lse, means, value_sums, valid, seed),
            (it.batch, it.positions, it.heads, it.group, blocks, it.first_position, *scales),
            (*_constants(it, qkv, valid, tiles), tiles.queries, tiles.keys), *tiles[2:],
        )  # fmt: skip
    return Gradients(grad_qkv, query_sums, value_sums)


def _lines(problem: Problem, lines: int, wanted: bool, like: Tensor) -> Tensor | None:
    if not wanted:
        return None
    return like.new_empty((lines, problem.heads * problem.head), dtype=torch.float32)


def _constants(problem: Problem, qkv: Tensor, valid: Tensor | None, tiles: Tiles) -> tuple[int | bool | str, ...]:
    exact = qkv.dtype == torch.float32 and is_exact()
    group = problem.group
    is_even = not (problem.batch % group or group % tiles.queries or group % tiles.keys)  # every tile is full
    return (
        problem.head, problem.tiles.head, valid is not None, problem.drop.bits, "ieee" if exact else "tf32",
        is_even,
    )  # fmt: skip


def is_exact() -> bool:
    """Whether float32 products must not use TF32. torch has two settings for it, and raises when the first is read
    after the second was set."""
    try:
        return not torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision != "tf32"


class AttentionNode(torch.autograd.Function):
    """Attention alone as an autograd node, for layers that are not fused. It has no second derivative."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int | None,
                dropout: float) -> Tensor:  # fmt: skip
        qkv = qkv.contiguous()
        ctx.problem = problem_of(*qkv.shape, qkv.dtype, heads, group_size, dropout)
        mixed, lse = forward(ctx.problem, qkv, valid, seed)
        ctx.save_for_backward(qkv, None if ctx.problem.tiles.single else mixed, lse, valid, seed)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, mixed, lse, valid, seed = ctx.saved_tensors
        return backward(ctx.problem, grad.contiguous(), qkv, mixed, lse, valid, seed).qkv, *[None] * 5
