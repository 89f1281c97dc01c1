"""Entry points of the kernels: attention alone, and the whole post-norm layer; eager or compiled."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from batchformer.kernels import operators
from batchformer.kernels.attention import AttentionNode
from batchformer.kernels.blocks import LayerSettings, LayerWeights
from batchformer.kernels.layer import FastLayer, LeanLayer
from batchformer.kernels.random_bits import draw_seed

_NO_CONTEXT = nullcontext()


def batch_attention(
    qkv: Float[Tensor, "batch position 3*dim"],
    heads: int,
    dropout: float = 0.0,
    group_size: int | None = None,
    valid: Bool[Tensor, "batch position"] | None = None,
    seed: Tensor | None = None,
) -> Float[Tensor, "batch position dim"]:
    """Batch attention on the output of the input projection; a `seed` is drawn where none is given."""
    seed = (draw_seed(qkv.device) if seed is None else seed) if dropout > 0.0 else None
    valid = None if valid is None else valid.contiguous()
    if torch.compiler.is_compiling():
        return operators.attention_operator(qkv, valid, seed, heads, group_size or 0, dropout)[0]
    with _current_device(qkv):
        return AttentionNode.apply(qkv, valid, seed, heads, group_size, dropout)


def encoder_layer(
    x: Float[Tensor, "batch position dim"],
    weights: LayerWeights,
    settings: LayerSettings,
    valid: Bool[Tensor, "batch position"] | None = None,
    is_lean: bool = False,
) -> Float[Tensor, "batch position dim"]:
    """The post-norm layer of the papers, fused; the input may be of another type than the matrix products."""
    seed = draw_seed(x.device) if settings.dropout > 0.0 else None
    valid = None if valid is None else valid.contiguous()
    if torch.compiler.is_compiling():
        return operators.compiled_layer(x, weights, settings, valid, seed, is_lean)
    with _current_device(x):
        return (LeanLayer if is_lean else FastLayer).apply(x, valid, seed, settings, *weights)


def _current_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of `x` the current one, on which Triton launches, where it is not already."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return _NO_CONTEXT
