"""What torch reads once, before it is imported; the processes that tests start read it, too."""

from __future__ import annotations

import os

# With a worker per core more threads only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines announce AMX and end a process that uses it: bfloat16 without it is the same, only slower.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
