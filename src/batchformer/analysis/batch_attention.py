"""The attention between the samples of a batch, at every position: the arrays behind V2's Figs. 5 and 10."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.analysis.recorded_forward import record_inference, whole_number
from batchformer.errors import UserError
from batchformer.nn import BatchAttention
from batchformer.nn.token_layout import TokenLayout

_FLOATS_AT_ONCE = 2**26


@dataclass
class AttentionOverBatch:
    """`weights[n, i, j]`: attention of sample i to sample j at position n; sums to 1 over j. On the CPU."""

    path: str
    weights: Float[Tensor, "position batch batch"]
    layout: TokenLayout
    group_size: int | None = None
    side: str = "after"

    def at(self, position: int | tuple[int, int]) -> Float[Tensor, "batch batch"]:
        """Attention of each sample (rows) to each sample (columns) at one position: its number, or (row, column)."""
        return self.weights[self.layout.index(position)]

    def factors(self, position: int | tuple[int, int]) -> Float[Tensor, "batch batch"]:
        """`at` in multiples of uniform attention over the visible samples."""
        return self.at(position) * group_sizes(self.weights.shape[-1], self.group_size)[:, None]

    def mass(self) -> Float[Tensor, "batch position"]:
        """Attention of the *other* samples to each position of a sample; 1 is what uniform attention gives.

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
    model: nn.Module,
    images: Tensor,
    place: int | str = 0,
    *,
    layer: int = -1,
    head: int | None = None,
    **inputs: Tensor,
) -> AttentionOverBatch:
    """The attention of one insertion over a batch of images, in mini-batch inference (no dropout, one stream).

    V2 shows "the attention of each slot on other slots along with the same position"; it does not say how heads are
    joined. Here: their mean, or one of them.

    Args:
        place: number of the insertion in the order of the model, or its path.
        layer: of the module's encoder layers, where it has several.
        head: one head instead of the mean.
        inputs: further inputs of the model, by name.
    """
    seen = record_inference(model, images, place, layer, level=None, **inputs)
    if head is not None and not 0 <= whole_number("head", head) < seen.attention.heads:
        raise UserError(f"head={head}: there are {seen.attention.heads}, counted from 0.")
    with torch.no_grad():
        weights = attention_in_chunks(seen.attention, seen.entered, head=None if head is None else int(head))
    return AttentionOverBatch(seen.path, weights, seen.layout, seen.attention.group_size, seen.side)


@torch.no_grad()
def attention_over_scenes(
    model: nn.Module,
    pixel_values: Float[Tensor, "batch 3 height width"],
    pixel_mask: Tensor | None = None,
    *,
    place: int | str = 0,
    level: int = 0,
    layer: int = -1,
) -> AttentionOverBatch:
    """Batch attention of an attached detector in mini-batch inference, over the cells of one of its feature maps.

    The paper shows the largest map of Deformable DETR in the first encoder layer: `level=0`, `place=0`. The cells are
    those of the padded canvas; the mean over the heads.
    """
    seen = record_inference(model, pixel_values, place, layer, pixel_mask=pixel_mask, level=level)
    weights = attention_in_chunks(seen.attention, seen.entered, seen.valid)
    return AttentionOverBatch(seen.path, weights, seen.layout, seen.attention.group_size)


def inside_images(
    grid: tuple[int, int], canvas: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Bool[Tensor, "batch row column"]:
    """The cells whose middle is image, not padding."""
    y, x = cell_centres(grid, canvas)
    return torch.stack([(y < height)[:, None] & (x < width)[None] for height, width in sizes])


def cell_centres(grid: tuple[int, int], canvas: Sequence[int]) -> tuple[Tensor, Tensor]:
    y, x = ((torch.arange(cells) + 0.5) * side / cells for cells, side in zip(grid, canvas, strict=True))
    return y, x


def attention_weights(
    attention: BatchAttention,
    x: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None = None,
) -> Float[Tensor, "position head batch batch"]:
    """Attention of sample i (third axis) to sample j (last axis) at each position, before dropout; rows sum to 1."""
    batch, positions, _ = x.shape
    dim = attention.dim
    projected = F.linear(x, attention.in_proj_weight[: 2 * dim], attention.in_proj_bias[: 2 * dim])
    query, key = (t.reshape(batch, positions, attention.heads, -1).permute(1, 2, 0, 3) for t in projected.chunk(2, -1))
    with torch.autocast(x.device.type, enabled=False):
        scores = query.float() @ key.float().mT / query.shape[-1] ** 0.5
        return scores.masked_fill(~_visible(attention, batch, valid, x.device), float("-inf")).softmax(dim=-1)


def attention_in_chunks(
    attention: BatchAttention,
    x: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None = None,
    head: int | None = None,
) -> Float[Tensor, "position batch batch"]:
    """`attention_weights` on the CPU, their mean over the heads or one head; some positions at a time on the device."""
    at_once = max(1, _FLOATS_AT_ONCE // (len(x) ** 2 * attention.heads))
    pieces = []
    for start in range(0, x.shape[1], at_once):
        part = slice(start, start + at_once)
        weights = attention_weights(attention, x[:, part], None if valid is None else valid[:, part])
        pieces.append((weights.mean(1) if head is None else weights[:, head]).float().cpu())
    return torch.cat(pieces)


def relative_entropy(
    weights: Float[Tensor, "position head batch batch"], group_size: int | None = None
) -> Float[Tensor, " head"]:
    """Entropy of each row over log(samples it can see), averaged: 1 is uniform, 0 is one sample only."""
    seen = group_sizes(weights.shape[-1], group_size).to(weights.device)
    most = seen.clamp_min(2).log()  # alone in its group: entropy 0, whatever it is divided by
    return (torch.special.entr(weights).sum(-1) / most).mean(dim=(0, 2))


def on_itself(weights: Float[Tensor, "position head batch batch"]) -> Float[Tensor, " head"]:
    """Attention of a sample to itself, averaged; 1 in a module that ignores the others."""
    return weights.diagonal(dim1=-2, dim2=-1).mean(dim=(0, 2))


def group_sizes(batch: int, group_size: int | None) -> Tensor:
    """How many samples each sample of the batch can see, itself included."""
    size = min(group_size or batch, batch)
    start = torch.arange(batch) // size * size
    return torch.clamp(start + size, max=batch) - start


def _visible(attention: BatchAttention, batch: int, valid: Tensor | None, device: torch.device) -> Tensor:
    group = torch.arange(batch, device=device) // (attention.group_size or batch)
    same_group = group[:, None] == group
    if valid is None:
        return same_group
    itself = torch.eye(batch, dtype=torch.bool, device=device)
    return same_group & (valid.T[:, None, None, :] | itself)
