"""The library of `_host.cpp`: built on first use, in the background, once for a version of torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("_host.cpp", "_host_products.h"))

_builder: threading.Thread | None = None
_ready: bool | None = None  # None: not known yet


def is_ready() -> bool:
    """Whether the library is loaded. The first who asks has it built."""
    global _ready
    if _ready is None:
        try:
            _ready = _find_out()
        except (OSError, RuntimeError):  # no home, or one that may not be looked at
            _ready = False
    return bool(_ready)


def _find_out() -> bool | None:
    """None: it is being built."""
    global _builder
    if os.environ.get("BATCHFORMER_HOST") == "python":
        return False
    if path().is_file():
        return _load()
    if _failed().is_file():
        return False
    if _builder is None:
        _builder = threading.Thread(target=build, name="batchformer: build of the host library", daemon=True)
        _builder.start()
        return None
    return None if _builder.is_alive() else path().is_file() and _load()


def wait_until_built() -> bool:
    """For benchmarks: whether layers run without Python, after what it takes to know."""
    if not is_ready() and _builder is not None:
        _builder.join()
    return is_ready()


def _load() -> bool:
    try:
        torch.ops.load_library(str(path()))
    except OSError:
        return False
    return True


@cache
def name() -> str:
    """By what the library depends on."""
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    about = (torch.__version__, platform.machine(), abi)
    parts = (SOURCE.read_bytes(), HEADER.read_bytes(), *map(str.encode, about))
    return f"batchformer_host_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"


@cache
def path() -> Path:
    """Where the library is, or will be."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "batchformer" / f"{name()}.so"


def _failed() -> Path:
    """What the compiler said, where it could not build the library: it would say the same again."""
    return path().with_suffix(".failed")


def build() -> str | None:
    """Build the library, unless it is there or another process builds it: then wait for that one. What went wrong."""
    import fcntl  # not on every system, and neither are the kernels

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler"
    place, inside = path(), Path(torch.__file__).parent
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.is_file() or _failed().is_file():
                return None if place.is_file() else _failed().read_text()
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                made = Path(folder) / place.name
                done = subprocess.run(
                    [*compiler.split(), "-O2", "-std=c++17", "-fPIC", "-shared", str(SOURCE), "-o", str(made),
                     f"-DBATCHFORMER_LIBRARY={name()}",
                     f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-I{inside / 'include'}",
                     f"-I{inside / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", f"-L{inside / 'lib'}",
                     "-ltorch", "-ltorch_cpu", "-lc10"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    _failed().write_text(done.stderr)
                    return done.stderr
                made.replace(place)
    except OSError as problem:
        return str(problem)
    return None
