"""A model with a plan in place, for a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from batchformer.attach.insertion import InstanceForward
from batchformer.attach.temporarily import temporarily
from batchformer.nn.attention import BatchAttention
from batchformer.nn.batchformer import BatchFormer


@contextmanager
def on_trial(pieces: Sequence[InstanceForward], modules: Sequence[nn.Module], **settings: Any) -> Iterator[None]:
    """The pieces are on the model meanwhile, and the modules are set for a dry run: any backend, because a model that
    is yet to move to the GPU runs on the CPU here; and scope="local", because other processes take no part.
    `settings` are further attributes of the modules for the time being.
    """
    parts = [part for module in modules for part in module.modules()]
    wanted = {part: {"backend": "auto"} for part in parts if isinstance(part, BatchAttention)}
    wanted |= {part: {"scope": "local", **settings} for part in parts if isinstance(part, BatchFormer)}
    for piece in pieces:
        piece.put()
    try:
        with temporarily(wanted):
            yield
    finally:
        for piece in reversed(pieces):
            piece.take_away()
