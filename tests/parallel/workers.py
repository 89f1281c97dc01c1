"""Real processes over gloo: `python workers.py FOLDER` forks 2, 3 and 4 of them, one set after the other.

One fresh interpreter that imports torch once and forks costs a fraction of processes that each import it. What each
check returns (or how it failed) is saved for the tests, which compare it with one process.
"""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.parallel import checks
from tests.parallel.cases import BATCHES, CASES

TIMEOUT = datetime.timedelta(seconds=60)


def work(rank: int, processes: int, folder: str) -> None:
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


def main(folder: str) -> None:
    for processes in sorted(BATCHES):
        torch.multiprocessing.start_processes(work, args=(processes, folder), nprocs=processes, start_method="fork")


if __name__ == "__main__":
    assert CASES
    main(sys.argv[1])
