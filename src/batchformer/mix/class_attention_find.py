"""Which layers of a model pay attention, and how the class attention is read off them: by structure, not by class.

A layer must have the weights of softmax(q k^T) v and nothing else, and compute that (`attending_tokens`).

| model | layer read | whose attention |
|---|---|---|
| ViT, DeiT, DeiT-3, DINOv2, BEiT, EVA; torchvision's ViT | attention of a block | class token |
| transformers' ViT, DeiT, CLIP's vision model, DINOv3 | attention of a block | class token |
| DeiT distilled | attention of a block | class token: the distillation token answers to the teacher, not to the label |
| SigLIP with its pooling head (timm's; transformers' model, whose classifier leaves it out) | that head | the probe |
| CaiT, XCiT, VOLO | class-attention layers, the only ones with a class token | class token |
| ViT with average pooling, PVT v2 | attention of a block | mean of the image tokens' queries |
| Swin | a block, its windows put together again | mean of all tokens' queries |

Where the classifier reads the mean of the tokens there is no class token (or one that learns nothing): then the query
is the mean of the queries, what a class token that were the mean of the tokens would ask. It is one row as well; the
mean of all rows would need N x N.
"""

from __future__ import annotations

from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix.class_attention import has_projections
from batchformer.mix.class_attention_check import attending_tokens
from batchformer.mix.class_attention_readers import (
    ClassQuery,
    LatentReader,
    PyramidReader,
    Reader,
    TokenReader,
    WindowReader,
    names_by_position,
)
from batchformer.mix.token_grid import prefix_tokens, said_by

# A layer with any other child or weight computes something else than softmax(q k^T) v: talking heads, cross-covariance.
_CHILDREN = frozenset(
    {"qkv", "q", "k", "v", "kv", "q_proj", "k_proj", "v_proj", "query", "key", "value", "proj", "o_proj", "out_proj"}
    | {"q_norm", "k_norm", "norm", "gate", "attn_drop", "proj_drop", "dropout", "softmax"}
)
_WEIGHTS = frozenset(("q_bias", "k_bias", "v_bias", "relative_position_bias_table", "in_proj_weight", "in_proj_bias"))
# These keep a class token or a pooling head, and classify the mean of the tokens of the image.
_MEAN_POOLED = frozenset(f"{name}ForImageClassification" for name in ("CLIP", "MetaClip2", "Siglip", "Siglip2"))


def find_attention(model: nn.Module, query: ClassQuery | None = None) -> list[tuple[str, nn.Module, Reader]]:
    """Path, layer and reader of every layer whose attention can be read, in the model's order."""
    has_class, prefix = prefix_tokens(model)
    chosen: ClassQuery = query or ("class" if has_class and not _pools_image_tokens(model) else "mean")
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
            included = said_by(model, "pool_include_prefix", True)
            found.append((path, module, LatentReader(prefix if included else 0, names_by_position(module))))
        elif isinstance(module, nn.MultiheadAttention) and _classifies_the_mean(model):
            continue  # a pooling head that nothing reads
        elif _is_pyramid(module):
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


def _pools_image_tokens(model: nn.Module) -> bool:
    if said_by(model, "global_pool") in ("avg", "avgmax", "max", "map"):  # timm
        return True
    config = said_by(model, "config")  # transformers
    return bool(getattr(config, "use_mean_pooling", False)) or _classifies_the_mean(model)


def _classifies_the_mean(model: nn.Module) -> bool:
    return any(type(module).__name__ in _MEAN_POOLED for module in model.modules())


def _is_plain(layer: nn.Module) -> bool:
    children = {name for name, _ in layer.named_children()}
    weights = {name for name, _ in layer.named_parameters(recurse=False)}
    # Hiera's tokens do not stand row by row; a key of zeros is no token
    other = hasattr(layer, "query_stride") or getattr(layer, "add_zero_attn", False)
    return has_projections(layer) and children <= _CHILDREN and weights <= _WEIGHTS and not other


def _is_latent_pool(layer: nn.Module) -> bool:
    latent = getattr(layer, "latent", None)
    one = isinstance(latent, Tensor) and latent.ndim == 3 and latent.shape[1] == 1
    return one and hasattr(layer, "pos_embed") and hasattr(layer, "kv") and has_projections(layer)


def _is_pyramid(layer: nn.Module) -> bool:
    names = ("q", "kv", "sr", "pool", "act")
    return all(hasattr(layer, name) for name in names) and has_projections(layer)


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
