"""The kernels, run on the CPU by Triton's interpreter, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..selection import others_slow

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize(
    "name", others_slow(sorted(path.name for path in FOLDER.glob("test_*.py")), ["test_attention_kernels.py"])
)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is such a process already")
def test_kernels_hold_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for variable in [variable for variable in environment if variable.startswith("PYTEST_")]:
        del environment[variable]  # this process may be one of several that share the work; the new one is alone
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
