"""The layer and its attention by their definitions, and the dropout masks of the kernels, computed by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from batchformer.kernels.random_bits import ROUNDS, Drop, Site
from batchformer.nn import reference_batch_attention
from batchformer.nn.encoder import BatchEncoderLayer

_WORD = 0xFFFFFFFF


def keep_mask(
    seed: Tensor, site: Site, drop: Drop, problems: int, rows: int, columns: int
) -> Bool[Tensor, "problems rows columns"]:
    """The dropout mask of the kernels.

    For `Site.ATTENTION` a problem is `position * heads + head`, a row the query's and a column the key's place in the
    batch, the latter counted from the start of its group; elsewhere there is one problem, and a row is one of (B x N).
    """
    per_word = 32 // drop.bits
    column = torch.arange(columns)
    word, row, problem = torch.meshgrid(column // per_word, torch.arange(rows), torch.arange(problems), indexing="ij")
    drawn = _philox(int(seed.item()), word // 4, row, problem, torch.full_like(word, int(site)))
    words = torch.stack(drawn)[column // per_word % 4, torch.arange(columns)]
    value = (words >> ((column % per_word) * drop.bits)[:, None, None]) & (2**drop.bits - 1)
    return (value >= drop.threshold).permute(2, 1, 0).to(seed.device)


def _philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32 (Salmon et al., SC 2011), 32-bit arithmetic inside int64."""
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        high_a, low_a = _multiply(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower word of a product of two words, without leaving int64."""
    low = factor * (x & 0xFFFF)
    middle = factor * (x >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


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
