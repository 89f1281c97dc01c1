"""A look through a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model and all its parts in eval mode, each back in its own mode afterwards.

    The flag alone is set: `train()` and `eval()` of other people's modules may do more (merge weights, say).
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
