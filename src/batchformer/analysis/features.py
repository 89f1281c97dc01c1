"""Features with and without the module (V2, Fig. 8), brought to colours and to a plane by principal components."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.analysis.mini_batch import infer_watched
from batchformer.errors import UserError
from batchformer.nn.token_layout import TokenLayout


@dataclass
class FeaturePair:
    """Tokens of the plain model, and with all modules relating the batch, at one insertion. On the CPU.

    Those that leave the submodule the module stands after, or enter the one it stands before.
    """

    path: str
    without: Float[Tensor, "batch position dim"]
    related: Float[Tensor, "batch position dim"]
    layout: TokenLayout
    side: str = "after"

    def colours(self) -> tuple[Float[Tensor, "batch row column 3"], Float[Tensor, "batch row column 3"]]:
        """Both as RGB maps in [0, 1]: the first three principal components of all patches of both together.

        One basis and one scale for both, so a difference in colour is a difference in the features.
        """
        if self.layout.grid is None:
            raise UserError(
                f"the {self.layout.positions} positions {self.side} {self.path!r} are no grid: use plane()."
            )
        patches = torch.cat([self.without, self.related])[:, self.layout.prefix :]
        flat = principal_components(patches.flatten(0, 1), 3)
        low, high = flat.quantile(0.02, dim=0), flat.quantile(0.98, dim=0)
        shown = ((flat - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
        without, related = shown.reshape(2, -1, *self.layout.grid, 3)
        return without, related

    def plane(self) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
        """Each sample's mean token as a point: the first two principal components of both together."""
        flat = principal_components(torch.cat([self.without.mean(1), self.related.mean(1)]), 2)
        without, related = flat.chunk(2)
        return without, related


def features_with_and_without(model: nn.Module, images: Tensor, place: int | str = 0) -> FeaturePair:
    """What one insertion passes on, in the plain model and in mini-batch inference."""
    seen = infer_watched(model, images, place)
    return FeaturePair(seen.path, seen.without.cpu(), seen.related.cpu(), seen.layout, seen.side)


def principal_components(rows: Float[Tensor, "row dim"], count: int) -> Float[Tensor, "row {count}"]:
    """Centred rows in the basis of their largest principal directions; signs so that each basis vector's sum is >= 0.

    Where there are fewer directions than asked for, the rest is 0.
    """
    centred = rows.double() - rows.double().mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    basis = vectors.flip(1)[:, :count]
    basis = basis * torch.where(basis.sum(0) < 0, -1.0, 1.0)
    found = (centred @ basis).float()
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))
