"""The two streams. No other code depends on which rows belong to which stream.

In training the batch consists of two streams stacked on the batch axis: rows [0, B) are **plain**; rows [B, 2B) are
**related**, that is, they went through batch attention. Everything after the insertion is shared and sees 2B rows, the
loss sees each target twice, and metrics count the plain rows. At test time there is one stream and no module.

`"duplicate"`  the papers (Algorithm 1): the batch is doubled.            B rows in, 2B out.
`"split"`      the second half goes through the module, no extra cost.    B rows in,  B out.
`"single"`     all rows go through it (the papers' ablation without shared classifier).
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from batchformer.errors import UserError

Streams = Literal["duplicate", "split", "single"]
STREAMS: tuple[Streams, ...] = ("duplicate", "split", "single")
T = TypeVar("T")


def open_streams(x: Tensor, relate: Callable[[Tensor], Tensor], streams: Streams) -> Tensor:
    """Plain rows, then related rows."""
    if streams == "single":
        return relate(x)
    if streams == "split":
        plain = plain_count(x.shape[0], streams)
        return torch.cat([x[:plain], relate(x[plain:])])  # also without rows to relate: other processes may have some
    return torch.cat([x, relate(x)])


def carry_streams(x: Tensor, relate: Callable[[Tensor], Tensor], streams: Streams) -> Tensor:
    """A later insertion: plain rows pass unchanged, related rows go through the module again."""
    plain = plain_count(x.shape[0], streams)
    return torch.cat([x[:plain], relate(x[plain:])]) if plain else relate(x)


def plain_count(rows: int, streams: Streams) -> int:
    """Number of plain rows, which come first, in an output with this many rows."""
    if streams == "single":
        return 0
    return rows // 2 if streams == "duplicate" else (rows + 1) // 2


def plain_rows(outputs: T, streams: Streams = "duplicate") -> T:
    """The plain rows of every tensor in a tensor, tuple, list or dict.

    The first tensor determines the number of rows. Tensors with another number of rows (from an auxiliary head that
    branches off before the insertion), 0-d tensors and other values are returned unchanged, and so are all outputs with
    `streams="single"`, which has no plain stream.
    """
    rows = count_rows(outputs)
    if streams == "single" or rows is None:
        return outputs
    return _map_rows(outputs, lambda t: t[: plain_count(rows, streams)] if len(t) == rows else t)


def related_rows(outputs: T, streams: Streams = "duplicate") -> T:
    """The rows that `plain_rows` leaves out; with `streams="single"` all rows."""
    rows = count_rows(outputs)
    if rows is None:
        return outputs
    return _map_rows(outputs, lambda t: t[plain_count(rows, streams) :] if len(t) == rows else t)


def repeat_rows(values: T, rows: int) -> T:
    """Repeat every tensor with this many rows; other values are unchanged."""
    return _map_rows(values, lambda t: twice(t) if len(t) == rows else t)


def resize_rows(values: T, count: int) -> T:
    """Truncate the batch to `count` rows, or repeat it cyclically; values without batch axis are unchanged."""
    rows = count_rows(values)
    return _map_rows(values, lambda t: t[torch.arange(count, device=t.device) % rows] if len(t) == rows else t)


def repeat_targets(targets: T, outputs: Any) -> T:
    """The targets, repeated if the outputs have two streams.

    Targets may be class ids (B,), soft labels (B, K), a list with one entry per image, or a dict (or tuple) of these;
    values without a batch axis inside a dict (a number, a name) are unchanged. If there are as many targets as output
    rows, the same object is returned; if there are half as many, they are repeated.
    """
    rows = count_rows(outputs)
    if rows is None:
        raise UserError("repeat_targets found no tensor with a batch axis in the outputs: pass the logits.")
    return _repeat(targets, rows)


def _repeat(targets: Any, rows: int) -> Any:
    if isinstance(targets, Mapping):
        repeated = {k: _repeat(v, rows) if _has_rows(v) else v for k, v in targets.items()}
        unchanged = all(repeated[k] is v for k, v in targets.items())
        return targets if unchanged else _same_kind(targets, repeated)
    if isinstance(targets, tuple):
        items = [_repeat(v, rows) if _has_rows(v) else v for v in targets]
        return targets if all(a is b for a, b in zip(items, targets, strict=True)) else alike(targets, items)
    if not isinstance(targets, Tensor | list) or (isinstance(targets, Tensor) and not targets.ndim):
        kind = "a single number" if isinstance(targets, Tensor) else f"the type {type(targets).__name__}"
        raise UserError(
            f"targets of {kind} cannot be repeated for the second stream: pass a tensor, a "
            f"list with one entry per image, or a dict or tuple of these."
        )
    count = len(targets)
    if count == rows:
        return targets
    if 2 * count != rows:
        raise UserError(
            f"{count} targets for {rows} output rows: there must be as many targets as rows, or half as many "
            f"(two streams); check that targets and outputs come from the same batch."
        )
    return twice(targets)


def twice(values: Any) -> Any:
    """The rows of a tensor, or the entries of a list, for both streams."""
    return torch.cat([values, values]) if isinstance(values, Tensor) else values + values


def tensors_with_rows(outputs: Any) -> list[Tensor]:
    """All tensors with a batch axis in a (nested) output."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.ndim else []
    items = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    return [found for item in items for found in tensors_with_rows(item)]


def count_rows(outputs: Any) -> int | None:
    """Rows of the first tensor with a batch axis in a (nested) output; None where there is none."""
    if isinstance(outputs, Tensor):
        return outputs.shape[0] if outputs.ndim else None
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, tuple | list):
        for item in outputs:  # a plain loop: torch 2.11 compiles no generator with an assignment in it
            rows = count_rows(item)
            if rows is not None:
                return rows
    return None


def _has_rows(value: Any) -> bool:
    """Whether a value inside a dict or tuple has a batch axis; arrays of other libraries count and are refused."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return value.ndim > 0
    return isinstance(value, Mapping | list | tuple)


def _map_rows(outputs: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(outputs, Tensor):
        return change(outputs) if outputs.ndim else outputs
    if isinstance(outputs, Mapping):
        return _same_kind(outputs, {k: _map_rows(v, change) for k, v in outputs.items()})
    if isinstance(outputs, tuple | list):
        return alike(outputs, [_map_rows(v, change) for v in outputs])
    return outputs


def _same_kind(template: Mapping[str, Any], items: dict[str, Any]) -> Any:
    """A mapping of the template's kind (an ordered or default dict, the output class of a library)."""
    made = copy.copy(template)
    for key, value in items.items():
        made[key] = value  # type: ignore[index]
    return made


def alike(template: Any, items: list[Any]) -> Any:
    """A tuple, named tuple or list of the template's kind."""
    return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
