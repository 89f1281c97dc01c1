"""TransMix: CutMix with labels weighted by the attention of the model in training."""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from batchformer.attach.insertion import InstanceForward
from batchformer.errors import UserError
from batchformer.mix.base import Draw, Images, Mix, Mixed, MixKeywords, SoftLabels, need_module, refuse_in_worker
from batchformer.mix.class_attention_layers import find_attention, unread_attention
from batchformer.mix.class_attention_readers import ClassAttentionRecorder, ClassQuery, TokenReader, roll_out
from batchformer.mix.mixup_cutmix import cut
from batchformer.nn import BatchFormer
from batchformer.nn.inputs import as_number
from batchformer.nn.token_layout import patch_size, token_grid


class TransMix(Mix):
    """CutMix, with image B's share of the label between its share of the area and of the attention (Chen et al., 2022).

        mix = TransMix(model, num_classes=100)
        mixed = mix(images, targets)
        logits = model(mixed.images)
        loss = cross_entropy(logits, mixed.targets())       # after the forward pass

    Let A be the attention of the class token to the tokens of the image in the last block, mean over heads, and M the
    box on the token grid (nearest). Then s = (1 - w) area(M) + w sum(M A) / sum(A) and y = (1 - s) y_A + s y_B, with
    w = `attention_weight`. The default is the mean of both, w = 0.5, as the released code has it and the paper's
    section 4.1 says (the code's own option for it is not read). A is detached, from the model as it trains (drop path
    on, before attention dropout), never from an average of its weights. No second forward pass and no parameters. The
    released code pairs by `partner="flip"`; the default here is a random permutation, as for every mix. It mixes some
    of the batches by mixup: combine by `MixSwitch`.

    Only one row of attention is computed, from the input of the layer, in its own precision; the model keeps its fused
    attention. See `class_attention_layers` for which layers can be read, and for the query where there is no class
    token (PVT v2, Swin, average pooling). One pass is recorded: a second one before `targets()` might be that of other
    images, and is refused. `close()`, leaving `with TransMix(...) as mix:`, or deleting the mix removes the recorders
    from the model (`batchformer.mix.close` from its copies); keys and outputs of the model do not change.

    With `bf.attach` inside the model and two streams, the attention of the plain rows gives the targets of both: the
    plain model is the one kept after training. `targets()` has a row per image; `TwoStreamLoss` repeats it.

    Args:
        model: the model that is trained, before or after DDP or `torch.compile`; its layers are shared with it.
        attention_weight: w; 0 is CutMix.
        block: index of the block to read, negative from the end (the supplement's Table 1 counts from 1); None is the
            last, the best there. "rollout" multiplies the attention of all blocks, and needs all of it, N x N.
        grid: height and width of the token grid, where neither the model's patches nor the number of tokens give it.
        query: "class" or "mean", where it is not detected correctly from the model.
        options: those of `Mix`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        *,
        attention_weight: float = 0.5,
        block: int | Literal["rollout"] | None = None,
        grid: tuple[int, int] | None = None,
        query: ClassQuery | None = None,
        **options: Unpack[MixKeywords],
    ) -> None:
        need_module("TransMix", "the model in training", model)
        super().__init__(num_classes, **options)
        if query not in (None, "class", "mean"):
            raise UserError(f'TransMix: query={query!r} must be "class", "mean" or None, to take what the model has.')
        pair = isinstance(grid, tuple | list) and len(grid) == 2 and all(isinstance(n, int) and n > 0 for n in grid)
        if grid is not None and not pair:
            raise UserError(f"TransMix: grid={grid!r} must be the rows and columns of the token grid, as (14, 14).")
        if not 0 <= as_number(attention_weight) <= 1:
            raise UserError(f"TransMix: attention_weight={attention_weight!r} must lie between 0 (CutMix) and 1.")
        self.attention_weight, self.grid, self.block = float(attention_weight), grid, block
        self.recorders = _recorders(model, block, query)
        self._layers = [recorder.layer for recorder in self.recorders]  # the recorders have weak references only
        self.patch = patch_size(model)
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._latest: weakref.ref[TransMixed] | None = None
        for recorder in self.recorders:
            recorder.put()
        self._close_when_collected()

    def check(self, images: Tensor, targets: Tensor) -> None:
        super().check(images, targets)
        refuse_in_worker("TransMix")
        if self.recorders[0].removed:
            raise UserError("this TransMix was closed and no longer sees the model: make a new one.")
        height, width = images.shape[-2:]
        if height < self.patch[0] or width < self.patch[1]:
            raise UserError(
                f"the images have {height} x {width} pixels and the model's patches {self.patch[0]} x {self.patch[1]}, "
                f"so there is no token to attend to; use larger images or a model with smaller patches."
            )

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> TransMixed:
        pasted, mask, share = cut(images, draw.partner, draw.centre, draw.share)
        mixed = TransMixed(pasted, labels, draw.partner, share, mask, mix=self)
        self.expect(mixed)
        return mixed

    def expect(self, mixed: TransMixed) -> None:
        """Record the next forward pass for this batch; attention that an earlier batch has not read is stored there."""
        earlier = None if self._latest is None else self._latest()
        if earlier is not None:
            with suppress(UserError):  # raised again when the earlier batch is read
                earlier.keep_attention()
        self._latest = weakref.ref(mixed)
        for recorder in self.recorders:
            recorder.expect()

    def read(self, mixed: TransMixed) -> Float[Tensor, "batch ..."] | None:
        """The attention recorded in the forward pass of this batch; None if there was none."""
        if self._latest is None or self._latest() is not mixed:
            return None
        rows = [recorder.take() for recorder in self.recorders]
        if any(row is None for row in rows):
            return None
        if self.block != "rollout":
            return rows[0]
        least = min(len(row) for row in rows)  # type: ignore[arg-type]  # the second stream starts at a middle block
        return roll_out([row[:least] for row in rows], self.recorders[-1].reader)  # type: ignore[index]

    def has_two_streams(self) -> bool:
        """Whether the model may double its rows; True for a copied mix, which has no reference to its model."""
        model = None if self._model is None else self._model()
        return model is None or any(
            isinstance(module, BatchFormer)
            or (
                isinstance(inner := module.__dict__.get("forward"), InstanceForward)
                and not isinstance(inner, ClassAttentionRecorder)
            )
            for module in model.modules()
        )

    def close(self) -> None:
        _remove(self.recorders)

    def _close_when_collected(self) -> None:
        """Take the recorders out of the model when the mix is garbage collected."""
        weakref.finalize(self, _remove, self.recorders).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._close_when_collected()


@dataclass(eq=False, repr=False)
class TransMixed(Mixed):
    """A mixed batch with targets that depend on the attention of its forward pass."""

    mix: TransMix = field(kw_only=True)
    _attention: Tensor | None = field(default=None, init=False)

    def keep_attention(self) -> None:
        """Store the recorded attention before another forward pass overwrites it."""
        rows = None if self._attention is not None else self.mix.read(self)
        if rows is not None:
            self._attention = self._as_map(rows)

    def attention(self) -> Float[Tensor, "batch grid_height grid_width"]:
        """Attention of the class token on the token grid; each map sums to one."""
        self.keep_attention()
        if self._attention is None:
            raise UserError(
                "the attention of this batch is not there: run the model given to TransMix, in training mode if the "
                "batch was mixed in it, on mixed.images before mixed.targets() and before the next batch is mixed."
            )
        return self._attention

    def attention_share(self) -> Float[Tensor, " batch"]:
        """How much of the attention lies on image B: sum(M A) / sum(A), where the sum of A is one."""
        attention = self.attention()
        assert self.mask is not None
        mask = F.interpolate(self.mask, size=attention.shape[1:], mode="nearest")[:, 0]
        return (mask * attention).sum((1, 2))

    def label_share(self) -> Float[Tensor, " batch"]:
        """s = (1 - w) area(M) + w sum(M A) / sum(A)."""
        return torch.lerp(self.share, self.attention_share(), self.mix.attention_weight)

    def _as_map(self, rows: Float[Tensor, "rows ..."]) -> Float[Tensor, "batch grid_height grid_width"]:
        batch = len(self.images)
        if len(rows) != batch and not (len(rows) == 2 * batch and self.mix.has_two_streams()):
            raise UserError(
                f"{batch} images were mixed and the model's attention saw {len(rows)} rows: run it on mixed.images, or "
                f"where its layer attends inside pieces of these, choose another block= or use CutMix."
            )
        rows = rows[:batch]  # with two streams the plain ones
        if rows.ndim == 2:
            rows = rows.unflatten(1, self._grid(rows.shape[1]))
        return rows / rows.sum((1, 2), keepdim=True)

    def _grid(self, tokens: int) -> tuple[int, int]:
        grid = self.mix.grid
        if grid is None:
            height, width = self.images.shape[-2:]
            return token_grid(tokens, height, width, self.mix.patch)
        if grid[0] * grid[1] != tokens:
            raise UserError(
                f"TransMix: grid={grid!r} is not the grid of the {tokens} tokens that the model attends to."
            )
        return grid


def _remove(recorders: list[ClassAttentionRecorder]) -> None:
    for recorder in recorders:
        if not recorder.removed:
            recorder.remove()


def _recorders(model: nn.Module, block: int | str | None, query: ClassQuery | None) -> list[ClassAttentionRecorder]:
    found = find_attention(model, query)
    unread = unread_attention(model, [path for path, _, _ in found])
    if block == "rollout":
        # where the class token alone attends, it does so in these layers only (CaiT, XCiT, VOLO)
        if unread and not all(isinstance(reader, TokenReader) and reader.class_alone for _, _, reader in found):
            raise UserError(
                f"rollout multiplies the attention of all blocks, and that of {unread[0]!r} cannot be read: choose a "
                f"block by its number."
            )
        odd = next((path for path, _, reader in found if not isinstance(reader, TokenReader)), None)
        if odd is not None:
            raise UserError(
                f"rollout multiplies the attention of blocks over one row of tokens, and {odd!r} is not such a block: "
                f"choose a block by its number."
            )
        return [ClassAttentionRecorder(layer, reader, whole=True) for _, layer, reader in found]
    order = [name for name, _ in model.named_modules()]
    if block is None and (later := [path for path in unread if order.index(path) > order.index(found[-1][0])]):
        warnings.warn(
            f"TransMix reads the attention of {found[-1][0]!r}, since that of {later[-1]!r}, which comes after it, "
            f"cannot be read: block=-1 chooses this layer without a warning, another number another layer.",
            stacklevel=4,
        )
    index = -1 if block is None else block
    if not isinstance(index, int) or not -len(found) <= index < len(found):
        raise UserError(
            f'TransMix: block={block!r} must be "rollout" or a number from 0 to {len(found) - 1} (there are '
            f"{len(found)} layers with readable attention, the last is {found[-1][0]!r})."
        )
    _, layer, reader = found[index]
    return [ClassAttentionRecorder(layer, reader)]
