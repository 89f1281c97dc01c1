"""Features with and without the module (V2, Fig. 8), and statistics that tell whether tokens still differ."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.analysis.batch_attention import inside_images
from batchformer.analysis.recorded_forward import record_inference
from batchformer.errors import UserError
from batchformer.nn.token_layout import TokenLayout


@dataclass
class FeaturePair:
    """Tokens of the plain model, and with all modules relating the batch, at one insertion. On the CPU.

    The output of the submodule that the module is after, or the input of the one it is before.
    """

    path: str
    without: Float[Tensor, "batch position dim"]
    related: Float[Tensor, "batch position dim"]
    layout: TokenLayout
    side: str = "after"
    inside: Bool[Tensor, "batch row column"] | None = None  # where the cells are image and not padding

    def colours(self) -> tuple[Float[Tensor, "batch row column 3"], Float[Tensor, "batch row column 3"]]:
        """Both as RGB maps in [0, 1]: the first three principal components of all patches of both together.

        One basis and one scale for both, so a difference in colour is a difference in the features. Padding is
        left out.
        """
        if self.layout.grid is None:
            raise UserError(
                f"the {self.layout.positions} positions {self.side} {self.path!r} are no grid: use plane()."
            )
        patches = torch.cat([self.without, self.related])[:, self.layout.prefix :].flatten(0, 1)
        inside = torch.ones(len(patches), dtype=torch.bool) if self.inside is None else self.inside.flatten().repeat(2)
        flat = principal_components(patches, 3, inside)
        low, high = flat[inside].quantile(0.02, dim=0), flat[inside].quantile(0.98, dim=0)
        shown = ((flat - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
        without, related = shown.reshape(2, -1, *self.layout.grid, 3)
        return without, related

    def plane(self) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
        """Each sample's mean token as a point: the first two principal components of both together."""
        flat = principal_components(torch.cat([self.without.mean(1), self.related.mean(1)]), 2)
        without, related = flat.chunk(2)
        return without, related


def features_with_and_without(model: nn.Module, images: Tensor, place: int | str = 0) -> FeaturePair:
    """Features at one insertion, in the plain model and in mini-batch inference."""
    seen = record_inference(model, images, place)
    return FeaturePair(seen.path, seen.without.cpu(), seen.related.cpu(), seen.layout, seen.side)


def features_over_scenes(
    model: nn.Module,
    pixel_values: Float[Tensor, "batch 3 height width"],
    pixel_mask: Tensor | None = None,
    *,
    place: int | str = 0,
    level: int = 0,
) -> FeaturePair:
    """The same of an attached detector, over the cells of one of its feature maps.

    The paper shows the largest map of Deformable DETR, with the module in the first encoder layer: `level=0`,
    `place=0`. Padding, by `pixel_mask`, is left out of the colours.
    """
    seen = record_inference(model, pixel_values, place, pixel_mask=pixel_mask, level=level)
    inside = None
    if pixel_mask is not None and seen.layout.grid is not None:
        sizes = [(int(one.any(1).sum()), int(one.any(0).sum())) for one in pixel_mask]
        inside = inside_images(seen.layout.grid, pixel_mask.shape[-2:], sizes)
    return FeaturePair(seen.path, seen.without.cpu(), seen.related.cpu(), seen.layout, seen.side, inside)


def principal_components(
    rows: Float[Tensor, "row dim"], count: int, fitted: Bool[Tensor, " row"] | None = None
) -> Float[Tensor, "row {count}"]:
    """Centred rows in the basis of their largest principal directions; signs so that each basis vector's sum is >= 0.

    Centre and directions are those of the `fitted` rows, all unless given. Where there are fewer directions than
    `count`, the rest is 0.
    """
    centred = rows.double() - (rows if fitted is None else rows[fitted]).double().mean(0)
    spread = centred if fitted is None else centred[fitted]
    _, vectors = torch.linalg.eigh(spread.T @ spread)
    basis = vectors.flip(1)[:, :count]
    basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    found = (centred @ basis).float()
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))


@dataclass
class TokenStats:
    """Norm, effective rank and share between samples of the tokens of one stream at one depth, mean over positions."""

    norm: float
    effective_rank: float
    between_samples: float


def token_stats(tokens: Float[Tensor, "batch position dim"]) -> TokenStats:
    tokens = tokens.detach().float()
    return TokenStats(
        norm=tokens.norm(dim=-1).mean().item(),
        effective_rank=effective_rank(tokens).mean().item(),
        between_samples=between_samples(tokens).mean().item(),
    )


def effective_rank(tokens: Float[Tensor, "batch position dim"]) -> Float[Tensor, " position"]:
    """Per position: exp of the entropy of the normalised singular values of its (batch, dim) matrix, nothing removed.

    1: all samples are one direction; min(batch, dim): all directions alike. From the eigenvalues of the smaller Gram
    matrix in double precision, which is much faster than singular values on a GPU.
    """
    rows = tokens.detach().double().transpose(0, 1)
    gram = rows @ rows.mT if rows.shape[1] <= rows.shape[2] else rows.mT @ rows
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    share = singular / singular.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def between_samples(tokens: Float[Tensor, "batch position dim"]) -> Float[Tensor, " position"]:
    """Per position: 1 - |mean over the batch|^2 / mean |x|^2, the share of the energy that differs between samples.

    0: every sample has the same token, so nothing behind it can tell them apart.
    """
    tokens = tokens.detach().double()
    return 1 - tokens.mean(0).square().sum(-1) / tokens.square().sum(-1).mean(0)


def relative_change(after: Tensor, before: Tensor) -> float:
    """|after - before| / |before|, Frobenius norms over all tokens."""
    after, before = after.detach().float(), before.detach().float()
    return ((after - before).norm() / before.norm()).item()


def mean_cosine(one: Float[Tensor, "*token dim"], other: Float[Tensor, "*token dim"]) -> float:
    """Cosine between each token and its counterpart, averaged."""
    return torch.cosine_similarity(one.detach().float(), other.detach().float(), dim=-1).mean().item()


def sample_signal(one: Float[Tensor, "batch position dim"], other: Float[Tensor, "batch position dim"]) -> float:
    """Cosine between two runs of what tells samples apart: tokens minus their mean over the batch, at all positions.

    Tokens that differ between samples only because each drew another dropout mask look healthy by norm, rank and
    share between samples; here they give 0. What is below the noise of dropout cannot be learnt from.
    """
    one, other = (x.detach().double() - x.detach().double().mean(0) for x in (one, other))
    return (one * other).sum().div(one.norm() * other.norm()).item()
