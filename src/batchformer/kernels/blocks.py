"""The post-norm layer in three blocks, forward and backward, by kernels around torch's matrix products.

    attend           x -> qkv -> mixed                      in_proj, attention over the batch
    project, norm    LN(x + dropout(mixed W + b))           out_proj, residual, norm1
    mlp, norm        LN(y + dropout(hidden W2 + b2))        linear1, ReLU, dropout, linear2, residual, norm2

Each function takes and gives plain tensors and knows nothing of autograd; `functions` makes autograd nodes of them,
`operators` makes operators of torch. A node for each block, so that what one has saved is free before the next begins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.kernels.random_bits import Drop, Site
from batchformer.kernels.rows import Piece, add_norm, add_norm_gradients, relu_, relu_gradient_

# Elements of an activation up to which a backward works in one go; beyond, piece by piece, to keep its peak low.
ELEMENTS_AT_ONCE = 16 * 2**20


class Normed(NamedTuple):
    out: Float[Tensor, "rows dim"]
    total: Float[Tensor, "rows dim"]  # what was normalised
    statistics: Float[Tensor, "2 rows"]


class NormSettings(NamedTuple):
    eps: float
    drop: Drop
    site: Site


def project_norm(
    mixed: Float[Tensor, "rows inner"],
    residual: Float[Tensor, "rows dim"],
    weight: Float[Tensor, "dim inner"],
    bias: Float[Tensor, " dim"],
    norm_weight: Float[Tensor, " dim"],
    norm_bias: Float[Tensor, " dim"],
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    dtype: torch.dtype,
    save: bool = True,
) -> Normed:
    """LN(residual + dropout(mixed weight' + bias)), in `dtype`."""
    branch = mixed @ weight.t()
    out, statistics = add_norm(branch, residual, bias, norm_weight, norm_bias, settings.eps, settings.drop,
                               settings.site, seed, piece, dtype, save)  # fmt: skip
    return Normed(out, branch, statistics)


class ProjectNormGradients(NamedTuple):
    mixed: Float[Tensor, "rows inner"]
    residual: Float[Tensor, "rows dim"]
    weight: Float[Tensor, "dim inner"]
    vectors: Float[Tensor, "3 dim"]  # of norm_weight, norm_bias and bias


def project_norm_gradients(
    grad: Float[Tensor, "rows dim"],
    mixed: Float[Tensor, "rows inner"],
    total: Float[Tensor, "rows dim"],
    statistics: Float[Tensor, "2 rows"],
    weight: Float[Tensor, "dim inner"],
    norm_weight: Float[Tensor, " dim"],
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    into: Float[Tensor, "rows dim"],
) -> ProjectNormGradients:
    got = add_norm_gradients(grad, total, statistics, norm_weight, settings.drop, settings.site, seed, piece, into)
    return ProjectNormGradients(got.branch @ weight, got.total, got.branch.t() @ mixed, got.parameters)


class MlpWeights(NamedTuple):
    weight1: Float[Tensor, "hidden dim"]
    bias1: Float[Tensor, " hidden"]
    weight2: Float[Tensor, "dim hidden"]
    bias2: Float[Tensor, " dim"]
    norm_weight: Float[Tensor, " dim"]
    norm_bias: Float[Tensor, " dim"]


def mlp_norm(
    rows: Float[Tensor, "rows dim"],
    weights: MlpWeights,
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    dtype: torch.dtype,
    save: bool = True,
) -> tuple[Normed, Float[Tensor, "rows hidden"]]:
    hidden = relu_(rows @ weights.weight1.t(), weights.bias1, settings.drop, Site.HIDDEN, seed, piece)
    normed = project_norm(hidden, rows, weights.weight2, weights.bias2, weights.norm_weight, weights.norm_bias,
                          settings, seed, piece, dtype, save)  # fmt: skip
    return normed, hidden


class MlpGradients(NamedTuple):
    rows: Float[Tensor, "rows dim"]
    weight1: Float[Tensor, "hidden dim"]
    bias1: Float[Tensor, " hidden"]
    weight2: Float[Tensor, "dim hidden"]
    vectors: Float[Tensor, "3 dim"]


def mlp_norm_gradients(
    grad: Float[Tensor, "rows dim"],
    rows: Float[Tensor, "rows dim"],
    hidden: Float[Tensor, "rows hidden"],
    total: Float[Tensor, "rows dim"],
    statistics: Float[Tensor, "2 rows"],
    weights: MlpWeights,
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
) -> MlpGradients:
    """By pieces of rows where there are many; sums over pieces are in single precision."""
    into = torch.empty_like(rows)
    summed: list[Tensor] | None = None
    at_once = max(1, ELEMENTS_AT_ONCE // rows.shape[1]) if piece.stride == 0 else rows.shape[0]
    for start in range(0, rows.shape[0], at_once):
        part = slice(start, start + at_once)
        got = project_norm_gradients(grad[part], hidden[part], total[part], statistics[:, part], weights.weight2,
                                     weights.norm_weight, settings, seed, piece.skip(start), into[part])  # fmt: skip
        bias1 = relu_gradient_(got.mixed, hidden[part], settings.drop)
        new = [got.mixed.t() @ rows[part], bias1, got.weight, got.vectors]
        into[part].addmm_(got.mixed, weights.weight1)
        summed = new if summed is None else [a.float() + b for a, b in zip(summed, new, strict=True)]
        del got
    assert summed is not None
    return MlpGradients(into, *summed)
