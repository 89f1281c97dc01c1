"""The attention weights of one query over all tokens, from the input of an attention layer: no N x N matrix.

A layer is assumed to be `softmax(q k^T / sqrt(d) + bias) v` with its weights under the names that timm, transformers or
torch give them. Query and keys are recomputed for that one row (of a twelve-block ViT a few thousandths of a step), so
the layer's own fused attention is unchanged.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.nn.inputs import has_hooks

Query = Literal["class", "mean", "all"]
#: cosines and sines of the tokens behind the prefix, (tokens, width of a head) each; the halves of a head are turned
HalfRotation = tuple[Tensor, Tensor]
#: names of the linear maps to queries and keys: (queries, keys, how many parts the second holds with the keys first)
_SEPARATE = (("q", "k", 1), ("q_proj", "k_proj", 1), ("query", "key", 1), ("q", "kv", 2))


def has_projections(layer: nn.Module) -> bool:
    """Whether queries and keys can be computed from the layer's weights."""
    return heads_of(layer) is not None and (
        (isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None)
        or isinstance(getattr(layer, "qkv", None), nn.Module)
        or _separate(layer) is not None
    )


def heads_of(layer: nn.Module) -> int | None:
    heads = getattr(layer, "num_heads", None) or getattr(layer, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def attention_rows(
    layer: nn.Module,
    tokens: Float[Tensor, "batch tokens width"],
    query: Query,
    prefix: int = 0,
    *,
    keys: Float[Tensor, "batch keys width"] | None = None,
    bias: Float[Tensor, "*leading tokens keys"] | None = None,
    rope: Tensor | HalfRotation | None = None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Attention weights of every head, in float32 whatever the precision around.

    Args:
        tokens: input of the layer; the first `prefix` ones are no part of the image (class token, registers).
        query: the query of the first token ("class"), the mean of the image tokens' queries ("mean"), or every token's
            ("all", which is N x N).
        keys: other tokens that the keys are computed from: reduced ones, or those a pooling probe attends to.
        bias: what the layer adds to the logits.
        rope: rotary embedding of the tokens behind the prefix: timm's tensor, or cosines and sines (transformers).
    """
    start = prefix if query == "mean" else 0
    query_tokens = tokens[:, :1] if query == "class" else tokens[:, start:]
    if query == "mean" and rope is None and isinstance(getattr(layer, "q_norm", None), nn.Identity | None):
        query_tokens = query_tokens.mean(
            1, keepdim=True
        )  # the mean of the queries is the query of the mean: one row to project
    q = _rotated(layer, project(layer, query_tokens, "q"), rope, prefix - start)
    k = _rotated(layer, project(layer, tokens if keys is None else keys, "k"), rope, prefix)
    if query == "mean":
        q = q.mean(2, keepdim=True)
    if k.shape[1] != q.shape[1]:  # grouped queries: several heads read the same keys
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    with _full_precision(q.device.type):
        logits = (q.float() * _scale(layer, q.shape[-1])) @ k.float().transpose(-2, -1)
        if bias is not None:
            bias = bias[..., :1, :].float() if query == "class" else bias.float()
            logits = logits + (bias[..., start:, :].mean(-2, keepdim=True) if query == "mean" else bias)
        return logits.softmax(-1)


def _full_precision(device: str) -> AbstractContextManager[Any]:
    # Not by torch.amp.is_autocast_available: torch 2.11 cannot compile that.
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def project(layer: nn.Module, x: Tensor, which: str) -> Tensor:
    """Queries, keys or values of x, (batch, heads, tokens, width of a head), normalised where the layer does."""
    flat = _linear(layer, x, which)
    heads: Any = heads_of(layer)
    if which != "q":
        heads = getattr(layer, "num_kv_heads", heads)
    split = flat.unflatten(-1, (heads, -1)).transpose(1, 2)
    norm = getattr(layer, f"{which}_norm", None)
    return split if norm is None else norm(split)


def _linear(layer: Any, x: Tensor, which: str) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return _part(x, layer.in_proj_weight, layer.in_proj_bias, "qkv".index(which), 3)
    if isinstance(getattr(layer, "qkv", None), nn.Module):
        bias = getattr(layer, f"{which}_bias", None)  # BEiT and EVA keep the biases beside the linear map
        part = _part_of(layer.qkv, x, "qkv".index(which), 3)
        return part if bias is None else part + bias.to(part.dtype)
    queries, keys, parts = cast(tuple[str, str, int], _separate(layer))
    if which == "q":
        return _part_of(getattr(layer, queries), x, 0, 1)
    if which == "k" or parts == 2:
        return _part_of(getattr(layer, keys), x, "kv".index(which), parts)
    return _part_of(getattr(layer, "value" if keys == "key" else keys.replace("k", "v", 1)), x, 0, 1)


def _separate(layer: nn.Module) -> tuple[str, str, int] | None:
    for q, k, parts in _SEPARATE:
        if isinstance(getattr(layer, q, None), nn.Module) and isinstance(getattr(layer, k, None), nn.Module):
            return q, k, parts
    return None


def _part_of(linear: nn.Module, x: Tensor, index: int, parts: int) -> Tensor:
    if type(linear) is nn.Linear and not has_hooks(linear):
        return _part(x, linear.weight, linear.bias, index, parts)
    return linear(x).chunk(parts, dim=-1)[index]  # a wrapper (LoRA, quantised): call it


def _part(x: Tensor, weight: Tensor, bias: Tensor | None, index: int, parts: int) -> Tensor:
    """Apply one of the linear maps that are stacked in one weight."""
    size = weight.shape[0] // parts
    rows = slice(index * size, (index + 1) * size)
    return F.linear(x, weight[rows], None if bias is None else bias[rows])


def _rotated(layer: Any, x: Tensor, rope: Tensor | HalfRotation | None, prefix: int) -> Tensor:
    if rope is None or prefix >= x.shape[2]:
        return x
    if isinstance(rope, tuple):
        turned = x[:, :, prefix:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]
        return torch.cat([x[:, :, :prefix], turned.to(x.dtype)], dim=2)
    from timm.layers import apply_rot_embed_cat  # a layer that is given rotary embeddings this way is timm's

    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(layer, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated.to(x.dtype)], dim=2)


def _scale(layer: nn.Module, head_width: int) -> float:
    scale = getattr(layer, "scale", getattr(layer, "scaling", None))
    return scale if isinstance(scale, float) else head_width**-0.5
