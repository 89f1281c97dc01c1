"""When a process stops answering: an error that says who, instead of a stack of socket messages."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from batchformer.errors import UserError

# Survivors learn of a loss within moments of each other; so many seconds each waits for the word of the others.
_PATIENCE = 3.0


class PeerLost(UserError):
    """Another process died, failed, or did not come to the exchange before the process group's timeout."""


@contextmanager
def naming_the_lost(group: ProcessGroup, what: str) -> Iterator[None]:
    """Turns a failed exchange into a `PeerLost` that names this rank, what it sent, and the ranks that are silent.

    Whoever sees the failure says so in the store that the processes met in: silent is who does not.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors, gloo's nothing more special
        rank = dist.get_rank()
        silent = _silent_ranks(rank, dist.get_process_group_ranks(group))
        who = f"no word from rank {', '.join(map(str, silent))}" if silent else "every rank is there, but one failed"
        raise PeerLost(
            f"rank {rank} lost its peers while exchanging {what}: {who}; look at the log of that process (it stopped, "
            f"ran fewer steps, or took longer than the timeout of the process group). [{_first_sentence(error)}]"
        ) from error


def _silent_ranks(rank: int, ranks: list[int]) -> list[int]:
    silent, deadline = [], time.monotonic() + _PATIENCE
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(rank), "failed")
        for other in ranks:
            if not _hears(store, other, max(0.001, deadline - time.monotonic())):
                silent.append(other)
    except RuntimeError:  # the store lives in the process that is gone: rank 0 where no launcher keeps it
        return [0]
    return silent


def _hears(store: dist.Store, other: int, patience: float) -> bool:
    try:
        store.wait([_key(other)], datetime.timedelta(seconds=patience))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # nobody has said it in time
        return False
    return True


def _key(rank: int) -> str:
    return f"batchformer/lost/{rank}"


def _first_sentence(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
