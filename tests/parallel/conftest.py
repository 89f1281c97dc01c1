"""The processes are started once for all tests, also where several workers of pytest share them."""

from __future__ import annotations

import fcntl
import functools
import os
from typing import Any

import pytest
import torch

from ..processes import run_in_processes
from . import workers
from .cases import BATCHES


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes and rank: what every check of `checks.py` returned."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "parallel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "problem").exists():
            try:
                for processes in sorted(BATCHES):
                    work = functools.partial(workers.work, processes=processes)
                    run_in_processes(work, processes, folder, several_groups=True)
                (folder / "problem").write_text("")
            except RuntimeError as problem:
                (folder / "problem").write_text(str(problem))
    assert (folder / "problem").read_text() == ""
    results = {n: [torch.load(folder / f"{n}-{rank}.pt", weights_only=True) for rank in range(n)] for n in BATCHES}
    for processes, ranks in results.items():
        for rank, checks in enumerate(ranks):
            for name, result in checks.items():
                assert not isinstance(result, str), f"{name} on rank {rank} of {processes}: {result}"
    return results
