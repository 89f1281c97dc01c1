"""The two doors into the kernels: attention alone, and the whole post-norm layer; eager or compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.kernels import host, operators
from batchformer.kernels.functions import Attention, LayerSettings, LayerWeights
from batchformer.kernels.layer import fast_layer
from batchformer.kernels.lean import lean_layer
from batchformer.kernels.random_bits import draw_seed


def batch_attention(
    qkv: Float[Tensor, "batch position 3*dim"],
    heads: int,
    dropout: float = 0.0,
    group_size: int | None = None,
    valid: Bool[Tensor, "batch position"] | None = None,
    seed: Tensor | None = None,
) -> Float[Tensor, "batch position dim"]:
    """`batchformer.nn.batch_attention` of what the input projection gives; `seed` is drawn where it is not given."""
    seed = (draw_seed(qkv.device) if seed is None else seed) if dropout > 0.0 else None
    valid = None if valid is None else valid.contiguous()
    if torch.compiler.is_compiling():
        return operators.attention_operator(qkv, valid, seed, heads, group_size or 0, dropout)[0]
    with _on(qkv):
        return Attention.apply(qkv, valid, seed, heads, group_size, dropout)


def encoder_layer(
    x: Float[Tensor, "batch position dim"],
    weights: LayerWeights,
    settings: LayerSettings,
    valid: Bool[Tensor, "batch position"] | None = None,
    is_lean: bool = False,
    seed: Tensor | None = None,
) -> Float[Tensor, "batch position dim"]:
    """The post-norm layer of the papers, fused; the input may be of another type than the matrix products."""
    valid = None if valid is None else valid.contiguous()
    is_compiling = torch.compiler.is_compiling()
    with nullcontext() if is_compiling else _on(x):
        made = None if is_compiling or seed is not None else host.run_layer(x, weights, settings, valid, is_lean)
        if made is not None:
            return made
        seed = (draw_seed(x.device) if seed is None else seed) if settings.dropout > 0.0 else None
        if is_compiling:
            return operators.compiled_layer(x, weights, settings, valid, seed, is_lean)
        return (lean_layer if is_lean else fast_layer)(x, weights, settings, valid, seed)


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, torch on that of the tensor: make them one, where they are not."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()
