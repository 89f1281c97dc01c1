"""The kernels, run on the CPU by Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FAST = [  # each kernel, in one process
    "test_attention_kernels.py",
    "test_random_bits.py",
    "test_layer_kernels.py::test_work_done_in_pieces_by_several_programs_gives_the_same",
    "test_layer_kernels.py::test_a_sum_found_in_the_gradient_kernel_is_the_one_that_was_stored",
    "test_layer_kernels.py::test_parts_of_very_many_lines_are_summed_as_short_ones_are",
]


@pytest.mark.parametrize("names", [FAST, pytest.param([""], marks=pytest.mark.slow)], ids=["each", "all"])
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is such a process already")
def test_kernels_hold_in_the_interpreter(names: list[str]) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for variable in [variable for variable in environment if variable.startswith("PYTEST_")]:
        del environment[variable]  # this process may be one of several that share the work; the new one is alone
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"{FOLDER}/{n}" for n in names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
