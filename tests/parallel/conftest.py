"""The processes are started once for all tests, also where several workers of pytest share them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .cases import BATCHES

WORKERS = Path(__file__).parent / "workers.py"


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes and rank: what every check of `checks.py` returned."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "parallel"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "log").exists():
            done = subprocess.run(
                [sys.executable, str(WORKERS), str(folder)], capture_output=True, text=True, timeout=400
            )
            (folder / "log").write_text(f"{done.returncode}\n{done.stdout}\n{done.stderr}")
    assert (folder / "log").read_text().startswith("0\n"), (folder / "log").read_text()
    results = {n: [torch.load(folder / f"{n}-{rank}.pt", weights_only=True) for rank in range(n)] for n in BATCHES}
    for processes, ranks in results.items():
        for rank, checks in enumerate(ranks):
            for name, result in checks.items():
                assert not isinstance(result, str), f"{name} on rank {rank} of {processes}: {result}"
    return results
