"""The blocks as custom operators for `torch.compile`, with shapes, types and gradients declared.

In eager mode `layer` runs the same blocks with a tenth of the overhead of an operator written in Python.
"""

# Operators read their signature from real annotations: no `from __future__ import annotations` here.
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from batchformer.kernels import attention, blocks
from batchformer.kernels.blocks import LayerSettings, LayerWeights, MlpWeights, norm_settings
from batchformer.kernels.layer import lean_backward, lean_forward
from batchformer.kernels.random_bits import Site
from batchformer.kernels.rows import sum_lines, whole


@custom_op("batchformer::attention", mutates_args=())
def attention_operator(
    qkv: Tensor, valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int, dropout: float
) -> tuple[Tensor, Tensor]:
    problem = attention.problem_of(*qkv.shape, qkv.dtype, heads, group_size or None, dropout)
    mixed, lse = attention.forward(problem, qkv.contiguous(), valid, seed)
    # zeros where nothing is saved: an operator has to return the same outputs on every call
    return mixed, qkv.new_zeros(_saved(qkv, heads), dtype=torch.float32) if lse is None else lse


@attention_operator.register_fake
def _(qkv: Tensor, valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int, dropout: float) -> Any:
    batch, positions, width = qkv.shape
    return qkv.new_empty(batch, positions, width // 3), qkv.new_empty(_saved(qkv, heads), dtype=torch.float32)


def _saved(qkv: Tensor, heads: int) -> int:
    return qkv.shape[0] * qkv.shape[1] * heads


@custom_op("batchformer::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, qkv: Tensor, mixed: Tensor, lse: Tensor, valid: Tensor | None, seed: Tensor | None, heads: int,
    group_size: int, dropout: float,
) -> Tensor:  # fmt: skip
    problem = attention.problem_of(*qkv.shape, qkv.dtype, heads, group_size or None, dropout)
    return attention.backward(problem, grad.contiguous(), qkv.contiguous(), mixed, lse, valid, seed).qkv


@attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, valid, seed, *ctx.how = inputs
    ctx.save_for_backward(qkv, *output, valid, seed)


def _attention_grad(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return attention_backward(grad, *ctx.saved_tensors, *ctx.how), *[None] * 5


attention_operator.register_autograd(_attention_grad, setup_context=_attention_setup)


@custom_op("batchformer::project_norm", mutates_args=())
def project_norm_operator(
    mixed: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor,
    seed: Tensor | None, eps: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    how = norm_settings(eps, dropout, Site.ATTENDED)
    return _made(blocks.project_norm(mixed.contiguous(), residual.contiguous(), weight, bias, norm_weight, norm_bias,
                                     how, seed, whole(mixed.shape[0])))  # fmt: skip


def _made(normed: blocks.Normed) -> tuple[Tensor, Tensor, Tensor]:
    """Output, sum and statistics, none of them None."""
    assert normed.out is not None and normed.statistics is not None  # noqa: PT018
    return normed.out, normed.total, normed.statistics


@project_norm_operator.register_fake
def _(mixed: Tensor, residual: Tensor, weight: Tensor, *_: Any) -> Any:
    out = mixed.new_empty(mixed.shape[0], weight.shape[0])
    return out, torch.empty_like(out), mixed.new_empty((mixed.shape[0], 2), dtype=torch.float32)


@custom_op("batchformer::project_norm_backward", mutates_args=())
def project_norm_backward(
    grad: Tensor, mixed: Tensor, residual: Tensor, total: Tensor, statistics: Tensor, weight: Tensor,
    norm_weight: Tensor, seed: Tensor | None, eps: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = norm_settings(eps, dropout, Site.ATTENDED)
    into = torch.empty_like(total, dtype=residual.dtype)
    got = blocks.project_norm_gradients(grad.contiguous(), mixed.contiguous(), total, statistics, weight, norm_weight,
                                        how, seed, whole(mixed.shape[0]), into)  # fmt: skip
    assert got.weight is not None
    return got.mixed, into, got.weight, _three(got.lines)


@project_norm_backward.register_fake
def _(grad: Tensor, mixed: Tensor, residual: Tensor, total: Tensor, statistics: Tensor, weight: Tensor, *_: Any) -> Any:
    return (
        torch.empty_like(mixed, memory_format=torch.contiguous_format),
        torch.empty_like(total, dtype=residual.dtype),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
        weight.new_empty((3, weight.shape[0]), dtype=torch.float32),
    )


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    mixed, residual, weight, bias, norm_weight, norm_bias, seed, *ctx.how = inputs
    ctx.save_for_backward(mixed, residual, output[1], output[2], weight, norm_weight, seed)
    ctx.dtypes = (bias.dtype, norm_weight.dtype, norm_bias.dtype)


def _project_grad(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    mixed, residual, weight, vectors = project_norm_backward(grad, *ctx.saved_tensors, *ctx.how)
    of_bias, of_weight, of_shift = ctx.dtypes
    return (mixed, residual, weight, vectors[2].to(of_bias), vectors[0].to(of_weight), vectors[1].to(of_shift),
            None, None, None)  # fmt: skip


project_norm_operator.register_autograd(_project_grad, setup_context=_project_setup)


@custom_op("batchformer::mlp_norm", mutates_args=())
def mlp_norm_operator(
    rows: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm_weight: Tensor,
    norm_bias: Tensor, seed: Tensor | None, eps: float, dropout: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    weights = MlpWeights(weight1, bias1, weight2, bias2, norm_weight, norm_bias)
    how = norm_settings(eps, dropout, Site.MLP)
    rows = rows.contiguous()
    out = torch.empty_like(rows, dtype=out_dtype)
    normed, hidden = blocks.mlp_norm(rows, weights, how, seed, whole(rows.shape[0]), out)
    _, total, statistics = _made(normed)
    return out, hidden, total, statistics


@mlp_norm_operator.register_fake
def _(rows: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, norm_weight: Tensor,
      norm_bias: Tensor, seed: Tensor | None, eps: float, dropout: float, out_dtype: torch.dtype) -> Any:  # fmt: skip
    total = torch.empty_like(rows, memory_format=torch.contiguous_format)
    hidden = rows.new_empty(rows.shape[0], weight1.shape[0])
    return (
        torch.empty_like(total, dtype=out_dtype),
        hidden,
        total,
        rows.new_empty((rows.shape[0], 2), dtype=torch.float32),
    )


@custom_op("batchformer::mlp_norm_backward", mutates_args=())
def mlp_norm_backward(
    grad: Tensor, rows: Tensor, hidden: Tensor, total: Tensor, statistics: Tensor, weight1: Tensor, bias1: Tensor,
    weight2: Tensor, bias2: Tensor, norm_weight: Tensor, norm_bias: Tensor, seed: Tensor | None, eps: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    how = norm_settings(eps, dropout, Site.MLP)
    got = blocks.mlp_norm_gradients(grad.contiguous(), rows.contiguous(), hidden, total, statistics, weight1, weight2,
                                    norm_weight, how, seed, whole(rows.shape[0]))  # fmt: skip
    assert got.weight1 is not None and got.weight2 is not None  # noqa: PT018
    (of_bias,) = sum_lines([got.lines1], [bias1.shape[0]], torch.float32)
    return got.rows, got.weight1, of_bias, got.weight2, _three(got.lines2)


def _three(lines: Tensor) -> Tensor:
    """The sums for weight, shift and bias, as (3, dim)."""
    return sum_lines([lines], [lines.shape[1]], torch.float32)[0].view(3, -1)


@mlp_norm_backward.register_fake
def _(grad: Tensor, rows: Tensor, hidden: Tensor, total: Tensor, statistics: Tensor, weight1: Tensor, bias1: Tensor,
      weight2: Tensor, *_: Any) -> Any:  # fmt: skip
    return (
        torch.empty_like(rows, memory_format=torch.contiguous_format),
        torch.empty_like(weight1, memory_format=torch.contiguous_format),
        torch.empty_like(bias1, dtype=torch.float32),
        torch.empty_like(weight2, memory_format=torch.contiguous_format),
        rows.new_empty((3, rows.shape[1]), dtype=torch.float32),
    )


def _mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, *weights, seed, eps, dropout, _ = inputs
    ctx.save_for_backward(rows, *output[1:], *weights, seed)
    ctx.how, ctx.dtypes = (eps, dropout), [w.dtype for w in weights]


def _mlp_grad(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight1, bias1, weight2, vectors = mlp_norm_backward(grad, *ctx.saved_tensors, *ctx.how)
    gradients = (weight1, bias1, weight2, vectors[2], vectors[0], vectors[1])
    return rows, *(g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None, None


mlp_norm_operator.register_autograd(_mlp_grad, setup_context=_mlp_setup)


@custom_op("batchformer::lean_layer", mutates_args=())
def lean_layer_operator(
    x: Tensor, weights: list[Tensor], valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int,
    dropout: float, eps1: float, eps2: float, dtype: torch.dtype, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    settings = LayerSettings(heads, group_size or None, dropout, eps1, eps2, dtype, out_dtype)
    return lean_forward(x, LayerWeights(*weights), settings, valid, seed)


@lean_layer_operator.register_fake
def _(x: Tensor, weights: list[Tensor], valid: Tensor | None, seed: Tensor | None, heads: int, group_size: int,
      dropout: float, eps1: float, eps2: float, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:  # fmt: skip
    return torch.empty_like(x, dtype=out_dtype, memory_format=torch.contiguous_format)


@custom_op("batchformer::lean_layer_backward", mutates_args=())
def lean_layer_backward(
    grad: Tensor, x: Tensor, weights: list[Tensor], valid: Tensor | None, seed: Tensor | None, heads: int,
    group_size: int, dropout: float, eps1: float, eps2: float, dtype: torch.dtype, out_dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    settings = LayerSettings(heads, group_size or None, dropout, eps1, eps2, dtype, out_dtype)
    grad_x, gradients = lean_backward(grad, x, LayerWeights(*weights), settings, valid, seed)
    # copies: some are rows of one tensor, and what an operator returns must not share memory
    return [grad_x, *(g.clone() for g in gradients if g is not None)]


@lean_layer_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, *weights)]


def _lean_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, valid, seed, *ctx.how = inputs
    ctx.save_for_backward(x, valid, seed, *weights)


def _lean_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, valid, seed, *weights = ctx.saved_tensors
    grad_x, *gradients = lean_layer_backward(grad, x, weights, valid, seed, *ctx.how)
    return grad_x, gradients, *[None] * 9


lean_layer_operator.register_autograd(_lean_grad, setup_context=_lean_setup)


def compiled_layer(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None, is_lean: bool
) -> Tensor:
    """`layer.FastLayer` or, with `is_lean`, `layer.LeanLayer` as custom operators."""
    s = settings
    if is_lean:
        return lean_layer_operator(x, list(weights), valid, seed, s.heads, s.group_size or 0, s.dropout, s.eps1, s.eps2,
                                   s.dtype, s.out_dtype)  # fmt: skip
    w = weights.cast(s.dtype)
    qkv = F.linear(x.to(s.dtype), w.in_weight, w.in_bias)
    mixed, _ = attention_operator(qkv, valid, seed, s.heads, s.group_size or 0, s.dropout)
    attended, _, _ = project_norm_operator(mixed.flatten(0, 1), x.flatten(0, 1), w.out_weight, w.out_bias,
                                           w.norm1_weight, w.norm1_bias, seed, s.eps1, s.dropout)  # fmt: skip
    out, *_ = mlp_norm_operator(attended, w.weight1, w.bias1, w.weight2, w.bias2, w.norm2_weight, w.norm2_bias, seed,
                                s.eps2, s.dropout, s.out_dtype)  # fmt: skip
    return out.view(x.shape)
