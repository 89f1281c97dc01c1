"""The layer with `memory="lean"`: nothing is stored but the input; the backward computes the layer again, by positions.

Batch attention never looks from one position to another, so the whole layer, forward and backward, can be done for some
positions at a time. Masks are drawn by the place of an element in the whole tensor: lean and fast drop the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import attention, blocks
from batchformer.kernels.blocks import MlpWeights, mlp_norm, mlp_norm_gradients, project_norm, project_norm_gradients
from batchformer.kernels.functions import LayerSettings, LayerWeights, add_product_
from batchformer.kernels.rows import Piece, whole


def cast_matrices(weights: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """The matrices and the first bias in the type of the products; the other vectors are read as they are."""
    names = ("in_weight", "in_bias", "out_weight", "weight1", "weight2")
    return weights._replace(**{name: getattr(weights, name).to(dtype) for name in names})


def lean_forward(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> Tensor:
    w = cast_matrices(weights, settings.dtype)
    x = x.contiguous()
    qkv = F.linear(x.to(settings.dtype), w.in_weight, w.in_bias)
    problem = attention.problem_of(qkv, settings.heads, settings.group_size, settings.dropout)
    mixed, _ = attention.forward(problem, qkv, valid, seed)
    del qkv
    piece = whole(x.shape[0] * x.shape[1])
    attended = project_norm(mixed.flatten(0, 1), x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias,
                            settings.norm1, seed, piece, settings.dtype, save=False).out  # fmt: skip
    del mixed
    normed, _ = mlp_norm(attended, _mlp(w), settings.norm2, seed, piece, settings.out_dtype, save=False)
    return normed.out.view(x.shape)


def lean_backward(
    grad: Tensor, x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of `x`, and those of the weights in their order, in single precision where there are pieces."""
    w = cast_matrices(weights, settings.dtype)
    batch, positions, width = x.shape
    at_once = max(1, blocks.ELEMENTS_AT_ONCE // (batch * width))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed: list[Tensor] | None = None
    for start in range(0, positions, at_once):
        part = slice(start, min(start + at_once, positions))
        seen = None if valid is None else valid[:, part].contiguous()
        piece, new = _piece_backward(grad[:, part].contiguous(), x[:, part].contiguous(), w, settings, seen, seed,
                                     start, positions)  # fmt: skip
        grad_x[:, part] = piece
        summed = new if summed is None else [a.float() + b for a, b in zip(summed, new, strict=True)]
    assert summed is not None
    return grad_x, summed


def _mlp(w: LayerWeights) -> MlpWeights:
    return MlpWeights(w.weight1, w.bias1, w.weight2, w.bias2, w.norm2_weight, w.norm2_bias)


def _piece_backward(
    grad: Tensor, x: Tensor, w: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None,
    start: int, positions: int,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    piece = Piece(x.shape[1], positions, start)
    rows = x.to(settings.dtype)
    qkv = F.linear(rows, w.in_weight, w.in_bias)
    problem = attention.problem_of(qkv, settings.heads, settings.group_size, settings.dropout, start)
    mixed, lse = attention.forward(problem, qkv, valid, seed)
    attended = project_norm(mixed.flatten(0, 1), x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias,
                            settings.norm1, seed, piece, settings.dtype)  # fmt: skip
    normed, hidden = mlp_norm(attended.out, _mlp(w), settings.norm2, seed, piece, settings.dtype)
    mlp = mlp_norm_gradients(grad.flatten(0, 1), attended.out, hidden, normed.total, normed.statistics, _mlp(w),
                             settings.norm2, seed, piece)  # fmt: skip
    del normed, hidden
    out = project_norm_gradients(mlp.rows, mixed.flatten(0, 1), attended.total, attended.statistics, w.out_weight,
                                 w.norm1_weight, settings.norm1, seed, piece,
                                 torch.empty_like(attended.total, dtype=x.dtype))  # fmt: skip
    del attended
    grad_qkv = attention.backward(problem, out.mixed.view(mixed.shape), qkv, mixed, lse, valid, seed).flatten(0, 1)
    grad_x = add_product_(out.residual, grad_qkv, w.in_weight)
    gradients = LayerWeights(
        grad_qkv.t() @ rows.flatten(0, 1), grad_qkv.sum(0, dtype=torch.float32),
        out.weight, out.vectors[2], out.vectors[0], out.vectors[1],
        mlp.weight1, mlp.bias1, mlp.weight2, mlp.vectors[2], mlp.vectors[0], mlp.vectors[1],
    )  # fmt: skip
    return grad_x.view(x.shape), list(gradients)


class LeanLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, valid: Tensor | None, seed: Tensor | None, settings: LayerSettings,
                *weights: Tensor) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, valid, seed, *weights)
        ctx.settings = settings
        return lean_forward(x, LayerWeights(*weights), settings, valid, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, valid, seed, *weights = ctx.saved_tensors
        grad_x, gradients = lean_backward(grad, x, LayerWeights(*weights), ctx.settings, valid, seed)
        return grad_x, None, None, None, *(g.to(w.dtype) for g, w in zip(gradients, weights, strict=True))


def lean_layer(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> Tensor:
    return LeanLayer.apply(x, valid, seed, settings, *weights)
