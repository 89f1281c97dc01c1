"""Reading the class attention while the model runs, and leaving no trace when that is over."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.attach.insertion import InstanceForward
from batchformer.errors import UserError
from batchformer.mix.class_attention_readers import Reader


class Recorder(InstanceForward):
    """In the place of an attention layer's `forward`: reads the class row from its input, then does what the layer did.

    Not a hook, which compiled code may skip (see `InstanceForward`); and read at once, not later from a stored input:
    inside the forward the precision is that of the model, its weights are there (FSDP gathers them for the forward
    only), and a compiler fuses it. Of a batch mixed in training it reads no pass in eval mode: a validation in between
    changes nothing, and a copy of the model (EMA) reads nothing at all. One mixed in eval mode, right behind a
    validation, may still have its pass in training, `model.train()(mixed.images)`. It reads one pass: what came of a
    second one before `take` may belong to other images, and is noted (`again`).

    `state` has few values: code is compiled for each of them once, and not again from batch to batch.
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
        """torch.jit.script asks every `forward` for them: the chance to tell the user why it cannot work."""
        raise AttributeError(
            "a model that TransMix reads cannot go through torch.jit.script: close the mix first, mix.close() (of a "
            "copy of the model batchformer.mix.close(copy)), or use torch.export or torch.jit.trace."
        )

    def expect(self) -> None:
        """A batch was mixed: its forward pass comes next."""
        self.mixed_in_training, self.state, self.rows = self.layer.training, "waiting", None

    def take(self) -> Tensor | None:
        """What the forward pass left, once; later passes, of a checkpointed backward say, are nobody's."""
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
        """Also from under what was put over it later, so that nothing is left whoever goes first."""
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
    """Take all that TransMix put into a model out of it: for a copy of a model (an EMA), whose mix is elsewhere."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"batchformer.mix.close takes a model, and got a {type(model).__name__}: a mix is closed by mix.close()."
        )
    for layer in model.modules():
        inner = layer.__dict__.get("forward")
        while isinstance(inner, InstanceForward):
            if isinstance(inner, Recorder) and not inner.removed:
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
