"""Attention over the batch axis: the sequence is the mini-batch, one sequence per position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError

# Fused SDPA puts sequences on a grid axis of at most 65,535 blocks.
_SEQUENCES_PER_CALL = 65_535


def reference_batch_attention(
    query: Float[Tensor, "batch position heads width"],
    key: Float[Tensor, "batch position heads width"],
    value: Float[Tensor, "batch position heads width"],
    group_size: int | None = None,
) -> Float[Tensor, "batch position heads width"]:
    """The definition, slow and obvious: softmax(q_i . k_j / sqrt(width)) over the samples j of i's group."""
    batch, positions, heads, width = query.shape
    size = group_size or batch
    out = torch.empty_like(value)
    for n in range(positions):
        for h in range(heads):
            for start in range(0, batch, size):
                rows = slice(start, min(start + size, batch))
                scores = query[rows, n, h] @ key[rows, n, h].T / width**0.5
                out[rows, n, h] = scores.softmax(dim=-1) @ value[rows, n, h]
    return out


def batch_attention(
    query: Float[Tensor, "batch position heads width"],
    key: Float[Tensor, "batch position heads width"],
    value: Float[Tensor, "batch position heads width"],
    dropout: float = 0.0,
    group_size: int | None = None,
) -> Float[Tensor, "batch position heads width"]:
    """`reference_batch_attention` by torch's fused kernels, with dropout on the attention weights."""
    batch = query.shape[0]
    if group_size is None or group_size >= batch:
        return _attend(query, key, value, dropout)
    # Whole groups first, in one call; the last, smaller one by itself.
    whole = batch - batch % group_size
    parts = [_attend_in_groups(query[:whole], key[:whole], value[:whole], dropout, group_size)]
    if whole < batch:
        parts.append(_attend(query[whole:], key[whole:], value[whole:], dropout))
    return torch.cat(parts)


def _attend_in_groups(query: Tensor, key: Tensor, value: Tensor, dropout: float, size: int) -> Tensor:
    batch, positions, heads, width = query.shape
    # Samples of one group become the sequence; the groups become further positions.
    q, k, v = (
        t.reshape(batch // size, size, positions, heads, width)
        .transpose(0, 1)
        .reshape(size, batch // size * positions, heads, width)
        for t in (query, key, value)
    )
    out = _attend(q, k, v, dropout).reshape(size, batch // size, positions, heads, width)
    return out.transpose(0, 1).reshape(batch, positions, heads, width)


def _attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    # (batch, position, heads, width) -> (position, heads, batch, width): what SDPA calls (N, H, L, E).
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    per_call = max(1, _SEQUENCES_PER_CALL // q.shape[1])
    if q.shape[0] <= per_call:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    else:
        pieces = zip(q.split(per_call), k.split(per_call), v.split(per_call), strict=True)
        out = torch.cat([F.scaled_dot_product_attention(*piece, dropout_p=dropout) for piece in pieces])
    return out.permute(2, 0, 1, 3)


class BatchAttention(nn.Module):
    """Multi-head self-attention over the samples of a mini-batch (the MSA of BatchFormer's eq. 1).

    Parameters have the names, shapes and initial values of `torch.nn.MultiheadAttention`.
    """

    def __init__(self, dim: int, heads: int = 4, dropout: float = 0.0, group_size: int | None = None) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise UserError(
                f"dim={dim} does not divide by heads={heads}: choose a number of heads among "
                f"{[h for h in range(1, min(dim, 64) + 1) if dim % h == 0]}."
            )
        if group_size is not None and group_size < 1:
            raise UserError(f"group_size={group_size} must be 1 or more (or None for the whole batch).")
        self.dim, self.heads, self.dropout, self.group_size = dim, heads, dropout, group_size
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Float[Tensor, "batch position dim"]) -> Float[Tensor, "batch position dim"]:
        batch, positions, dim = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = (t.reshape(batch, positions, self.heads, -1) for t in qkv.chunk(3, dim=-1))
        out = batch_attention(query, key, value, self.dropout if self.training else 0.0, self.group_size)
        return self.out_proj(out.reshape(batch, positions, dim))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, dropout={self.dropout}, group_size={self.group_size}"
