"""Which samples look at which, at every position: the arrays behind V2's Figs. 5 and 10."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.analysis.attention_weights import attention_in_pieces, group_sizes
from batchformer.analysis.mini_batch import infer_watched, whole_number
from batchformer.errors import UserError
from batchformer.nn.token_layout import TokenLayout


@dataclass
class AttentionOverBatch:
    """`weights[n, i, j]`: how much sample i looks at sample j at position n; sums to 1 over j. On the CPU."""

    path: str
    weights: Float[Tensor, "position batch batch"]
    layout: TokenLayout
    group_size: int | None = None
    side: str = "after"

    def at(self, position: int | tuple[int, int]) -> Float[Tensor, "batch batch"]:
        """Who looks (rows) at whom (columns) at one position: its number, or (row, column) of a patch."""
        return self.weights[self.layout.index(position)]

    def factors(self, position: int | tuple[int, int]) -> Float[Tensor, "batch batch"]:
        """The same in multiples of uniform attention over the samples that can be seen."""
        return self.at(position) * group_sizes(self.weights.shape[-1], self.group_size)[:, None]

    def mass(self) -> Float[Tensor, "batch position"]:
        """How much each position of a sample is looked at by the *others*; 1 is what it gets from uniform attention.

        At one position the samples compete: what one image gets another lacks (V2, D.3: background is suppressed
        where other images have objects).
        """
        batch = self.weights.shape[-1]
        others = self.weights * (1 - torch.eye(batch))
        seen = group_sizes(batch, self.group_size).float()
        uniform = (seen - 1) / seen
        return (others.sum(dim=1) / uniform.clamp_min(1e-12)).T

    def mass_map(self) -> Float[Tensor, "batch row column"]:
        """`mass` of the patches as maps over the images."""
        if self.layout.grid is None:
            raise UserError(f"the {self.layout.positions} positions {self.side} {self.path!r} are no grid: use mass().")
        return self.mass()[:, self.layout.prefix :].reshape(-1, *self.layout.grid)


def attention_over_batch(
    model: nn.Module, images: Tensor, place: int | str = 0, *, layer: int = -1, head: int | None = None
) -> AttentionOverBatch:
    """The attention of one insertion over a batch of images, in mini-batch inference (no dropout, one stream).

    V2 shows "the attention of each slot on other slots along with the same position"; it does not say how heads are
    joined. Here: their mean, or one of them.

    Args:
        place: number of the insertion in the order of the model, or its path.
        layer: of the module's encoder layers, where it has several.
        head: one head instead of the mean.
    """
    seen = infer_watched(model, images, place, layer)
    if head is not None and not 0 <= whole_number("head", head) < seen.attention.heads:
        raise UserError(f"head={head}: there are {seen.attention.heads}, 0 the first.")
    with torch.no_grad():
        weights = attention_in_pieces(seen.attention, seen.entered, head=None if head is None else int(head))
    return AttentionOverBatch(seen.path, weights, seen.layout, seen.attention.group_size, seen.side)
