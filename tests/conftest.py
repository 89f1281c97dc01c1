"""What torch reads once, before it is imported (the processes that tests start read it, too); which tests are skipped."""

from __future__ import annotations

import os

import pytest

# With a worker per core more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and end a process that uses it: bfloat16 without it is the same, only slower.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker `gpu` is all that a test needs which needs a GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
