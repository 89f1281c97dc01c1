"""Several processes for one test, each without anything of the process that runs the tests.

A fork of that process would inherit locks its threads hold; a fresh interpreter imports everything again, ten seconds
each. So they are forks of a server that has imported what they need and nothing else, started at the first use.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed
import torch.multiprocessing

_IMPORTED = ["torch.distributed", "torch.nn.parallel", "timm", "batchformer"]


def run_in_processes(work: Callable[[int, str], None], count: int, folder: Path) -> None:
    """`work(rank, folder)` in so many processes; raises what any of them raised.

    A process ends where it gives up its group, which is the last thing it does. Torch would free a wrapped model next:
    that waits, holding Python's lock, for a thread of gloo that may be waiting for this very lock.
    """
    multiprocessing.set_forkserver_preload(_IMPORTED)
    torch.multiprocessing.start_processes(_run, args=(work, str(folder)), nprocs=count, start_method="forkserver")


def _run(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    torch.distributed.destroy_process_group = _end  # type: ignore[assignment]
    work(rank, folder)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
