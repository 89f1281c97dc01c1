"""Several processes for one test, each without anything of the process that runs the tests.

A fork of that process would inherit locks its threads hold; a fresh interpreter imports everything again, ten seconds
each. So they are forks of a server that has imported what they need and nothing else, started at the first use.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch.multiprocessing

_IMPORTED = ["torch.distributed", "torch.nn.parallel", "timm", "batchformer"]


def run_in_processes(work: Callable[[int, str], None], count: int, folder: Path) -> None:
    """`work(rank, folder)` in so many processes; raises what any of them raised."""
    multiprocessing.set_forkserver_preload(_IMPORTED)
    torch.multiprocessing.start_processes(work, args=(str(folder),), nprocs=count, start_method="forkserver")
