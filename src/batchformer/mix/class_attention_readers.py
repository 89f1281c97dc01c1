"""How to read the class attention off one kind of layer, from the arguments of its forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from batchformer.errors import UserError
from batchformer.mix.class_attention import Query, attention_rows

ClassQuery = Literal["class", "mean"]


class Reader(ABC):
    """Callable on a layer and its arguments: one row of attention per sample, over the tokens of the image alone.

    The rows are maps (batch, height, width) where the layer knows its grid, else (batch, tokens). With `whole` it is
    the attention of every token to every token, (batch, tokens, tokens), the prefix included: for the rollout.
    """

    def __init__(self, query: ClassQuery, prefix: int = 0) -> None:
        self.query: ClassQuery = query
        self.prefix = prefix

    @abstractmethod
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        """The rows of this layer."""

    def asked(self, whole: bool) -> Query:
        return "all" if whole else self.query


class TokenReader(Reader):
    """Attention over a row of tokens (batch, tokens, width): ViT, DeiT, BEiT, EVA; class attention of CaiT and XCiT."""

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        for name in ("attn_mask", "attention_mask", "key_padding_mask"):
            if kwargs.get(name) is not None:
                raise UserError(f"TransMix cannot read the attention of a layer that is given {name}: train without.")
        tokens = _first(args, kwargs)
        if tokens.ndim != 3:
            raise UserError(
                f"TransMix reads attention over tokens (batch, tokens, width), and a {type(layer).__name__} was given "
                f"{tuple(tokens.shape)}: choose another block=, or use CutMix for this model."
            )
        if isinstance(layer, nn.MultiheadAttention) and not layer.batch_first:
            tokens = tokens.transpose(0, 1)
        rope = kwargs.get("rope", args[1] if len(args) > 1 and hasattr(layer, "rotate_half") else None)
        bias = layer._get_rel_pos_bias() if getattr(layer, "relative_position_bias_table", None) is not None else None
        shared = kwargs.get("shared_rel_pos_bias")
        if shared is not None:
            bias = shared if bias is None else bias + shared
        rows = attention_rows(layer, tokens, self.asked(whole), self.prefix, bias=bias, rope=rope)
        return rows if whole else rows[:, 0, self.prefix :]


class PyramidReader(Reader):
    """PVT v2: `forward(x, feat_size)`, keys of a reduced map where the layer has a reduction."""

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        tokens = _first(args, kwargs)
        height, width = args[1] if len(args) > 1 else kwargs["feat_size"]
        keys, grid = tokens, (height, width)
        if layer.sr is not None:
            image = tokens.transpose(1, 2).unflatten(2, (height, width))
            reduced = layer.sr(image if layer.pool is None else layer.pool(image))
            grid = (reduced.shape[2], reduced.shape[3])
            keys = layer.norm(reduced.flatten(2).transpose(1, 2))
            keys = keys if layer.act is None else layer.act(keys)
        return attention_rows(layer, tokens, self.query, keys=keys)[:, 0].unflatten(1, grid)


class WindowReader(Reader):
    """A block of Swin (norm1, then attention inside windows), read as if the whole map were one window.

    The classifier of Swin reads the mean of all tokens, so the row is that of their mean query over all of them. The
    relative position bias is left out: a mean of all positions has none.
    """

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        image: Float[Tensor, "batch height width channels"] = layer.norm1(_first(args, kwargs))
        return attention_rows(layer.attn, image.flatten(1, 2), self.query)[:, 0].unflatten(1, image.shape[1:3])


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))
