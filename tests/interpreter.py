"""Triton's interpreter: scripts run by it, and its detours left out.

As a script this file runs the one that it is given, without those detours.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(script: Path) -> list[str]:
    """The lines it prints, from a process of its own: Triton interprets all kernels of a process or none."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def leave_out_detours() -> None:
    """Half of the interpreter's time, and nothing of what it computes or notices.

    For every function that a kernel calls, it puts its operations in the place of the language's once more, though the
    kernel's launch has done so. For every sum or product of integers it computes whether that overflows, and looks at
    the answer only while debugging. For every type of numpy's it lists all of them. These are parts of its own, so a
    version that was not looked at goes the long way.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.7."):
        return

    language, replace, replaced = interpreter.tl, interpreter._patch_lang, set()

    def replace_once(function):
        modules = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
        if replaced and modules <= replaced:
            return None  # only launches put the language's back, and they come first
        scope = replace(function)
        put_back = scope.restore

        def restore() -> None:
            put_back()
            replaced.clear()

        scope.restore = restore
        replaced.update(modules)
        return scope

    interpreter._patch_lang = replace_once

    look_up, known = interpreter._get_np_dtype, {}

    def look_up_once(kind):
        if kind.name not in known:
            known[kind.name] = look_up(kind)
        return known[kind.name]

    interpreter._get_np_dtype = look_up_once
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    leave_out_detours()
    runpy.run_path(sys.argv[1], run_name="__main__")
