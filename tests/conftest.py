"""One thread for each process of the tests: with a worker per core, more of them only wait for one another."""

from __future__ import annotations

import os

# Before torch is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
