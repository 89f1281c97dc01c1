"""Read the class attention of one layer from the arguments of its forward, while the model runs."""

import inspect
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.attach.insertion import InstanceForward
from batchformer.errors import UserError
from batchformer.mix.class_attention import Query, attention_rows

ClassQuery = Literal["class", "mean"]


class Reader(ABC):
    """Compute one row of attention per sample, over the image tokens, from a layer and its forward arguments.

    The rows are maps (batch, height, width) where the layer knows its grid, else (batch, tokens). With `whole` it is
    the attention of every token to every token, (batch, tokens, tokens), the prefix included: for the rollout.
    """

    def __init__(self, query: ClassQuery, prefix: int = 0) -> None:
        self.query: ClassQuery = query
        self.prefix = prefix

    @abstractmethod
    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        """The rows of this layer."""


class TokenReader(Reader):
    """Attention over a row of tokens (batch, tokens, width): ViT, DeiT, BEiT, EVA; class attention of CaiT and XCiT.

    In class attention (`class_alone`) the other tokens are unchanged, so their rows of the whole are the identity. Also
    the attention of one probe to all tokens, in a pooling head: then its only row is read, with keys from the tokens.
    Further arguments of a layer that are not known here (masks, position embeddings) would change its attention, so
    they are refused.
    """

    def __init__(
        self, query: ClassQuery, prefix: int = 0, names: tuple[str, ...] = (), class_alone: bool = False
    ) -> None:
        super().__init__(query, prefix)
        self.names = names  # of the layer's positional arguments
        self.class_alone = class_alone

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        tokens = _first(args, kwargs)
        if tokens.ndim != 3:
            raise UserError(
                f"TransMix reads attention over tokens (batch, tokens, width), and a {type(layer).__name__} was given "
                f"{tuple(tokens.shape)}: choose another block=, or use CutMix for this model."
            )
        keys = given.get("key")
        if isinstance(layer, nn.MultiheadAttention) and not layer.batch_first:
            tokens, keys = tokens.transpose(0, 1), None if keys is None else keys.transpose(0, 1)
        query: Query = "all" if whole and not self.class_alone else self.query
        if keys is not None and keys.shape[1] != tokens.shape[1]:
            if whole or tokens.shape[1] != 1:
                raise UserError(
                    f"{tokens.shape[1]} tokens of a {type(layer).__name__} attend to {keys.shape[1]} others, and "
                    f"TransMix reads self-attention or the attention of one probe: choose another block= by its number."
                )
            query = "class"
        position, rope, bias = given.get("position_embeddings"), given.get("rope"), _bias(layer, given)
        if position is not None and rotates_halves(layer):
            rope = position[0], position[1]
        _refuse_unknown_inputs(layer, given, self.names)
        rows = attention_rows(layer, tokens, query, self.prefix, keys=keys, bias=bias, rope=rope).mean(1)
        if whole and self.class_alone:
            others = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)[1:]
            return torch.cat([rows, others.expand(len(rows), -1, -1)], dim=1)
        return rows if whole else rows[:, 0, self.prefix :]


class LatentReader(Reader):
    """timm's attention pooling: one learnt query (`latent`) to all tokens, in the place of a class token."""

    def __init__(self, prefix: int, names: tuple[str, ...]) -> None:
        super().__init__("class", prefix)
        self.names = names

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        _refuse_unknown_inputs(layer, {**dict(zip(self.names, args, strict=False)), **kwargs}, self.names)
        tokens = _first(args, kwargs)
        keys = tokens if layer.pos_embed is None else tokens + layer.pos_embed.to(tokens.dtype)
        latent = layer.latent.expand(len(tokens), -1, -1)
        return attention_rows(layer, latent, "class", keys=keys).mean(1)[:, 0, self.prefix :]


def names_by_position(layer: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of the `forward` of the layer's class, not of an instance `forward`."""
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def rotates_halves(layer: nn.Module) -> bool:
    """transformers' DINOv3: cosines and sines of the patches under `position_embeddings`."""
    return ".dinov3_vit." in type(layer).__module__


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
        return attention_rows(layer, tokens, self.query, keys=keys).mean(1)[:, 0].unflatten(1, grid)


class WindowReader(Reader):
    """A block of Swin (norm1, then attention inside windows), read as if the whole map were one window.

    The classifier of Swin reads the mean of all tokens, so the row is that of their mean query over all of them. The
    relative position bias is left out: a mean of all positions has none.
    """

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = False) -> Tensor:
        image: Float[Tensor, "batch height width channels"] = layer.norm1(_first(args, kwargs))
        return attention_rows(layer.attn, image.flatten(1, 2), self.query).mean(1)[:, 0].unflatten(1, image.shape[1:3])


def _bias(layer: Any, given: dict[str, Any]) -> Tensor | None:
    bias = layer._get_rel_pos_bias() if getattr(layer, "relative_position_bias_table", None) is not None else None
    shared = given.get("shared_rel_pos_bias")
    return bias if shared is None else shared if bias is None else bias + shared


def _refuse_unknown_inputs(layer: nn.Module, given: dict[str, Any], names: tuple[str, ...]) -> None:
    known = {"query", "key", "value", "rope", "shared_rel_pos_bias", *names[:1]}
    if rotates_halves(layer):
        known.add("position_embeddings")
    for name, value in given.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        changes = name not in known and any(isinstance(part, Tensor) for part in parts)
        if changes or (name == "is_causal" and value):
            raise UserError(
                f"TransMix cannot read the attention of a {type(layer).__name__} that is given {name}: train without "
                f"it, or use CutMix for this model."
            )


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else next(iter(kwargs.values()))


class ClassAttentionRecorder(InstanceForward):
    """An attention layer's `forward` that records the class row of the attention, then calls the original one.

    Not a hook, which compiled code may skip (see `InstanceForward`); and computed in the forward, not later from a
    stored input: there the precision is that of the model, its weights are gathered (FSDP does so for the forward
    only), and a compiler fuses it. For a batch mixed in training, passes in eval mode are not recorded: a validation in
    between changes nothing, and a copy of the model (EMA) records nothing. A batch mixed in eval mode, right after a
    validation, may still have its pass in training, `model.train()(mixed.images)`. One pass is recorded: a second one
    before `take` may belong to other images, and sets the state to `again`.

    `state` has few values, so that code is compiled once for each of them and not for every batch.
    """

    def __init__(self, layer: nn.Module, reader: Reader, whole: bool = False) -> None:
        super().__init__(layer)
        self.reader, self.whole = reader, whole
        self.mixed_in_training = False
        self.state: Literal["idle", "waiting", "read", "again"] = "idle"
        self.rows: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.removed and self.state != "idle" and (self.layer.training or not self.mixed_in_training):
            if self.state == "waiting":
                with torch.no_grad():
                    self.rows = self.reader(self.layer, args, kwargs, self.whole)
                self.state = "read"
            else:
                self.state = "again"
        return self.original(*args, **kwargs)

    @property
    def __globals__(self) -> dict[str, Any]:
        """Read by torch.jit.script from every `forward`: raise, with the reason why scripting cannot work."""
        raise AttributeError(
            "a model that TransMix reads cannot go through torch.jit.script: close the mix first, mix.close() (of a "
            "copy of the model batchformer.mix.close(copy)), or use torch.export or torch.jit.trace."
        )

    def expect(self) -> None:
        """Record the next forward pass."""
        self.mixed_in_training, self.state, self.rows = self.layer.training, "waiting", None

    def take(self) -> Tensor | None:
        """The recorded attention, once; later passes (of a checkpointed backward, say) are not recorded."""
        if self.state == "again":
            raise UserError(
                f"the {type(self.layer).__name__} that TransMix reads ran more than once since the batch was mixed, so "
                f"it is not clear which pass was that of mixed.images: call mixed.targets() or mixed.attention() right "
                f"after model(mixed.images), and run the model on other images after that. A layer that the model "
                f"itself calls several times in a pass cannot be read: choose another block=."
            )
        rows = self.rows
        if rows is not None:
            self.state, self.rows = "idle", None
        return rows

    def take_away(self) -> None:
        """Remove it from the layer, also where another instance `forward` has been put around it later."""
        layer = self.layer
        if layer is None:
            return
        outer = layer.__dict__.get(self.name)
        if outer is self:
            super().take_away()
            below = layer.__dict__.get(self.name)
            while isinstance(below, InstanceForward) and below.removed:
                below.take_away()
                below = layer.__dict__.get(self.name)
        while isinstance(outer, InstanceForward):
            if outer.previous is self:
                outer.previous = self.previous
            outer = outer.previous  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state": "idle", "rows": None}


def close(model: nn.Module) -> None:
    """Remove the recorders of TransMix from a copy of a model (an EMA), which `mix.close()` does not reach."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"batchformer.mix.close takes a model, and got a {type(model).__name__}: a mix is closed by mix.close()."
        )
    for layer in model.modules():
        inner = layer.__dict__.get("forward")
        while isinstance(inner, InstanceForward):
            if isinstance(inner, ClassAttentionRecorder) and not inner.removed:
                inner.remove()
            inner = inner.previous  # type: ignore[assignment]


def roll_out(
    attention: list[Float[Tensor, "batch tokens tokens"]], reader: Reader
) -> Float[Tensor, "batch image_tokens"]:
    """Attention rollout (Abnar & Zuidema, 2020): the product of (A + I) / 2 over all blocks, its class row.

    Taken from the last block to the first it is a row times a matrix each time. A model without class token starts from
    the mean of its image tokens.
    """
    if len(counts := list(dict.fromkeys(matrix.shape[1] for matrix in attention))) > 1:
        raise UserError(
            f"rollout multiplies the attention of blocks over one row of tokens, and the blocks of this model have "
            f"{', '.join(map(str, counts))} tokens: choose a block by its number."
        )
    batch, tokens, _ = attention[0].shape
    start = slice(0, 1) if reader.query == "class" else slice(reader.prefix, tokens)
    row = attention[0].new_zeros(batch, 1, tokens)
    row[:, :, start] = 1 / len(range(tokens)[start])
    for matrix in reversed(attention):
        row = (row + row @ matrix) / 2
    return row[:, 0, reader.prefix :]
