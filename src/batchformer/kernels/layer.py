"""The layer with `memory="fast"`: one autograd node, everything stored that its backward needs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import attention
from batchformer.kernels.blocks import (
    mlp_norm,
    mlp_norm_gradients,
    project_norm,
    project_norm_gradients,
    weight_gradient,
)
from batchformer.kernels.functions import LayerSettings, LayerWeights, VectorLines, add_product_, layer_gradients
from batchformer.kernels.rows import whole


class Facts(NamedTuple):
    """What the backward needs to know beside tensors."""

    settings: LayerSettings
    problem: attention.Problem
    dtype: torch.dtype  # of the input
    dtypes: list[torch.dtype]  # of the weights


def fast_forward(
    x: Tensor, valid: Tensor | None, seed: Tensor | None, settings: LayerSettings, weights: LayerWeights
) -> tuple[Tensor, list[Tensor | None], Facts]:
    """The output, and what `fast_backward` takes."""
    w, dim = weights.cast(settings.dtype), x.shape[2]
    x = x.contiguous()
    rows = x.to(settings.dtype).view(-1, dim)
    piece = whole(rows.shape[0])
    qkv = torch.addmm(w.in_bias, rows, w.in_weight.t()).view(x.shape[0], x.shape[1], -1)
    problem = attention.problem_of(qkv, settings.heads, settings.group_size, settings.dropout)
    mixed, lse = attention.forward(problem, qkv, valid, seed)
    attended, total1, statistics1 = project_norm(
        mixed.view(-1, dim), x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias, settings.norm1, seed, piece,
        settings.dtype,
    )  # fmt: skip
    # In its last shape from the start: autograd lets nobody change a view that was made inside of a node.
    (out, total2, statistics2), hidden = mlp_norm(
        attended, w.mlp, settings.norm2, seed, piece, settings.out_dtype, shape=x.shape
    )
    saved = [rows, qkv, mixed, lse, total1, statistics1, attended, hidden, total2, statistics2, valid, seed, *w]
    return out, saved, Facts(settings, problem, x.dtype, [t.dtype for t in weights])


_ALL: Any = LayerWeights._make([True] * len(LayerWeights._fields))


def fast_backward(
    grad: Tensor, saved: list[Any], facts: Facts, wants_x: bool = True, wants: Any = _ALL
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input and of the weights. What was saved is taken out of the list and let go once it is used."""
    rows, qkv, mixed, lse, total1, statistics1, attended, hidden, total2, statistics2, valid, seed, *weights = saved
    saved.clear()
    w, settings = LayerWeights(*weights), facts.settings
    piece = whole(rows.shape[0])
    mlp = mlp_norm_gradients(
        grad.contiguous().view(rows.shape), attended, hidden, total2, statistics2, w.mlp, settings.norm2, seed, piece,
        wants=(wants.weight1, wants.weight2),
    )  # fmt: skip
    del attended, hidden, total2, statistics2
    # The gradient of the residual takes the place of the one that arrives, where the types allow.
    into = mlp.rows if facts.dtype == mlp.rows.dtype else torch.empty_like(mlp.rows, dtype=facts.dtype)
    out = project_norm_gradients(
        mlp.rows, mixed.view(rows.shape[0], -1), total1, statistics1, w.out_weight, w.norm1_weight, settings.norm1,
        seed, piece, into, wants_weight=wants.out_weight,
    )  # fmt: skip
    del total1, statistics1
    arrived, mixed = out.mixed.view(mixed.shape), None if facts.problem.plan.single else mixed
    got = attention.backward(facts.problem, arrived, qkv, mixed, lse, valid, seed, True)
    of_out, lines = out.weight, VectorLines([got.sums], [out.lines], [mlp.lines1], [mlp.lines2])
    del qkv, mixed, out, arrived
    grad_qkv = got.qkv.view(rows.shape[0], -1)
    of_in = weight_gradient(grad_qkv, rows) if wants.in_weight else None
    grad_x = add_product_(into, grad_qkv, w.in_weight).view(grad.shape) if wants_x else None
    return grad_x, layer_gradients([of_in, of_out, mlp.weight1, mlp.weight2], lines, facts.dtypes)


class FastLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, valid: Tensor | None, seed: Tensor | None, settings: LayerSettings,
                *weights: Tensor) -> Tensor:  # fmt: skip
        out, saved, ctx.facts = fast_forward(x, valid, seed, settings, LayerWeights(*weights))
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = list(ctx.saved_tensors)
        forget = getattr(ctx, "maybe_clear_saved_tensors", None)  # unless the graph is retained
        if forget is not None:
            forget()
        wants = LayerWeights(*ctx.needs_input_grad[4:])
        grad_x, gradients = fast_backward(grad, saved, ctx.facts, ctx.needs_input_grad[0], wants)
        return grad_x, None, None, None, *gradients


def fast_layer(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> Tensor:
    return FastLayer.apply(x, valid, seed, settings, *weights)
