"""The layer and its attention by their definitions, with the dropout masks of the kernels as given factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchformer.kernels.random_bits import Drop, Site, keep_mask
from batchformer.nn import reference_batch_attention
from batchformer.nn.encoder import BatchEncoderLayer


def attention_factor(seed: Tensor, drop: Drop, shape: tuple[int, int, int], group: int) -> Tensor | None:
    """(position, heads, batch, batch): what dropout leaves of a weight; columns are counted inside a group."""
    if not drop.bits:
        return None
    batch, positions, heads = shape
    keep = keep_mask(seed, Site.ATTENTION, drop, positions * heads, batch, group)
    inside = torch.arange(batch, device=keep.device) % group
    return keep[..., inside].reshape(positions, heads, batch, batch).double() * drop.scale


def attention(
    qkv: Tensor, heads: int, seed: Tensor, dropout: float = 0.0, group_size: int | None = None,
    valid: Tensor | None = None,
) -> Tensor:  # fmt: skip
    batch, positions, _ = qkv.shape
    query, key, value = (t.reshape(batch, positions, heads, -1) for t in qkv.chunk(3, dim=-1))
    factor = attention_factor(seed, Drop.of(dropout), (batch, positions, heads), min(group_size or batch, batch))
    return reference_batch_attention(query, key, value, group_size, valid, factor).flatten(2)


def layer(module: BatchEncoderLayer, x: Tensor, seed: Tensor, valid: Tensor | None = None) -> Tensor:
    """Eq. 1 and 2 of the paper, in the type of `module`."""
    drop, inner = Drop.of(module.dropout), module.self_attn

    def dropped(t: Tensor, site: Site) -> Tensor:
        if not drop.bits:
            return t
        keep = keep_mask(seed, site, drop, 1, t.shape[0] * t.shape[1], t.shape[2])
        return t * keep.reshape(t.shape) * drop.scale

    qkv = F.linear(x, inner.in_proj_weight, inner.in_proj_bias)
    mixed = attention(qkv, inner.heads, seed, module.dropout, inner.group_size, valid)
    x = module.norm1(x + dropped(inner.out_proj(mixed), Site.ATTENDED))
    hidden = dropped(module.linear1(x).relu(), Site.HIDDEN)
    return module.norm2(x + dropped(module.linear2(hidden), Site.MLP))
