"""Forward passes of an attached model with hooks: what entered and left every insertion and every block.

`record_forward` is one pass in the mode the model is in, with both streams. `record_inference` is V2's mini-batch
inference at one insertion: a pass without the modules and a pass with them, in eval mode, with one stream.
"""

import operator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from batchformer.attach import Attachment, attachment_of
from batchformer.attach.contexts import untouched
from batchformer.attach.plan import Point
from batchformer.attach.probe import first_tensor
from batchformer.errors import UserError
from batchformer.nn import BatchAttention, BatchFormer
from batchformer.nn.streams import count_rows, plain_count
from batchformer.nn.token_layout import TokenLayout, as_tokens, layout_of, side_of_channels

#: a layer's batch attention, what entered it, and the mask of valid positions that came with it
AttentionInput = tuple[BatchAttention, Float[Tensor, "batch position dim"], Bool[Tensor, "batch position"] | None]


@dataclass
class InsertionCall:
    """One call of an insertion. Tokens are (rows, position, dim) at the recorded positions, without gradients."""

    path: str
    module: BatchFormer
    plain: Tensor | None
    related_in: Tensor
    related_out: Tensor
    attention: list[AttentionInput] = field(default_factory=list)


@dataclass
class RecordedForward:
    """Insertions in the order of their calls, and by path the tokens (plain, related) that left the blocks."""

    calls: list[InsertionCall] = field(default_factory=list)
    leaving: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    outputs: Any = None


@dataclass
class RecordedInference:
    """One insertion in a forward of the batch: tokens (batch, position, dim) of the plain model, and with all modules.

    They are the output of the submodule `path` where the module is after it, and its input where the module is before
    it. `entered` is the input of the batch attention of the chosen layer, `valid` the mask of valid positions that came
    with it.
    """

    path: str
    side: str
    attention: BatchAttention
    entered: Tensor
    without: Tensor
    related: Tensor
    layout: TokenLayout
    valid: Tensor | None = None


def record_forward(attachment: Attachment, inputs: Any, blocks: list[str], positions: int | None) -> RecordedForward:
    """A forward of `attachment.model` in the mode it is in; hooks are removed afterwards.

    `positions`: how many token positions to keep, spread evenly from the first (the class token of a ViT); None: all.
    """
    record = RecordedForward()
    with ExitStack() as hooks:
        for module in dict.fromkeys(point.module for point in attachment.points):
            for hook in _record_insertion(module, attachment, record, positions):
                hooks.enter_context(hook)
        for path in blocks:
            hooks.enter_context(_record_block(attachment, path, record, positions, inputs))
        record.outputs = attachment.model(inputs)
    return record


@torch.no_grad()
def record_inference(
    model: nn.Module,
    images: Tensor,
    place: int | str = 0,
    layer: int = -1,
    *,
    level: int | None = None,
    **inputs: Tensor | None,
) -> RecordedInference:
    """Two forwards in eval mode, without and with the modules (V2's mini-batch inference); the model is restored.

    Of a detector `level` takes the cells of one feature map, 0 the largest. `inputs` go to the model by name: the
    `pixel_mask` of a detector, which marks image pixels, or the `noise` that masks patches in an autoencoder.
    """
    attachment = attachment_or_error(model)
    if not isinstance(images, Tensor):
        raise UserError(f"images must be one tensor with the whole batch, not {type(images).__name__}.")
    if len(images) < 2:
        raise UserError("one image has no other to look at: give two or more.")
    number = insertion_number(attachment, place)
    point = attachment.points[number]
    attention = attention_of_layer(point, layer)
    module, path = point.module, point.paths[0]
    channels = getattr(point.site, "channels", None) or _channels_of(module)
    entered: list[tuple[Tensor, ...]] = []
    passed: list[Any] = []
    related: list[Tensor] = []
    with untouched(attachment.model), ExitStack() as hooks:
        attachment.model.eval()
        hooks.enter_context(_record_side(attachment.model.get_submodule(path), point.side, passed))
        hooks.enter_context(attention.register_forward_pre_hook(lambda _, args: entered.append(args)))
        hooks.enter_context(module.layers[-1].register_forward_hook(lambda _, args, out: related.append(out)))
        shapes = None if level is None else _MapShapes(attachment.model, path, hooks)
        given = {name: value for name, value in inputs.items() if value is not None}
        with attachment.disabled():  # whatever contexts the caller is in
            attachment.model(images, **given)
        with attachment.infer_with_batch():
            attachment.model(images, **given)
    # a shared module is called at each of its insertions
    which = [earlier.module for earlier in attachment.points[:number]].count(module)
    x, valid = entered[which][0], entered[which][1] if len(entered[which]) > 1 else None
    plain = passed[0].transpose(1, 2) if getattr(point.site, "is_signal", False) else passed[0]
    without, after = as_tokens(plain, channels).float(), related[which].float()
    if shapes is None or level is None:
        layout = layout_of(plain, channels, images, attachment.model)
    else:
        cells, layout = shapes.cells(x.shape[1], level)
        valid = None if valid is None else valid[:, cells]
        x, without, after = x[:, cells], without[:, cells], after[:, cells]
    return RecordedInference(path, point.side, attention, x, without, after, layout, valid)


def attachment_or_error(model: nn.Module) -> Attachment:
    """The enabled attachment of a model; an error without one."""
    attachment = attachment_of(model)
    if attachment is None:
        raise UserError(f"nothing is attached to this {type(model).__name__}: call attach first.")
    if not all(point.module.enabled for point in attachment.points):
        raise UserError("the module is disabled here: look at it outside of `disabled()`.")
    return attachment


def insertion_number(attachment: Attachment, place: int | str) -> int:
    """The number of an insertion, given that or its path."""
    paths = [point.paths[0] for point in attachment.points]
    if isinstance(place, str):
        if place not in paths:
            raise UserError(f"no module is attached at {place!r}: there are {', '.join(map(repr, paths))}.")
        return paths.index(place)
    if not -len(paths) <= whole_number("place", place) < len(paths):
        raise UserError(f"place={place}: there are {len(paths)} insertions, counted from 0.")
    return place % len(paths)


def attention_of_layer(point: Point, layer: int) -> BatchAttention:
    """The batch attention of one of the module's layers."""
    layers = point.module.layers
    if not -len(layers) <= whole_number("layer", layer) < len(layers):
        raise UserError(
            f"layer={layer}: the module {point.side} {point.paths[0]!r} has {len(layers)} layers, counted from 0."
        )
    attention = layers[layer].self_attn
    assert isinstance(attention, BatchAttention)
    return attention


def sibling_blocks(attachment: Attachment) -> list[str]:
    """The submodules beside the insertions (all blocks of a ViT, all stages of a ResNet) that have parameters."""
    parents = dict.fromkeys(path.rpartition(".")[0] for path in attachment.paths)
    own = {id(p) for p in attachment.parameters()}
    found = []
    for parent in parents:
        children = attachment.model.get_submodule(parent).named_children()
        for name, child in children:
            if any(id(p) not in own for p in child.parameters()):
                found.append(f"{parent}.{name}" if parent else name)
    return found


def whole_number(name: str, value: Any) -> int:
    """The option as an int; numpy's and torch's numbers too."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise UserError(f"{name}={value!r} must be a whole number.") from None


def _record_insertion(
    module: BatchFormer, attachment: Attachment, record: RecordedForward, positions: int | None
) -> list[RemovableHandle]:
    """Hooks that append every call of the module to the record."""
    entered: list[AttentionInput] = []

    def on_attention(attention: nn.Module, args: tuple[Any, ...]) -> None:
        valid = args[1] if len(args) > 1 else None
        valid = None if valid is None else _evenly_spaced(valid, positions)
        entered.append((attention, _evenly_spaced(args[0].detach(), positions), valid))  # type: ignore[arg-type]

    def on_call(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        assert isinstance(module, BatchFormer)
        before, after = (_evenly_spaced(as_tokens(x, _channels_of(module)), positions) for x in (args[0], out))
        plain = plain_count(len(after), module.streams)
        doubled = len(after) != len(before)  # by this insertion, the first of the model
        taken = [call.module for call in record.calls].count(module)
        path = [point.paths[0] for point in attachment.points if point.module is module][taken]
        related_in = before if doubled else before[plain:]
        call = InsertionCall(path, module, after[:plain] if plain else None, related_in, after[plain:], list(entered))
        entered.clear()
        record.calls.append(call)

    attentions = [layer.self_attn for layer in module.layers]
    return [
        module.register_forward_hook(on_call),
        *(one.register_forward_pre_hook(on_attention) for one in attentions),  # type: ignore[union-attr]
    ]


def _record_block(
    attachment: Attachment, path: str, record: RecordedForward, positions: int | None, inputs: Any
) -> RemovableHandle:
    """A hook that stores the tokens of both streams that leave the block."""
    module, images = attachment.points[0].module, count_rows(inputs)

    def on_leaving(block: nn.Module, args: Any, out: Any) -> None:
        tensor = first_tensor(out)
        if tensor is None or not tensor.is_floating_point() or tensor.ndim not in (2, 3, 4):
            return
        # a module before the classifier acts on vectors, and does not know the layout of maps
        channels = getattr(module, "channels", None) or side_of_channels(tensor, inputs)
        tokens = _evenly_spaced(as_tokens(tensor, channels), positions)
        if record.calls:
            plain = plain_count(len(tokens), module.streams)
            record.leaving[path] = (tokens[:plain] if plain else None, tokens[plain:])
        else:  # a model whose input is doubled has every image twice before the insertion, too
            record.leaving[path] = (tokens[:images], None)

    return attachment.model.get_submodule(path).register_forward_hook(on_leaving)


def _record_side(block: nn.Module, side: str, passed: list[Any]) -> RemovableHandle:
    """A hook that stores what leaves the block, or what enters it by position or by name."""
    if side == "after":
        return block.register_forward_hook(lambda _, args, out: passed.append(first_tensor(out)))
    return block.register_forward_pre_hook(
        lambda _, args, kwargs: passed.append(first_tensor((*args, *kwargs.values()))), with_kwargs=True
    )


class _MapShapes:
    """Hooks for the sizes of the feature maps an encoder reads: from its arguments, or from the backbone's output."""

    def __init__(self, model: nn.Module, path: str, hooks: ExitStack) -> None:
        encoder, _, _ = path.rpartition(".layers.")
        self._listed: list[tuple[int, int]] = []
        self._last: tuple[int, int] | None = None
        try:
            backbone = model.get_submodule(encoder.rpartition(".")[0]).get_submodule("backbone")
        except AttributeError:
            raise UserError(f"{path!r} is no layer of the encoder of one of transformers' detectors.") from None
        on_encoder = model.get_submodule(encoder).register_forward_pre_hook(self._on_encoder, with_kwargs=True)
        hooks.enter_context(on_encoder)
        hooks.enter_context(backbone.register_forward_hook(self._on_backbone))

    def _on_encoder(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._listed = [(int(h), int(w)) for h, w in kwargs.get("spatial_shapes_list") or ()]

    def _on_backbone(self, module: nn.Module, args: Any, out: Any) -> None:
        while not isinstance(out, Tensor):
            out = out[0] if isinstance(out[0], Tensor) else out[-1]
        self._last = (out.shape[-2], out.shape[-1])

    def cells(self, positions: int, level: int) -> tuple[slice, TokenLayout]:
        """Which of so many positions are those of one map, 0 the largest, and its rows and columns."""
        grids = self._listed or [self._last or (0, 0)]
        assert sum(h * w for h, w in grids) == positions, "the cells of the maps are not the positions of the encoder"
        if not 0 <= whole_number("level", level) < len(grids):
            raise UserError(f"level={level}: the detector has {len(grids)} feature maps, counted from 0, the largest.")
        start, count = sum(h * w for h, w in grids[:level]), grids[level][0] * grids[level][1]
        return slice(start, start + count), TokenLayout(count, 0, grids[level])


def _evenly_spaced(x: Tensor, positions: int | None) -> Tensor:
    """So many positions of the second axis, evenly from the first. The module acts on each position independently."""
    if positions is None or x.shape[1] <= positions:
        return x
    return x[:, torch.arange(positions, device=x.device) * x.shape[1] // positions]


def _channels_of(module: BatchFormer) -> str:
    return getattr(module, "channels", "last")
