"""Real processes over gloo, which run the checks of `checks.py` one after the other.

What each check returns (or how it failed) is saved for the tests, which compare it with one process.
"""

from __future__ import annotations

import datetime
import os
import traceback

import torch
import torch.distributed as dist

from . import checks
from .cases import BATCHES

TIMEOUT = datetime.timedelta(seconds=60)


def work(rank: int, folder: str, processes: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{processes}", rank=rank, world_size=processes, timeout=TIMEOUT
    )
    results = {}
    for name, check in checks.CHECKS[processes].items():
        try:
            results[name] = check(rank, BATCHES[processes])
        except BaseException:
            results[name] = traceback.format_exc()
        torch.save(results, f"{folder}/{processes}-{rank}.pt")
        if isinstance(results[name], str):
            break  # the others may be waiting for this one: better they are told
