"""What torch reads once, before it is imported; the processes that tests start read it, too. And who is skipped."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

# With a worker per core more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and end a process that uses it: bfloat16 without it is the same, only slower.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# The library. Its annotated shapes are checked in a run of its own (`make test`), without what compilers read.
LIBRARY = ("nn", "attach", "mix", "losses", "metrics", "analysis")
CHECKED = [f"batchformer.{room}" for room in (*LIBRARY, "parallel")]
TESTS = Path(__file__).parent

if os.environ.get("CHECK_SHAPES") == "1":
    from jaxtyping import install_import_hook

    from tests import shapes

    sys.modules["checked_shapes"] = shapes  # by a name of its own: pytest makes a package `tests` of its own
    install_import_hook(CHECKED, "checked_shapes.only_shapes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in LIBRARY and item.get_closest_marker("traced") is None:
            item.add_marker(pytest.mark.shapes)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # the collector would look at millions of objects of modules again and again, 0.4 s each time
    if (processes := sys.modules.get("tests.processes")) is not None:  # a test that needs them was collected
        processes.start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker `gpu` is all that a test needs which needs a GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
