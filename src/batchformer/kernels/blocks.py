"""The post-norm layer in three blocks, forward and backward, by kernels around torch's matrix products.

    attend           x -> qkv -> mixed                      in_proj, attention over the batch
    project, norm    LN(x + dropout(mixed W + b))           out_proj, residual, norm1
    mlp, norm        LN(y + dropout(hidden W2 + b2))        linear1, ReLU, dropout, linear2, residual, norm2

Functions take and return plain tensors, without autograd; `layer` wraps them in autograd nodes, `operators` in custom
operators. Gradients of vectors are returned as lines of partial sums (for `rows.sum_lines`), so that those of a whole
layer are summed in one launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.kernels.random_bits import Drop, Site
from batchformer.kernels.rows import Added, Piece, add_norm, add_norm_gradients, relu_, relu_gradient_, sum_lines

# A backward of an activation with more elements works in equal pieces, to keep its peak memory low. A piece of a fast
# layer holds two activations beside what is stored, one of a lean layer twelve.
FAST_ELEMENTS, LEAN_ELEMENTS = 14 * 2**20, 28 * 2**20


class Normed(NamedTuple):
    out: Float[Tensor, "*rows dim"]
    total: Float[Tensor, "rows dim"]  # what was normalised
    statistics: Float[Tensor, "rows 2"] | None


# Pieces have a multiple of this many rows: then all their tensors start at a multiple of 16 bytes.
ALIGNED_ROWS = 8


def piece_length(count: int, elements: int, at_once: int, multiple: int = 1) -> int:
    """The length of equal pieces of `count` rows or positions, so that one has about `at_once` elements."""
    length = -(-count // -(-count * elements // at_once)) if count else 1
    return min(-(-length // multiple) * multiple, max(count, 1))


class NormSettings(NamedTuple):
    eps: float
    drop: Drop
    site: Site


@lru_cache(maxsize=256)
def norm_settings(eps: float, dropout: float, site: Site) -> NormSettings:
    """Cached: a layer needs them several times in every call."""
    return NormSettings(eps, Drop.of(dropout), site)


class MlpWeights(NamedTuple):
    weight1: Float[Tensor, "hidden dim"]
    bias1: Float[Tensor, " hidden"]
    weight2: Float[Tensor, "dim hidden"]
    bias2: Float[Tensor, " dim"]
    norm_weight: Float[Tensor, " dim"]
    norm_bias: Float[Tensor, " dim"]


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
        return norm_settings(self.eps1, self.dropout, Site.ATTENDED)

    @property
    def norm2(self) -> NormSettings:
        return norm_settings(self.eps2, self.dropout, Site.MLP)


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
    out: Float[Tensor, "*rows dim"] | None = None,
    save: bool = True,
) -> Normed:
    """LN(residual + dropout(mixed weight' + bias)), written to `out` where that is given."""
    branch = F.linear(mixed, weight)
    out = torch.empty_like(branch) if out is None else out
    statistics = branch.new_empty((branch.shape[0], 2), dtype=torch.float32) if save else None
    add_norm(branch, residual, bias, norm_weight, norm_bias, *settings, seed, piece, out, statistics)
    return Normed(out, branch, statistics)


class ProjectNormGradients(NamedTuple):
    mixed: Float[Tensor, "rows inner"]
    weight: Float[Tensor, "dim inner"] | None
    lines: Float[Tensor, "lines 3*dim"]  # of norm_weight, norm_bias and bias


def project_norm_gradients(
    grad: Float[Tensor, "*rows dim"],
    mixed: Float[Tensor, "rows inner"],
    total: Float[Tensor, "rows dim"],
    known: Float[Tensor, "rows 2"] | Added,
    weight: Float[Tensor, "dim inner"],
    norm_weight: Float[Tensor, " dim"],
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    into: Float[Tensor, "*rows dim"],
    summed: Float[Tensor, "dim inner"] | None = None,
    wants_weight: bool = True,
    whole_grad: bool = False,
    whole_into: bool = False,
    lines: Float[Tensor, "lines 3*dim"] | None = None,
) -> ProjectNormGradients:
    """Gradients of `project_norm`. That of the residual is written to `into`, that of the weight added to `summed`,
    those of vectors to `lines`, where these are given. `total` and `known`: see `add_norm_gradients`."""
    branch, lines = add_norm_gradients(grad, total, known, norm_weight, settings.drop, settings.site, seed, piece,
                                       into, whole_grad, whole_into, lines)  # fmt: skip
    grad_weight = weight_gradient(branch, mixed, summed) if wants_weight else None
    return ProjectNormGradients(torch.mm(branch, weight), grad_weight, lines)


def weight_gradient(
    grad: Float[Tensor, "rows outer"], rows: Float[Tensor, "rows inner"], summed: Tensor | None = None
) -> Float[Tensor, "outer inner"]:
    """grad' rows, added to `summed` in place where that is given."""
    return torch.mm(grad.t(), rows) if summed is None else summed.addmm_(grad.t(), rows)


def mlp_hidden(
    rows: Float[Tensor, "rows dim"], weights: MlpWeights, drop: Drop, seed: Int[Tensor, " 1"] | None, piece: Piece
) -> Float[Tensor, "rows hidden"]:
    return relu_(F.linear(rows, weights.weight1), weights.bias1, drop, Site.HIDDEN, seed, piece)


def mlp_norm(
    rows: Float[Tensor, "rows dim"],
    weights: MlpWeights,
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    out: Float[Tensor, "*rows dim"],
    save: bool = True,
) -> tuple[Normed, Float[Tensor, "rows hidden"]]:
    hidden = mlp_hidden(rows, weights, settings.drop, seed, piece)
    normed = project_norm(hidden, rows, weights.weight2, weights.bias2, weights.norm_weight, weights.norm_bias,
                          settings, seed, piece, out, save)  # fmt: skip
    return normed, hidden


class MlpGradients(NamedTuple):
    rows: Float[Tensor, "rows dim"]
    weight1: Float[Tensor, "hidden dim"] | None
    weight2: Float[Tensor, "dim hidden"] | None
    lines1: Float[Tensor, "lines hidden"]  # of bias1
    lines2: Float[Tensor, "lines 3*dim"]  # of norm_weight, norm_bias and bias2


def mlp_norm_gradients(
    grad: Float[Tensor, "*rows dim"],
    rows: Float[Tensor, "rows dim"],
    hidden: Float[Tensor, "rows hidden"],
    total: Float[Tensor, "rows dim"],
    known: Float[Tensor, "rows 2"] | Added,
    weight1: Float[Tensor, "hidden dim"],
    weight2: Float[Tensor, "dim hidden"],
    norm_weight: Float[Tensor, " dim"],
    settings: NormSettings,
    seed: Int[Tensor, " 1"] | None,
    piece: Piece,
    summed: tuple[Tensor | None, Tensor | None] = (None, None),
    wants: tuple[bool, bool] = (True, True),
    whole_grad: bool = False,
) -> MlpGradients:
    """Gradients of `mlp_norm`, in pieces where there are many rows. Those of the two weights are added to `summed`,
    where given. `total` and `known`: see `add_norm_gradients`; with `Added` the rows are a piece already."""
    into = torch.empty_like(rows)
    summed1, summed2 = summed
    lines1: Tensor | None = None
    lines2: Tensor | None = None
    count = rows.shape[0]
    in_piece = isinstance(known, Added)
    at_once = count if in_piece else piece_length(count, rows.shape[1], FAST_ELEMENTS, ALIGNED_ROWS)
    for start in range(0, count, at_once):
        of = (grad, rows, hidden, total, known, into)
        if at_once < count:
            of = tuple(t[start : start + at_once] for t in of)  # type: ignore[assignment, misc]
        grad_, rows_, hidden_, total_, known_, into_ = of
        got = project_norm_gradients(grad_, hidden_, total_, known_, weight2, norm_weight, settings, seed,
                                     piece.skip(start), into_, summed2, wants[1], whole_grad,
                                     lines=lines2)  # fmt: skip
        summed2, lines2 = got.weight, got.lines
        lines1 = relu_gradient_(got.mixed, hidden_, settings.drop, lines1)
        if wants[0]:
            summed1 = weight_gradient(got.mixed, rows_, summed1)
        into_.addmm_(got.mixed, weight1)
        del got
    assert lines1 is not None and lines2 is not None  # noqa: PT018
    return MlpGradients(into, summed1, summed2, lines1, lines2)


class VectorLines(NamedTuple):
    """Lines of partial sums for the gradients of the layer's vectors, one entry for each piece of the backward."""

    queries: list[Tensor]  # with the values, for the first bias: a bias of the keys has no effect
    values: list[Tensor]
    norm1: list[Tensor]  # and the bias of the output projection
    bias1: list[Tensor]
    norm2: list[Tensor]  # and the second bias


def layer_gradients(
    matrices: list[Tensor | None], lines: VectorLines, dtypes: list[torch.dtype]
) -> list[Tensor | None]:
    """Gradients of the weights, in their order and types; `matrices`: of in, out, 1 and 2."""
    queries, *others = [_joined(part) for part in lines]
    parts = [queries, queries[:0], *others]
    dim, hidden = queries.shape[1], parts[4].shape[1]
    sizes = [3 * dim, dim, dim, dim, hidden, dim, dim, dim]
    one_type = dtypes[0] if dtypes.count(dtypes[0]) == len(dtypes) else torch.float32
    in_bias, norm1, shift1, out_bias, bias1, norm2, shift2, bias2 = sum_lines(parts, sizes, one_type)
    into, out, first, second = matrices
    gradients = (into, in_bias, out, out_bias, norm1, shift1, first, bias1, second, bias2, norm2, shift2)
    return [g if g is None or g.dtype == dtype else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
