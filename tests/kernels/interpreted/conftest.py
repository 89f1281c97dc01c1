"""Kernels that are interpreted without detours."""

from __future__ import annotations

import os

from tests.interpreter import leave_out_detours

if os.environ.get("TRITON_INTERPRET") == "1":
    leave_out_detours()
