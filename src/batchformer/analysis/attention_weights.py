"""The attention of a module over the batch, recomputed: the fused kernels of `nn` never hold it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.nn import BatchAttention

_FLOATS_AT_ONCE = 2**26


def attention_weights(
    attention: BatchAttention,
    x: Float[Tensor, "batch position dim"],
    valid: Bool[Tensor, "batch position"] | None = None,
) -> Float[Tensor, "position head batch batch"]:
    """How much sample i (third axis) looks at sample j (last axis) at each position, before dropout; rows sum to 1."""
    batch, positions, _ = x.shape
    dim = attention.dim
    projected = F.linear(x, attention.in_proj_weight[: 2 * dim], attention.in_proj_bias[: 2 * dim])
    query, key = (t.reshape(batch, positions, attention.heads, -1).permute(1, 2, 0, 3) for t in projected.chunk(2, -1))
    with torch.autocast(x.device.type, enabled=False):
        scores = query.float() @ key.float().mT / query.shape[-1] ** 0.5
        return scores.masked_fill(~_visible(attention, batch, valid, x.device), float("-inf")).softmax(dim=-1)


def attention_in_pieces(
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
    """Entropy of each row over log(samples it can see), averaged: 1 looks at all alike, 0 at one sample."""
    seen = group_sizes(weights.shape[-1], group_size).to(weights.device)
    most = seen.clamp_min(2).log()  # alone in its group: entropy 0, whatever it is divided by
    return (torch.special.entr(weights).sum(-1) / most).mean(dim=(0, 2))


def on_itself(weights: Float[Tensor, "position head batch batch"]) -> Float[Tensor, " head"]:
    """Mass that a sample leaves on itself, averaged. A module without any use for the others would have 1."""
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
