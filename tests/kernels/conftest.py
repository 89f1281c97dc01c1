"""Triton decides when it is first imported whether its kernels are compiled or interpreted.

The tests in `interpreted/` need the latter, so they run in processes of their own (`test_in_the_interpreter.py`); here
they would be too late, whatever test came first.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
