"""Launched as users launch it: by torchrun, and under Lightning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import batchformer as bf

from ..processes import free_ports, run_in_processes
from . import lightning_workers
from .models import images_and_labels, make_token_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "global_batch.py"
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_runs_under_torchrun() -> None:
    printed = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE))
    lines = printed.splitlines()
    assert lines[-1].startswith("2 processes: plain weights, test accuracy")
    # rank 0 has 59 of the 117 images: 32 values of 4 bytes each go out, and as many come back as gradients
    assert [f"{59 * 32 * 4 * 2:,} bytes sent" in line for line in lines[:-1]] == [True] * 6


THREADS_AFTERWARDS = """
import os, pathlib, torch, torch.distributed as dist
import batchformer.parallel
def gloo_threads():
    return sum("gloo" in task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
during = gloo_threads()
del model
dist.destroy_process_group()
print(during > 0, gloo_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux lists them")
def test_no_thread_of_a_destroyed_group_outlives_it() -> None:
    """One that does may want the interpreter while that ends, and then the whole process aborts."""
    assert run("-c", THREADS_AFTERWARDS).split() == ["True", "0"]


def test_lightning_trains_the_weights_that_one_process_would(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text(json.dumps(free_ports(3)))
    run_in_processes(lightning_workers.work, 2, tmp_path, several_groups=True)
    model = make_token_model("local")
    images, labels = images_and_labels(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        bf.TwoStreamLoss(F.cross_entropy)(model(images), labels).backward()
        optimizer.step()
    expected = dict(model.named_parameters())
    for rank in range(2):
        weights = torch.load(tmp_path / f"{rank}.pt")
        assert "failed" not in weights, weights["failed"]
        for strategy in ("ddp", "fsdp"):
            for key, weight in weights[strategy].items():
                torch.testing.assert_close(weight, expected[key], atol=1e-10, rtol=1e-8)
    assert "2 processes: plain weights, test accuracy" in (tmp_path / "example-0.txt").read_text()
