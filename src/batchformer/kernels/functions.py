"""What a fused layer is given, and attention alone as an autograd node. Second derivatives are not to be had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import attention
from batchformer.kernels.blocks import MlpWeights, NormSettings
from batchformer.kernels.random_bits import Drop, Site
from batchformer.kernels.rows import sum_lines


class LayerWeights(NamedTuple):
    """The parameters of the layer, by the names they have in `torch.nn.TransformerEncoderLayer`."""

    in_weight: Tensor
    in_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm1_weight: Tensor
    norm1_bias: Tensor
    weight1: Tensor
    bias1: Tensor
    weight2: Tensor
    bias2: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor

    @property
    def mlp(self) -> MlpWeights:
        return MlpWeights(*self[6:])

    def cast(self, dtype: torch.dtype) -> LayerWeights:
        """The matrices and the first bias in the type of the products; the other vectors are read as they are."""
        if self.in_weight.dtype == dtype:
            return self
        names = ("in_weight", "in_bias", "out_weight", "weight1", "weight2")
        return self._replace(**{name: getattr(self, name).to(dtype) for name in names})


class LayerSettings(NamedTuple):
    heads: int
    group_size: int | None
    dropout: float
    eps1: float
    eps2: float
    dtype: torch.dtype  # of the matrix products
    out_dtype: torch.dtype

    @property
    def norm1(self) -> NormSettings:
        return NormSettings(self.eps1, Drop.of(self.dropout), Site.ATTENDED)

    @property
    def norm2(self) -> NormSettings:
        return NormSettings(self.eps2, Drop.of(self.dropout), Site.MLP)


class VectorLines(NamedTuple):
    """Lines to be summed for the gradients of the layer's vectors, in as many pieces as the backward took."""

    in_bias: list[list[Tensor]]  # queries, keys, values
    norm1: list[Tensor]  # and the bias of the output projection
    bias1: list[Tensor]
    norm2: list[Tensor]  # and the second bias


def layer_gradients(
    matrices: list[Tensor | None], lines: VectorLines, dtypes: list[torch.dtype]
) -> list[Tensor | None]:
    """Gradients of the weights, in their order and types; `matrices`: of in, out, 1 and 2."""
    parts = [_joined(part) for part in (*zip(*lines.in_bias, strict=True), lines.norm1, lines.bias1, lines.norm2)]
    dim, hidden = parts[5].shape[1] // 3, parts[4].shape[1]
    sizes = [3 * parts[0].shape[1], dim, dim, dim, hidden, dim, dim, dim]
    one_type = dtypes[0] if dtypes.count(dtypes[0]) == len(dtypes) else torch.float32
    in_bias, norm1, shift1, out_bias, bias1, norm2, shift2, bias2 = sum_lines(parts, sizes, one_type)
    into, out, first, second = matrices
    gradients = (into, in_bias, out, out_bias, norm1, shift1, first, bias1, second, bias2, norm2, shift2)
    return [g if g is None or g.dtype == dtype else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Attention(torch.autograd.Function):
    """(B, N, 3C) -> (B, N, C), for layers of other forms than the fused one."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int | None,
                dropout: float) -> Tensor:  # fmt: skip
        qkv = qkv.contiguous()
        ctx.problem = attention.problem_of(qkv, heads, group_size, dropout)
        mixed, lse = attention.forward(ctx.problem, qkv, valid, seed)
        ctx.save_for_backward(qkv, None if ctx.problem.plan.single else mixed, lse, valid, seed)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qkv, mixed, lse, valid, seed = ctx.saved_tensors
        return attention.backward(ctx.problem, grad.contiguous(), qkv, mixed, lse, valid, seed).qkv, *[None] * 5


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total += left @ right, in one pass where the types allow."""
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(torch.mm(left, right))
