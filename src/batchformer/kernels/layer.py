"""The fused layer as one autograd node, with `memory="fast"` or `memory="lean"`. Second derivatives are not supported.

"fast" stores everything its backward needs. "lean" stores the input alone and recomputes the layer in the backward, for
some positions at a time: batch attention relates no two positions, so the layer can be cut there. Dropout masks depend
on the place of an element in the whole tensor: both drop the same elements.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from batchformer.kernels import attention, blocks
from batchformer.kernels.blocks import (
    LayerSettings,
    LayerWeights,
    VectorLines,
    layer_gradients,
    mlp_hidden,
    mlp_norm,
    mlp_norm_gradients,
    project_norm,
    project_norm_gradients,
    weight_gradient,
)
from batchformer.kernels.rows import Added, Piece, take_piece, whole


class BackwardInfo(NamedTuple):
    """What `fast_backward` needs beside tensors."""

    settings: LayerSettings
    problem: attention.Problem
    dtype: torch.dtype  # of the input
    dtypes: list[torch.dtype]  # of the weights


def _project(
    x: Tensor, w: LayerWeights, settings: LayerSettings, first_position: int = 0
) -> tuple[Tensor, Tensor, attention.Problem]:
    """The rows of the input in the type of the products, their queries, keys and values, and the attention of these."""
    batch, positions, dim = x.shape
    rows = x.to(settings.dtype).view(-1, dim)
    qkv = F.linear(rows, w.in_weight, w.in_bias)
    problem = attention.problem_of(batch, positions, qkv.shape[1], settings.dtype, settings.heads, settings.group_size,
                                   settings.dropout, first_position)  # fmt: skip
    return rows, qkv, problem


def fast_forward(
    x: Tensor, valid: Tensor | None, seed: Tensor | None, settings: LayerSettings, weights: LayerWeights
) -> tuple[Tensor, list[Tensor | None], BackwardInfo]:
    """The output, the tensors to save, and what else `fast_backward` takes."""
    w = weights.cast(settings.dtype)
    x = x.contiguous()
    rows, qkv, problem = _project(x, w, settings)
    piece = whole(rows.shape[0])
    mixed, lse = attention.forward(problem, qkv, valid, seed)
    attended, total1, statistics1 = project_norm(
        mixed, x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias, settings.norm1, seed, piece
    )
    # Allocated in its final shape: autograd forbids in-place changes of a view that was made inside of a node.
    out = torch.empty_like(x, dtype=settings.out_dtype)
    (_, total2, statistics2), hidden = mlp_norm(attended, w.mlp, settings.norm2, seed, piece, out)
    # Every second of the weights: the backward reads no bias.
    saved = [rows, qkv, mixed, lse, total1, statistics1, attended, hidden, total2, statistics2, valid, seed, *w[::2]]
    return out, saved, BackwardInfo(settings, problem, x.dtype, [t.dtype for t in weights])


def fast_backward(
    grad: Tensor, saved: list[Any], info: BackwardInfo, wants_x: bool, wants: Any
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input and of the weights, where `wants_x` and `wants` (`LayerWeights` of booleans) are True.

    `saved` is emptied, so that each tensor is freed after its last use.
    """
    rows, qkv, mixed, lse, total1, statistics1, attended, hidden, total2, statistics2, valid, seed, *weights = saved
    saved.clear()
    in_weight, out_weight, norm1_weight, weight1, weight2, norm2_weight = weights
    settings, piece = info.settings, whole(rows.shape[0])
    mlp = mlp_norm_gradients(
        grad.contiguous().view(rows.shape), attended, hidden, total2, statistics2, weight1, weight2, norm2_weight,
        settings.norm2, seed, piece, wants=(wants.weight1, wants.weight2),
    )  # fmt: skip
    del attended, hidden, total2, statistics2
    # The gradient of the residual is written over the incoming one, where the types allow.
    into = mlp.rows if info.dtype == mlp.rows.dtype else torch.empty_like(mlp.rows, dtype=info.dtype)
    out = project_norm_gradients(
        mlp.rows, mixed, total1, statistics1, out_weight, norm1_weight, settings.norm1, seed, piece, into,
        wants_weight=wants.out_weight,
    )  # fmt: skip
    del total1, statistics1
    mixed = None if info.problem.tiles.single else mixed
    got = attention.backward(info.problem, out.mixed, qkv, mixed, lse, valid, seed, True)
    assert got.query_sums is not None and got.value_sums is not None  # noqa: PT018
    of_out, lines = out.weight, VectorLines([got.query_sums], [got.value_sums], [out.lines], [mlp.lines1], [mlp.lines2])
    del qkv, mixed, out
    of_in = weight_gradient(got.qkv, rows) if wants.in_weight else None
    grad_x = None
    if wants_x:
        grad_x = into.view(grad.shape)
        _add_product_(grad_x, got.qkv, in_weight)
    return grad_x, layer_gradients([of_in, of_out, mlp.weight1, mlp.weight2], lines, info.dtypes)


class FastLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, valid: Tensor | None, seed: Tensor | None, settings: LayerSettings,
                *weights: Tensor) -> Tensor:  # fmt: skip
        out, saved, ctx.info = fast_forward(x, valid, seed, settings, LayerWeights(*weights))
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = list(ctx.saved_tensors)
        clear = getattr(ctx, "maybe_clear_saved_tensors", None)  # does nothing where the graph is retained
        if clear is not None:
            clear()
        wants = LayerWeights(*ctx.needs_input_grad[4:])
        grad_x, gradients = fast_backward(grad, saved, ctx.info, ctx.needs_input_grad[0], wants)
        return grad_x, None, None, None, *gradients


def lean_forward(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> Tensor:
    w = weights.cast(settings.dtype)
    x = x.contiguous()
    rows, qkv, problem = _project(x, w, settings)
    piece = whole(rows.shape[0])
    del rows
    mixed, _ = attention.forward(problem, qkv, valid, seed)
    del qkv
    attended = project_norm(mixed, x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias, settings.norm1, seed,
                            piece, save=False).out  # fmt: skip
    del mixed
    out = torch.empty_like(x, dtype=settings.out_dtype)
    mlp_norm(attended, w.mlp, settings.norm2, seed, piece, out, save=False)
    return out


def lean_backward(
    grad: Tensor, x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of `x`, and those of the weights in their order and types."""
    w = weights.cast(settings.dtype)
    batch, positions, width = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    at_once = blocks.piece_length(positions, batch * width, blocks.LEAN_ELEMENTS)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    matrices: list[Tensor | None] = [None] * 4
    lines = VectorLines([], [], [], [], [])
    for start in range(0, positions, at_once):
        part = slice(start, min(start + at_once, positions))
        taken, seen = x, valid
        if at_once < positions:
            count = part.stop - start
            taken = take_piece(x, batch * count, Piece(count, positions, start)).view(batch, count, width)
            seen = None if valid is None else valid[:, part].contiguous()
        matrices = _piece_backward(grad, taken, grad_x, w, settings, seen, seed, part, matrices, lines)
        del taken
    return grad_x, layer_gradients(matrices, lines, [t.dtype for t in weights])


def _piece_backward(
    grad: Tensor, x: Tensor, grad_x: Tensor, w: LayerWeights, settings: LayerSettings, valid: Tensor | None,
    seed: Tensor | None, part: slice, matrices: list[Tensor | None], lines: VectorLines,
) -> list[Tensor | None]:  # fmt: skip
    """The backward of the positions `part`: `x` and `valid` hold these only, `grad` and `grad_x` all positions.
    Gradients of the matrices are added to `matrices`, lines appended to `lines`."""
    piece = Piece(x.shape[1], grad.shape[1], part.start)
    rows, qkv, problem = _project(x, w, settings, part.start)
    mixed, lse = attention.forward(problem, qkv, valid, seed)
    attended, total1, statistics1 = project_norm(
        mixed, x, w.out_weight, w.out_bias, w.norm1_weight, w.norm1_bias, settings.norm1, seed, piece
    )
    assert statistics1 is not None
    hidden = mlp_hidden(attended, w.mlp, settings.norm2.drop, seed, piece)
    branch2 = F.linear(hidden, w.weight2)
    of_in, of_out, of_1, of_2 = matrices
    added = Added(attended, w.bias2, settings.eps2)
    mlp = mlp_norm_gradients(grad, attended, hidden, branch2, added, w.weight1, w.weight2, w.norm2_weight,
                             settings.norm2, seed, piece, (of_1, of_2), whole_grad=True)  # fmt: skip
    del attended, hidden, branch2, added
    out = project_norm_gradients(mlp.rows, mixed, total1, statistics1, w.out_weight, w.norm1_weight, settings.norm1,
                                 seed, piece, grad_x, of_out, whole_into=True)  # fmt: skip
    del total1, statistics1
    got = attention.backward(problem, out.mixed, qkv, mixed, lse, valid, seed, True)
    for known, new in zip(lines, (got.query_sums, got.value_sums, out.lines, mlp.lines1, mlp.lines2), strict=True):
        assert new is not None
        known.append(new)
    _add_product_(grad_x[:, part], got.qkv, w.in_weight)
    return [weight_gradient(got.qkv, rows, of_in), out.weight, mlp.weight1, mlp.weight2]


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where the types allow; a slice of positions is not contiguous."""
    if total.dtype != left.dtype:
        total += (left @ right).view(total.shape)
    elif total.is_contiguous():
        total.view(left.shape[0], -1).addmm_(left, right)
    else:
        total.baddbmm_(left.view(*total.shape[:2], -1), right.expand(total.shape[0], -1, -1))


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
        return grad_x, None, None, None, *gradients
