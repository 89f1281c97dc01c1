"""Errors of a failed collective: name the ranks that do not respond, instead of a stack of socket messages."""

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from batchformer.errors import UserError, reason_of

# The remaining processes notice a lost one within moments of each other; each waits this many seconds for the others.
_WAIT_SECONDS = 3.0


class PeerLost(UserError):
    """Another process was killed, failed, or did not join the collective before the process group's timeout."""


@contextmanager
def report_lost_peers(group: ProcessGroup, what: str) -> Iterator[None]:
    """Convert a failed collective to a `PeerLost` that names this rank, what it sent, and the unresponsive ranks.

    Every process that sees the failure writes a key to the store of the process group; ranks without one are lost.
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
            f"ran fewer steps, or took longer than the timeout of the process group). [{reason_of(error)}]"
        ) from error


def _silent_ranks(rank: int, ranks: list[int]) -> list[int]:
    silent, deadline = [], time.monotonic() + _WAIT_SECONDS
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(_key(rank), "failed")
        for other in ranks:
            if not _answers(store, other, max(0.001, deadline - time.monotonic())):
                silent.append(other)
    except RuntimeError:  # the store was in the lost process: rank 0 where no launcher hosts it
        return [0]
    return silent


def _answers(store: dist.Store, other: int, seconds: float) -> bool:
    try:
        store.wait([_key(other)], datetime.timedelta(seconds=seconds))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # no key in time
        return False
    return True


def _key(rank: int) -> str:
    return f"batchformer/lost/{rank}"
