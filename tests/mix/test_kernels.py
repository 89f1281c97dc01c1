"""The Triton kernels of this room compute what the tensor operations beside them do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_agree_with_the_tensor_operations():
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpret_kernels.py")  # in its own process: Triton interprets all or nothing
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        *("cut 4x4", "cut 3x5", "cut 1x6", "cut 8x8"),
        *("saliency 40x33", "saliency 9x70"),
    ]
