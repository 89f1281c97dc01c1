"""Whether a layer computes what is read off it: tried once on a few random tokens, before anything trains by it.

Names of weights do not tell it all: attention between channels or inside windows may have the very same ones.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchformer.mix.class_attention import attention_rows, values_of
from batchformer.mix.class_attention_readers import names_by_position, rotates_halves

# Where a layer cannot be run alone (weights sharded or quantised), those of these files are known to be right.
_KNOWN = (
    "torch.nn.modules.activation",
    "timm.layers.attention",
    "timm.models.vision_transformer",
    "timm.models.eva",
    "timm.models.beit",
    "timm.models.cait",
    "transformers.models.",
)
Attending = Literal["all", "class"]
_GRID = (17, 3)  # larger than the windows that attention is cut into


@torch.no_grad()
def attending_tokens(layer: nn.Module) -> Attending | None:
    """Which tokens get softmax(q k^T) v, projected, as the weights say: all, or the first alone (class attention).

    None where the layer computes something else.
    """
    named: Attending = "class" if type(layer).__name__ in ("ClassAttn", "ClassAttention") else "all"
    if any(weight.is_meta for weight in layer.parameters()):
        return named  # nothing to compare yet
    try:
        # A copy in float64, so that neither the precision of the model nor its device blurs the comparison.
        twin: Any = copy.deepcopy(layer).to("cpu", torch.float64).eval()
        tokens = _random_tokens(twin)
        given = tokens if getattr(twin, "batch_first", True) else tokens.transpose(0, 1)
        with torch.device("cpu"):  # whatever torch's default is
            own = type(twin).forward(twin, given, **_beside(twin, given))
        own = own[0] if isinstance(own, tuple) else own
        own = own if given is tokens else own.transpose(0, 1)
        expected = _attend(twin, tokens)[:, : own.shape[1]]
        if own.shape != expected.shape or (own - expected).norm() > 0.01 * expected.norm():
            return None
        return "class" if own.shape[1] == 1 else "all"
    except Exception:  # another person's layer, given what it may not take
        return named if type(layer).__module__.startswith(_KNOWN) else None


def _random_tokens(layer: Any) -> Tensor:
    index = getattr(layer, "relative_position_index", None)
    count = len(index) if isinstance(index, Tensor) and index.ndim == 2 else _GRID[0] * _GRID[1]
    linear: Any = next((one for name in ("qkv", "q", "q_proj", "query") if (one := getattr(layer, name, None))), None)
    width = layer.embed_dim if linear is None else linear.in_features
    generator = torch.Generator("cpu").manual_seed(0)
    # far apart, so that fresh weights too attend to some tokens more than to others
    return 10 * torch.randn(1, count, width, generator=generator, dtype=torch.float64, device="cpu")


def _beside(layer: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """What the layer asks for beside its tokens, made so that it changes nothing."""
    names = names_by_position(layer)[1:]
    if rotates_halves(layer):
        turn = torch.ones_like(tokens[0, :, : layer.head_dim])  # type: ignore[misc]
        return {"position_embeddings": (turn, 0 * turn)}
    known = {"size": _GRID, "key": tokens, "value": tokens}
    required = [
        name
        for name, parameter in inspect.signature(type(layer).forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][2:]  # but for self and the tokens
    return {name: known.get(name) for name in {*required, *(name for name in names if name in known)}}


def _attend(layer: Any, tokens: Tensor) -> Tensor:
    table = getattr(layer, "relative_position_bias_table", None)
    weights = attention_rows(layer, tokens, "all", bias=None if table is None else layer._get_rel_pos_bias())
    values = values_of(layer, tokens)
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
    out = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2)
    gate = getattr(layer, "gate", None)
    out = out if getattr(layer, "norm", None) is None else layer.norm(out)
    out = out if gate is None else out * gate(tokens).sigmoid()
    projection = next((getattr(layer, name) for name in ("proj", "o_proj", "out_proj") if hasattr(layer, name)), None)
    return out if projection is None else projection(out)
