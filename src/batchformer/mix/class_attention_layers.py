"""Find the layers of a model with readable attention, by structure and a numerical check, not by class name.

A layer must have the weights of softmax(q k^T) v and nothing else, and compute that (`attending_tokens`): names of
weights are not enough, because attention between channels or inside windows may have the same ones.

| model | layer read | query |
|---|---|---|
| ViT, DeiT, DeiT-3, DINOv2, BEiT, EVA; torchvision's ViT | attention of a block | class token |
| transformers' ViT, DeiT, CLIP's vision model, DINOv3 | attention of a block | class token |
| DeiT distilled | attention of a block | class token: the distillation token is trained on the teacher, not the label |
| SigLIP with its pooling head (timm's; transformers' model, whose classifier leaves it out) | that head | the probe |
| CaiT, XCiT, VOLO | class-attention layers, the only ones with a class token | class token |
| ViT with average pooling, PVT v2 | attention of a block | mean of the image tokens' queries |
| Swin | a block, its windows put together again | mean of all tokens' queries |

Where the classifier reads the mean of the tokens there is no class token (or an untrained one): then the query is the
mean of the queries, that of a class token equal to the mean of the tokens. It is one row as well; the mean of all rows
would need N x N.
"""

import copy
import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix.class_attention import attention_rows, has_projections, project
from batchformer.mix.class_attention_readers import (
    ClassQuery,
    LatentReader,
    PyramidReader,
    Reader,
    TokenReader,
    WindowReader,
    names_by_position,
    rotates_halves,
)
from batchformer.nn.token_layout import attribute_of, prefix_tokens

# A layer with any other child or weight computes something else than softmax(q k^T) v: talking heads, cross-covariance.
_CHILDREN = frozenset(
    {"qkv", "q", "k", "v", "kv", "q_proj", "k_proj", "v_proj", "query", "key", "value", "proj", "o_proj", "out_proj"}
    | {"q_norm", "k_norm", "norm", "gate", "attn_drop", "proj_drop", "dropout", "softmax"}
)
_WEIGHTS = frozenset(("q_bias", "k_bias", "v_bias", "relative_position_bias_table", "in_proj_weight", "in_proj_bias"))
# These keep a class token or a pooling head, and classify the mean of the tokens of the image.
_MEAN_POOLED = frozenset(f"{name}ForImageClassification" for name in ("CLIP", "MetaClip2", "Siglip", "Siglip2"))
# Modules with verified layers, for layers that cannot be run alone (weights sharded or quantised).
_KNOWN_MODULES = (
    "torch.nn.modules.activation",
    "timm.layers.attention",
    "timm.models.vision_transformer",
    "timm.models.eva",
    "timm.models.beit",
    "timm.models.cait",
    "transformers.models.",
)
_PYRAMID = ("q", "kv", "sr", "pool", "act")  # what PVT v2's attention has
Attending = Literal["all", "class"]
_GRID = (17, 3)  # larger than the windows that attention is cut into


def find_attention(model: nn.Module, query: ClassQuery | None = None) -> list[tuple[str, nn.Module, Reader]]:
    """Path, layer and reader of every layer with readable attention, in the model's order."""
    has_class, prefix = prefix_tokens(model)
    pooled = attribute_of(model, "global_pool") in ("avg", "avgmax", "max", "map") or _classifies_the_mean(
        model
    )  # timm
    pooled = pooled or getattr(attribute_of(model, "config"), "use_mean_pooling", False)  # transformers
    chosen: ClassQuery = query or ("class" if has_class and not pooled else "mean")
    found: list[tuple[str, nn.Module, Reader]] = []
    for path, module in model.named_modules():
        if type(module).__name__ == "PatchDropout" and getattr(module, "prob", 0) > 0:
            raise UserError(
                f"{type(model).__name__} drops patches in training ({path}), so its tokens no longer tell their place "
                f"in the image: build it with patch_drop_rate=0 for TransMix."
            )
        if _is_window_block(module):
            found.append((path, module, WindowReader("mean")))
        elif _is_latent_pool(module) and query != "mean":
            included = attribute_of(model, "pool_include_prefix", True)
            found.append((path, module, LatentReader(prefix if included else 0, names_by_position(module))))
        elif isinstance(module, nn.MultiheadAttention) and _classifies_the_mean(model):
            continue  # a pooling head that nothing reads
        elif all(hasattr(module, name) for name in _PYRAMID) and has_projections(module):
            found.append((path, module, PyramidReader("mean")))
        elif _is_plain(module) and not _is_window_attention(module) and (attending := attending_tokens(module)):
            alone = has_class and attending == "class"
            reader = TokenReader("class" if alone else chosen, prefix, names_by_position(module), class_alone=alone)
            found.append((path, module, reader))
    if not found:
        raise UserError(
            f"TransMix found no attention it can read in {type(model).__name__}: it needs layers with queries and keys "
            f"(ViT, DeiT, CaiT, XCiT, PVT v2, Swin); for a model without attention use CutMix."
        )
    if query == "class" and not has_class:
        raise UserError(f'{type(model).__name__} has no class token: leave query= out, or say query="mean".')
    return found


def unread_attention(model: nn.Module, found: list[str]) -> list[str]:
    """Paths of the layers with queries and keys that are none of those found, nor inside one, nor a pooling head."""
    within = tuple(f"{path}." for path in found)
    return [
        path
        for path, module in model.named_modules()
        if has_projections(module)
        and path not in found
        and not path.startswith(within)
        and not _is_latent_pool(module)
        and not (isinstance(module, nn.MultiheadAttention) and _classifies_the_mean(model))
    ]


def _classifies_the_mean(model: nn.Module) -> bool:
    return any(type(module).__name__ in _MEAN_POOLED for module in model.modules())


def _is_plain(layer: nn.Module) -> bool:
    children = {name for name, _ in layer.named_children()}
    weights = {name for name, _ in layer.named_parameters(recurse=False)}
    # Hiera's tokens are not in row-major order; `add_zero_attn` adds a key that is no token
    other = hasattr(layer, "query_stride") or getattr(layer, "add_zero_attn", False)
    return has_projections(layer) and children <= _CHILDREN and weights <= _WEIGHTS and not other


def _is_latent_pool(layer: nn.Module) -> bool:
    latent = getattr(layer, "latent", None)
    one = isinstance(latent, Tensor) and latent.ndim == 3 and latent.shape[1] == 1
    return one and hasattr(layer, "pos_embed") and hasattr(layer, "kv") and has_projections(layer)


def _is_window_attention(layer: nn.Module) -> bool:
    """A bias between all positions of a window and nothing else: BEiT's has a place for the class token too."""
    index, window = getattr(layer, "relative_position_index", None), getattr(layer, "window_size", None)
    return isinstance(index, Tensor) and window is not None and index.numel() == (window[0] * window[1]) ** 2


def _is_window_block(block: nn.Module) -> bool:
    attention = getattr(block, "attn", None)
    return (
        isinstance(attention, nn.Module)
        and _is_plain(attention)
        and _is_window_attention(attention)
        and hasattr(block, "norm1")
    )


@torch.no_grad()
def attending_tokens(layer: nn.Module) -> Attending | None:
    """Which tokens get softmax(q k^T) v, projected, as the weights say: all, or the first alone (class attention).

    None where the layer computes something else.
    """
    named: Attending = "class" if type(layer).__name__ in ("ClassAttn", "ClassAttention") else "all"
    if any(weight.is_meta for weight in layer.parameters()):
        return named  # nothing to compare yet
    try:
        # A copy in float64 on the CPU, so that the comparison does not depend on the model's precision or device.
        twin: Any = copy.deepcopy(layer).to("cpu", torch.float64).eval()
        tokens = _random_tokens(twin)
        given = tokens if getattr(twin, "batch_first", True) else tokens.transpose(0, 1)
        with torch.device("cpu"):  # whatever torch's default is
            own = type(twin).forward(twin, given, **_neutral_arguments(twin, given))
        own = own[0] if isinstance(own, tuple) else own
        own = own if given is tokens else own.transpose(0, 1)
        expected = _attend(twin, tokens)[:, : own.shape[1]]
        if own.shape != expected.shape or (own - expected).norm() > 0.01 * expected.norm():
            return None
        return "class" if own.shape[1] == 1 else "all"
    except Exception:  # a third-party layer may not accept these arguments
        return named if type(layer).__module__.startswith(_KNOWN_MODULES) else None


def _random_tokens(layer: Any) -> Tensor:
    index = getattr(layer, "relative_position_index", None)
    count = len(index) if isinstance(index, Tensor) and index.ndim == 2 else _GRID[0] * _GRID[1]
    linear: Any = next((one for name in ("qkv", "q", "q_proj", "query") if (one := getattr(layer, name, None))), None)
    width = layer.embed_dim if linear is None else linear.in_features
    generator = torch.Generator("cpu").manual_seed(0)
    # large values, so that attention is not uniform with initial weights either
    return 10 * torch.randn(1, count, width, generator=generator, dtype=torch.float64, device="cpu")


def _neutral_arguments(layer: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """Further arguments that the layer requires, with values that do not change its output."""
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
    values = project(layer, tokens, "v")
    values = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
    out = (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2)
    gate = getattr(layer, "gate", None)
    out = out if getattr(layer, "norm", None) is None else layer.norm(out)
    out = out if gate is None else out * gate(tokens).sigmoid()
    projection = next((getattr(layer, name) for name in ("proj", "o_proj", "out_proj") if hasattr(layer, name)), None)
    return out if projection is None else projection(out)
