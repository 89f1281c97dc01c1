"""Batch attention straight out of the input projection: (B, N, 3C) in, (B, N, C) out, and the gradient back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.kernels._attention_backward import (
    attend_backward_keys,
    attend_backward_queries,
    attend_backward_tile,
    attend_delta,
)
from batchformer.kernels._attention_forward import attend_forward
from batchformer.kernels.random_bits import Drop
from batchformer.kernels.tiles import Plan, plan


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


def problem_of(qkv: Tensor, heads: int, group_size: int | None, dropout: float, first_position: int = 0) -> Problem:
    """`first_position`: where `qkv` is a piece of a longer one, so that it gets the dropout mask of its place there."""
    batch, positions, width = qkv.shape
    head, group = width // (3 * heads), min(group_size or batch, batch)
    tiles = plan(group, head, qkv.element_size())
    return Problem(batch, positions, heads, head, group, tiles, Drop.of(dropout), first_position)


def forward(
    problem: Problem, qkv: Float[Tensor, "batch position 3*dim"], valid: Bool[Tensor, "batch position"] | None,
    seed: Int[Tensor, " 1"] | None,
) -> tuple[Float[Tensor, "batch position dim"], Float[Tensor, " ..."]]:  # fmt: skip
    """The mixed values, and log2 of the sums of the softmax, which is empty where the backward can do without."""
    it, tiles = problem, problem.plan.forward
    out = qkv.new_empty(it.batch, it.positions, it.heads * it.head)
    lse = qkv.new_empty(0 if it.plan.single else (it.positions * it.heads * it.batch), dtype=torch.float32)
    blocks = -(-it.group // tiles.queries)
    attend_forward[(it.groups * it.positions * it.heads * blocks,)](
        qkv, out, lse, valid, seed, it.batch, it.positions, it.heads, it.group, blocks, it.first_position,
        it.scale * math.log2(math.e), it.drop.threshold, it.drop.scale,
        BM=tiles.queries, BN=tiles.keys, SINGLE=it.plan.single, num_warps=tiles.warps, num_stages=tiles.stages,
        **_constants(problem, qkv, valid),
    )  # fmt: skip
    return out, lse


def backward(
    problem: Problem, grad_out: Float[Tensor, "batch position dim"], qkv: Float[Tensor, "batch position 3*dim"],
    out: Float[Tensor, "batch position dim"] | None, lse: Float[Tensor, " ..."],
    valid: Bool[Tensor, "batch position"] | None, seed: Int[Tensor, " 1"] | None,
) -> Float[Tensor, "batch position 3*dim"]:  # fmt: skip
    """The gradient of `qkv`. `out` is needed only where a group does not fit one tile."""
    it, constants = problem, _constants(problem, qkv, valid)
    grad_qkv = torch.empty_like(qkv)
    scales = (it.scale, it.scale * math.log2(math.e), it.drop.threshold, it.drop.scale)
    each = it.groups * it.positions * it.heads
    if it.plan.single:
        tiles = it.plan.backward_keys
        attend_backward_tile[(each,)](
            qkv, grad_out, grad_qkv, valid, seed, it.batch, it.positions, it.heads, it.group, it.first_position,
            *scales, BM=tiles.queries, num_warps=tiles.warps, num_stages=1, **constants,
        )  # fmt: skip
        return grad_qkv
    delta = torch.empty_like(lse)
    rows = 64 if it.plan.head <= 128 else 16
    blocks = -(-it.batch // rows)
    attend_delta[(it.positions * it.heads * blocks,)](
        out, grad_out, delta, it.batch, it.positions, it.heads, blocks, D=it.head, BD=it.plan.head, BM=rows,
    )  # fmt: skip
    for kernel, tiles, side in (
        (attend_backward_keys, it.plan.backward_keys, it.plan.backward_keys.keys),
        (attend_backward_queries, it.plan.backward_queries, it.plan.backward_queries.queries),
    ):
        blocks = -(-it.group // side)
        kernel[(each * blocks,)](
            qkv, grad_out, grad_qkv, lse, delta, valid, seed, it.batch, it.positions, it.heads, it.group, blocks,
            it.first_position, *scales, BM=tiles.queries, BN=tiles.keys, num_warps=tiles.warps,
            num_stages=tiles.stages, **constants,
        )  # fmt: skip
    return grad_qkv


def _constants(problem: Problem, qkv: Tensor, valid: Tensor | None) -> dict[str, Any]:
    exact = qkv.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return {
        "D": problem.head,
        "BD": problem.plan.head,
        "HAS_VALID": valid is not None,
        "BITS": problem.drop.bits,
        "PRECISION": "ieee" if exact else "tf32",
    }
