"""Mixing in the workers of a DataLoader: what holds there, and what is copied without a word."""

from __future__ import annotations

import warnings

import torch
from torch.utils.data import get_worker_info

from batchformer.errors import UserError

_warned = False


def warn_of_copied_numbers(name: str, generator: torch.Generator | None, seed: int | None) -> None:
    """Once in a worker: its generator is a copy, with the `seed` the mix was made with unless somebody gave it another.

    Without a generator there is nothing to say: torch gives every worker, in every epoch, a seed of its own.
    """
    global _warned
    if not _warned and generator is not None and get_worker_info() is not None and generator.initial_seed() == seed:
        _warned = True
        warnings.warn(
            f"{name} draws from a generator of its own in a DataLoader's worker, and every worker begins with the same "
            f"copy of it, whenever workers are started: leave generator= out (torch seeds each worker), or seed it in "
            f"worker_init_fn.",
            UserWarning,
            stacklevel=2,
        )


def refuse_in_worker(name: str) -> None:
    """Of methods that ask the model in training: a worker has a copy of it, as it was when the worker began."""
    if get_worker_info() is not None:
        raise UserError(
            f"{name} asks the model that is trained, and a DataLoader's worker has only a copy of it: mix in the "
            f"training step, not in collate_fn."
        )
