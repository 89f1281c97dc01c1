"""The two streams, and the only place that knows about halves.

In training the batch travels as two streams stacked on the batch axis: rows [0, B) are **plain**, rows [B, 2B) are
**related**: they went through batch attention. Everything after the insertion is shared and sees 2B rows, the loss sees
each target twice, metrics count the plain rows. At test time there is one stream and no module.

`"duplicate"`  the papers (Algorithm 1): the batch is doubled.            B rows in, 2B out.
`"split"`      the second half goes through the module, no extra cost.    B rows in,  B out.
`"single"`     all rows go through it, none stays plain (the papers' ablation without shared classifier).
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
        return torch.cat([x[:plain], relate(x[plain:])])  # with no row to relate, too: other processes may have some
    return torch.cat([x, relate(x)])


def carry_streams(x: Tensor, relate: Callable[[Tensor], Tensor], streams: Streams) -> Tensor:
    """A later insertion: plain rows stay, related rows are related once more."""
    plain = plain_count(x.shape[0], streams)
    return torch.cat([x[:plain], relate(x[plain:])]) if plain else relate(x)


def plain_count(rows: int, streams: Streams) -> int:
    """How many rows of an output with so many are plain: the first ones."""
    if streams == "single":
        return 0
    return rows // 2 if streams == "duplicate" else (rows + 1) // 2


def plain_rows(outputs: T, streams: Streams = "duplicate") -> T:
    """The plain rows of every tensor in a tensor, tuple, list or dict.

    The first tensor tells how many rows there are; tensors with another number of rows (an auxiliary head that branched
    off before the streams opened), 0-d tensors and the rest pass as they are. With `streams="single"` there is no plain
    stream: the outputs come back as they are.
    """
    rows = count_rows(outputs)
    if streams == "single" or rows is None:
        return outputs
    return _map_rows(outputs, lambda t: t[: plain_count(rows, streams)] if len(t) == rows else t)


def related_rows(outputs: T, streams: Streams = "duplicate") -> T:
    """The other rows: what `plain_rows` leaves out; with `streams="single"` all of them."""
    rows = count_rows(outputs)
    if rows is None:
        return outputs
    return _map_rows(outputs, lambda t: t[plain_count(rows, streams) :] if len(t) == rows else t)


def repeat_rows(values: T, rows: int) -> T:
    """Every tensor with so many rows, twice over; the rest as it is."""
    return _map_rows(values, lambda t: twice(t) if len(t) == rows else t)


def resize_rows(values: T, count: int) -> T:
    """The batch cut down to its first `count` rows, or filled up by starting over; what has no batch axis stays."""
    rows = count_rows(values)
    return _map_rows(values, lambda t: t[torch.arange(count, device=t.device) % rows] if len(t) == rows else t)


def repeat_targets(targets: T, outputs: Any) -> T:
    """The targets, repeated where the outputs carry two streams.

    Targets may be class ids (B,), soft labels (B, K), a list with one entry per image, or a dict (or tuple) of these;
    what has no batch axis inside a dict (a number, a name) stays as it is.
    The very same object comes back when there are as many as output rows, twice over when there are half as many.
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
    """Whether a value inside a dict or tuple has a batch axis; arrays of other libraries are refused, not passed by."""
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
