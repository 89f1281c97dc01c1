"""A model with a plan in place, for a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from batchformer.attach.insertion import InstanceForward
from batchformer.nn.attention import BatchAttention
from batchformer.nn.batchformer import BatchFormer


@contextmanager
def on_trial(pieces: Sequence[InstanceForward], modules: Sequence[nn.Module], **settings: Any) -> Iterator[None]:
    """With the pieces put on the model, and the modules as a dry run needs them: a model that is yet to move to the GPU
    runs here on the CPU, where the kernels asked for may not; and other processes need not take part in this.
    `settings` are further attributes of the modules for the time being.
    """
    parts = [part for module in modules for part in module.modules()]
    wanted = {part: {"backend": "auto"} for part in parts if isinstance(part, BatchAttention)}
    wanted |= {part: {"scope": "local", **settings} for part in parts if isinstance(part, BatchFormer)}
    kept = {part: {name: getattr(part, name) for name in values} for part, values in wanted.items()}
    for piece in pieces:
        piece.put()
    try:
        _set(wanted)
        yield
    finally:
        _set(kept)
        for piece in reversed(pieces):
            piece.take_away()


def _set(values: dict[Any, dict[str, Any]]) -> None:
    for part, given in values.items():
        for name, value in given.items():
            setattr(part, name, value)
