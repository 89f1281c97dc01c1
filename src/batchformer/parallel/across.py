"""Two ways to attend over the rows of other processes from inside a layer, for features without many positions.

Each is called by `BatchAttention` in place of its own forward: (attention, x, valid) -> what it adds, (rows, N, C).
The rest of the layer stays with the rows of its process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.parallel.collect import collect_rows
from batchformer.parallel.peers import Peers
from batchformer.parallel.trade import to_positions, to_rows

if TYPE_CHECKING:
    from batchformer.nn.attention import BatchAttention


class GatherRows:
    """Every process gets the input x of all rows and makes keys and values of them itself; queries are its own rows.

    x and not keys and values: half the bytes, for one more matrix product.
    """

    def __init__(self, peers: Peers, valid: Bool[Tensor, "batch position"] | None, heads: int) -> None:
        self.peers = peers
        self.valid = None if valid is None else collect_rows(valid, peers)

    def __call__(
        self, attention: BatchAttention, x: Float[Tensor, "batch position dim"]
    ) -> Float[Tensor, "batch position dim"]:
        heads, dim = attention.heads, attention.dim
        weight, bias = attention.in_proj_weight, attention.in_proj_bias
        query = F.linear(x, weight[:dim], bias[:dim]).unflatten(-1, (heads, -1))
        both = F.linear(collect_rows(x, self.peers), weight[dim:], bias[dim:])
        key, value = (t.unflatten(-1, (heads, -1)) for t in both.chunk(2, dim=-1))
        if x.shape[0]:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
            dropout = attention.dropout if attention.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, self._allowed(attention.group_size, x.device), dropout)
            out = out.permute(2, 0, 1, 3)
        else:  # no row, no query; but its gradient (zeros) is awaited by the others
            out = query + value[:0]
        return attention.out_proj(out.flatten(2))

    def _allowed(self, group_size: int | None, device: torch.device) -> Bool[Tensor, "position 1 batch total"] | None:
        """Own rows may look at everything valid in their group of the global batch, and at themselves."""
        if self.valid is None and group_size is None:
            return None
        numbers = torch.arange(self.peers.total, device=device)
        own = numbers[self.peers.own, None]
        group = group_size or self.peers.total
        together = own // group == numbers // group
        if self.valid is None:
            return together[None, None]
        return ((self.valid.T[:, None, :] & together) | (own == numbers))[:, None]


class ExchangeHeads:
    """Each process attends over all rows in its share of the (position, head) pairs.

    Queries, keys and values travel there and the result back: four activations instead of one per process, but only a
    share of each to any one of them.
    """

    def __init__(self, peers: Peers, valid: Bool[Tensor, "batch position"] | None, heads: int) -> None:
        self.peers = peers
        self.valid = (
            None if valid is None else to_positions(valid.repeat_interleave(heads, 1)[..., None], peers)[..., 0]
        )

    def __call__(
        self, attention: BatchAttention, x: Float[Tensor, "batch position dim"]
    ) -> Float[Tensor, "batch position dim"]:
        rows, positions, dim = x.shape
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        # (rows, positions, 3, heads, width) -> one (query, key, value) per (position, head)
        pairs = qkv.unflatten(-1, (3, attention.heads, -1)).transpose(2, 3).flatten(3).flatten(1, 2)
        query, key, value = to_positions(pairs, self.peers).unsqueeze(2).chunk(3, dim=-1)
        out = attention.attend(query, key, value, self.valid) if value.numel() else value
        out = to_rows(out.flatten(2), positions * attention.heads, self.peers)
        return attention.out_proj(out.reshape(rows, positions, dim))
