"""One forward of an attached model, watched: what entered and left every insertion and every block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from batchformer.attach import Attachment
from batchformer.nn import BatchAttention, BatchFormer
from batchformer.nn.streams import count_rows, plain_count
from batchformer.nn.token_layout import side_of_channels


@dataclass
class Call:
    """One call of an insertion. Tokens are (rows, position, dim) at the positions watched, without gradients.

    `attention` holds what entered the batch attention of each of the module's layers, and the mask that came with it.
    """

    path: str
    module: BatchFormer
    plain: Tensor | None
    related_in: Tensor
    related_out: Tensor
    attention: list[tuple[BatchAttention, Tensor, Tensor | None]] = field(default_factory=list)


@dataclass
class Forward:
    """What a watched forward saw: insertions in the order of their calls, tokens that left the blocks by path."""

    calls: list[Call] = field(default_factory=list)
    leaving: dict[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    outputs: Any = None


def watched_forward(attachment: Attachment, inputs: Any, blocks: list[str], positions: int | None) -> Forward:
    """A forward of `attachment.model` in the mode it is in; hooks are gone afterwards.

    `positions`: how many token positions to keep, spread evenly from the first (the class token of a ViT); None: all.
    """
    seen = Forward()
    with _hooks() as hooks:
        for module in dict.fromkeys(point.module for point in attachment.points):
            _watch_module(module, attachment, seen, positions, hooks)
        for path in blocks:
            _watch_block(attachment, path, seen, positions, inputs, hooks)
        seen.outputs = attachment.model(inputs)
    return seen


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


def as_tokens(x: Tensor, channels: str, positions: int | None = None) -> Tensor:
    """(rows, position, dim), detached, at evenly spread positions. The module relates each position by itself."""
    x = x.detach()
    if x.ndim == 4 and channels == "first":
        x = x.movedim(1, -1)
    return spread(x.reshape(x.shape[0], -1, x.shape[-1]), positions)


def spread(x: Tensor, positions: int | None) -> Tensor:
    """So many positions of the second axis, evenly from the first."""
    if positions is None or x.shape[1] <= positions:
        return x
    return x[:, torch.arange(positions, device=x.device) * x.shape[1] // positions]


def channels_of(module: BatchFormer) -> str:
    return getattr(module, "channels", "last")


def _watch_module(
    module: BatchFormer, attachment: Attachment, seen: Forward, positions: int | None, hooks: Any
) -> None:
    entered: list[tuple[BatchAttention, Tensor, Tensor | None]] = []

    def on_attention(attention: nn.Module, args: tuple[Any, ...]) -> None:
        valid = args[1] if len(args) > 1 else None
        valid = None if valid is None else spread(valid, positions)
        entered.append((attention, spread(args[0].detach(), positions), valid))  # type: ignore[arg-type]

    def on_call(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        assert isinstance(module, BatchFormer)
        before, after = (as_tokens(x, channels_of(module), positions) for x in (args[0], out))
        plain = plain_count(len(after), module.streams)
        opened = len(after) != len(before)  # the insertion that doubled the batch
        taken = [call.module for call in seen.calls].count(module)
        path = [point.paths[0] for point in attachment.points if point.module is module][taken]
        related_in = before if opened else before[plain:]
        call = Call(path, module, after[:plain] if plain else None, related_in, after[plain:], list(entered))
        entered.clear()
        seen.calls.append(call)

    hooks.append(module.register_forward_hook(on_call))
    for layer in module.layers:
        hooks.append(layer.self_attn.register_forward_pre_hook(on_attention))  # type: ignore[union-attr]


def _watch_block(
    attachment: Attachment, path: str, seen: Forward, positions: int | None, inputs: Any, hooks: Any
) -> None:
    module, images = attachment.points[0].module, count_rows(inputs)

    def on_leaving(block: nn.Module, args: Any, out: Any) -> None:
        tensor = out if isinstance(out, Tensor) else next((o for o in out if isinstance(o, Tensor)), None)
        if tensor is None or not tensor.is_floating_point() or tensor.ndim not in (2, 3, 4):
            return
        # a module before the classifier, where nothing has rows and columns, does not tell how maps are laid out
        channels = getattr(module, "channels", None) or side_of_channels(tensor, inputs)
        tokens = as_tokens(tensor, channels, positions)
        if seen.calls:
            plain = plain_count(len(tokens), module.streams)
            seen.leaving[path] = (tokens[:plain] if plain else None, tokens[plain:])
        else:  # a wide model has every image twice before the insertion, too
            seen.leaving[path] = (tokens[:images], None)

    hooks.append(attachment.model.get_submodule(path).register_forward_hook(on_leaving))


@contextmanager
def _hooks() -> Iterator[list[torch.utils.hooks.RemovableHandle]]:
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()
