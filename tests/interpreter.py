"""Scripts that Triton's interpreter runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(script: Path) -> list[str]:
    """The lines it prints, from a process of its own: Triton interprets all kernels of a process or none."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
