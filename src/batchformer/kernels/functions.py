"""The blocks as autograd nodes: what runs in eager mode. Second derivatives are not to be had from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import attention
from batchformer.kernels.blocks import (
    MlpWeights,
    NormSettings,
    mlp_norm,
    mlp_norm_gradients,
    project_norm,
    project_norm_gradients,
)
from batchformer.kernels.random_bits import Drop, Site
from batchformer.kernels.rows import whole


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
        return attention.backward(ctx.problem, grad.contiguous(), qkv, mixed, lse, valid, seed), *[None] * 5


class Attend(torch.autograd.Function):
    """x -> (mixed, x): the input passes through, so that its two gradients are summed by the last matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor | None, seed: Tensor | None,
                settings: LayerSettings) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, cast = x.to(settings.dtype), weight.to(settings.dtype)
        qkv = F.linear(rows, cast, bias.to(settings.dtype))
        ctx.problem = attention.problem_of(qkv, settings.heads, settings.group_size, settings.dropout)
        mixed, lse = attention.forward(ctx.problem, qkv, valid, seed)
        ctx.save_for_backward(rows, cast, qkv, None if ctx.problem.plan.single else mixed, lse, valid, seed)
        ctx.dtypes = (weight.dtype, bias.dtype)
        return mixed, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mixed: Tensor, grad_residual: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, qkv, mixed, lse, valid, seed = ctx.saved_tensors
        grad = attention.backward(ctx.problem, grad_mixed.contiguous(), qkv, mixed, lse, valid, seed).flatten(0, 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # This gradient comes from `ProjectNorm` alone and is nobody else's: it may be added to in place.
            grad_x = add_product_(grad_residual.flatten(0, 1), grad, weight).view(rows.shape)
        grad_weight, grad_bias = grad.t() @ rows.flatten(0, 1), grad.sum(0, dtype=torch.float32)
        return grad_x, grad_weight.to(ctx.dtypes[0]), grad_bias.to(ctx.dtypes[1]), None, None, None


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """total += left @ right, in one pass where the types allow."""
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


class ProjectNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor,
                norm_bias: Tensor, seed: Tensor | None, settings: LayerSettings) -> Tensor:  # fmt: skip
        rows, cast, residual = mixed.flatten(0, 1), weight.to(settings.dtype), residual.contiguous()
        normed = project_norm(rows, residual, cast, bias, norm_weight, norm_bias, settings.norm1, seed,
                              whole(rows.shape[0]), settings.dtype)  # fmt: skip
        ctx.save_for_backward(rows, normed.total, normed.statistics, cast, norm_weight, seed)
        ctx.settings, ctx.residual_dtype = settings, residual.dtype
        ctx.dtypes = (weight.dtype, bias.dtype, norm_weight.dtype, norm_bias.dtype)
        return normed.out.view(mixed.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, total, statistics, weight, norm_weight, seed = ctx.saved_tensors
        got = project_norm_gradients(
            grad.contiguous(), rows, total, statistics, weight, norm_weight, ctx.settings.norm1, seed,
            whole(rows.shape[0]), torch.empty_like(total, dtype=ctx.residual_dtype),
        )  # fmt: skip
        of_weight, of_bias, of_norm_weight, of_norm_bias = ctx.dtypes
        return (
            got.mixed.view(grad.shape), got.residual.view(grad.shape), got.weight.to(of_weight),
            got.vectors[2].to(of_bias), got.vectors[0].to(of_norm_weight), got.vectors[1].to(of_norm_bias), None, None,
        )  # fmt: skip


class MlpNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor,
                norm_weight: Tensor, norm_bias: Tensor, seed: Tensor | None,
                settings: LayerSettings) -> Tensor:  # fmt: skip
        given = MlpWeights(weight1, bias1, weight2, bias2, norm_weight, norm_bias)
        weights = given._replace(weight1=weight1.to(settings.dtype), weight2=weight2.to(settings.dtype))
        rows = x.flatten(0, 1)
        normed, hidden = mlp_norm(rows, weights, settings.norm2, seed, whole(rows.shape[0]), settings.out_dtype)
        ctx.save_for_backward(rows, hidden, normed.total, normed.statistics, seed, *weights)
        ctx.settings, ctx.dtypes = settings, [w.dtype for w in given]
        return normed.out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, hidden, total, statistics, seed, *weights = ctx.saved_tensors
        got = mlp_norm_gradients(grad.contiguous().flatten(0, 1), rows, hidden, total, statistics,
                                 MlpWeights(*weights), ctx.settings.norm2, seed, whole(rows.shape[0]))  # fmt: skip
        gradients = (got.weight1, got.bias1, got.weight2, got.vectors[2], got.vectors[0], got.vectors[1])
        return (
            got.rows.view(grad.shape),
            *(g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)),
            None,
            None,
        )


def fast_layer(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> Tensor:
    """The layer, with everything stored that its backward needs."""
    mixed, residual = Attend.apply(x.contiguous(), *weights[:2], valid, seed, settings)
    attended = ProjectNorm.apply(mixed, residual, *weights[2:6], seed, settings)
    return MlpNorm.apply(attended, *weights[6:], seed, settings)
