"""Attention over the batch axis: the sequence is the mini-batch, one sequence per position."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from batchformer.errors import UserError, check_choice
from batchformer.kernels.backend import BACKENDS, Backend, Choice, choose_backend, why_not_traceable
from batchformer.nn.inputs import autocasts, is_whole

# Fused SDPA puts sequences on a grid axis of at most 65,535 blocks.
_SEQUENCES_PER_CALL = 65_535


def reference_batch_attention(
    query: Float[Tensor, "batch position heads width"],
    key: Float[Tensor, "batch position heads width"],
    value: Float[Tensor, "batch position heads width"],
    group_size: int | None = None,
    valid: Bool[Tensor, "batch position"] | None = None,
    factor: Float[Tensor, "position heads batch batch"] | None = None,
) -> Float[Tensor, "batch position heads width"]:
    """The definition by loops: softmax(q_i . k_j / sqrt(width)) over the samples j of i's group.

    With `valid`, only over the samples j that are valid at the position, and i itself. `factor` multiplies the weights
    afterwards: what dropout leaves of them, 0 or 1 / (1 - p).
    """
    batch, positions, heads, width = query.shape
    size = group_size or batch
    out = torch.empty_like(value)
    for n in range(positions):
        for h in range(heads):
            for i in range(batch):
                group = range(i - i % size, min(i - i % size + size, batch))
                seen = [j for j in group if valid is None or j == i or valid[j, n]]
                scores = key[seen, n, h] @ query[i, n, h] / width**0.5
                weights = scores.softmax(dim=0) * (1.0 if factor is None else factor[n, h, i, seen])
                out[i, n, h] = weights @ value[seen, n, h]
    return out


def batch_attention(
    query: Float[Tensor, "batch position heads width"],
    key: Float[Tensor, "batch position heads width"],
    value: Float[Tensor, "batch position heads width"],
    dropout: float = 0.0,
    group_size: int | None = None,
    valid: Bool[Tensor, "batch position"] | None = None,
) -> Float[Tensor, "batch position heads width"]:
    """`reference_batch_attention` by torch's fused kernels, with dropout on the attention weights."""
    batch = query.shape[0]
    if group_size is None or group_size >= batch:
        return _attend(query, key, value, valid, dropout)
    # Whole groups first, in one call; the last, smaller one by itself.
    whole = batch - batch % group_size
    grouped = [_into_groups(t, group_size) for t in (query[:whole], key[:whole], value[:whole])]
    mask = None if valid is None else _into_groups(valid[:whole], group_size)
    parts = [_out_of_groups(_attend(grouped[0], grouped[1], grouped[2], mask, dropout), whole)]
    if whole < batch:
        rest = None if valid is None else valid[whole:]
        parts.append(_attend(query[whole:], key[whole:], value[whole:], rest, dropout))
    return torch.cat(parts)


def _into_groups(x: Tensor, size: int) -> Tensor:
    """(groups x size, position, ...) -> (size, groups x position, ...): each group a batch at positions of its own."""
    groups, rest = x.shape[0] // size, x.shape[2:]
    return x.reshape(groups, size, x.shape[1], *rest).transpose(0, 1).reshape(size, groups * x.shape[1], *rest)


def _out_of_groups(x: Tensor, batch: int) -> Tensor:
    size, rest = x.shape[0], x.shape[2:]
    positions = x.shape[1] * size // batch
    return x.reshape(size, batch // size, positions, *rest).transpose(0, 1).reshape(batch, positions, *rest)


def _attend(query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, dropout: float) -> Tensor:
    # (batch, position, heads, width) -> (position, heads, batch, width): what SDPA calls (N, H, L, E).
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    mask = None
    if valid is not None:  # every valid sample may be attended to, and each by itself: no softmax is empty
        itself = torch.eye(valid.shape[0], dtype=torch.bool, device=valid.device)
        mask = (valid.T[:, None, :] | itself)[:, None]
    per_call = max(1, _SEQUENCES_PER_CALL // q.shape[1])
    pieces = []
    for start in range(0, q.shape[0], per_call):
        part = slice(start, start + per_call)
        allowed = None if mask is None else mask[part]
        pieces.append(F.scaled_dot_product_attention(q[part], k[part], v[part], allowed, dropout))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).permute(2, 0, 1, 3)


class BatchAttention(nn.Module):
    """Multi-head self-attention over the samples of a mini-batch (the MSA of BatchFormer's eq. 1; V2's eq. 1).

    V2 writes softmax(Q K^T / sqrt(C)) V for a single head; with several heads each has a softmax and the root of
    its own width, as in the stock layer of the released code.

    Parameters have the names, shapes and initial values of `torch.nn.MultiheadAttention`. `backend` says how it is
    computed: "triton" (our kernels), "sdpa" (torch's), "reference" (the definition, by loops), or "auto", the first of
    them that can; `backend_used` tells which.
    """

    def __init__(
        self, dim: int, heads: int = 4, dropout: float = 0.0, group_size: int | None = None, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        check_choice("backend", backend, BACKENDS)
        if not is_whole(dim):
            raise UserError(f"dim={dim!r} must be the width of the features, a whole number, 1 or more.")
        if not is_whole(heads) or dim % heads:
            raise UserError(
                f"dim={dim} is not divisible by heads={heads!r}: choose heads from "
                f"{[h for h in range(1, min(dim, 64) + 1) if dim % h == 0]}."
            )
        if group_size is not None and not is_whole(group_size):
            raise UserError(f"group_size={group_size!r} must be 1 sample or more (or None for the whole batch).")
        self.dim, self.heads, self.dropout, self.group_size = dim, heads, dropout, group_size
        self.backend: Backend = backend
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial values of `torch.nn.MultiheadAttention`; called again where weights are made late (meta device).

        A caller that resets all modules resets `out_proj` afterwards: its bias then starts as that of a Linear.
        """
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.in_proj_bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        x: Float[Tensor, "batch position dim"],
        valid: Bool[Tensor, "batch position"] | None = None,
        across: Any = None,
    ) -> Float[Tensor, "batch position dim"]:
        """`across` (`batchformer.parallel.relate`) attends over the rows of other processes as well."""
        if across is not None:
            return across(self, x)
        batch, positions, dim = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        if self.backend_used(qkv).backend == "triton":
            from batchformer.kernels import dispatch

            dropout = self.dropout if self.training else 0.0
            return self.out_proj(dispatch.batch_attention(qkv, self.heads, dropout, self.group_size, valid))
        query, key, value = (t.reshape(batch, positions, self.heads, -1) for t in qkv.chunk(3, dim=-1))
        return self.out_proj(self.attend(query, key, value, valid).reshape(batch, positions, dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
        """`batch_attention` with the dropout, groups and backend of this module, for any number of heads."""
        dropout = self.dropout if self.training else 0.0
        if self.backend == "reference":
            batch, positions, heads, _ = query.shape
            factor = F.dropout(query.new_ones(positions, heads, batch, batch), dropout) if dropout else None
            return reference_batch_attention(query, key, value, self.group_size, valid, factor)
        return batch_attention(query, key, value, dropout, self.group_size, valid)

    def backend_used(self, x: Float[Tensor, "batch position _"]) -> Choice:
        """The backend `forward` would use for this input under the current autocast, and why."""
        dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
        choice = choose_backend(self.backend, x.device, dtype, self.dim, self.heads)
        if choice.backend == "triton" and not x.numel():
            return Choice("sdpa", "the input is empty")
        if choice.backend == "triton" and self.backend == "auto" and (obstacle := why_not_traceable(x)) is not None:
            return Choice("sdpa", obstacle)
        if self.backend == "triton" and choice.backend != "triton":
            raise UserError(
                f'backend="triton" cannot run here: {choice.why}. With backend="auto" torch\'s kernels would.'
            )
        return choice

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, dropout={self.dropout}, group_size={self.group_size}"
