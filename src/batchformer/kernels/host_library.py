"""The library of `_host.cpp`: built on first use, in the background, once for a version of torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path

import torch

SOURCE, HEADER = (Path(__file__).with_name(name) for name in ("_host.cpp", "_host_products.h"))

_builder: threading.Thread | None = None
_ready: bool | None = None  # None: not known yet
_reason = "no reason given"  # why the build of this process failed
_problem = ""  # what keeps the library away, where that is worth a word
# What compilers say when they were stopped, or had no room: another time they may do better.
_PASSING = ("signal", "Killed", "No space left", "out of memory")


def is_ready() -> bool:
    """Whether the library is loaded. The first who asks has it built."""
    global _ready
    if _ready is None:
        try:
            _ready = _find_out()
        except (OSError, RuntimeError):  # no home, or one that may not be looked at
            _ready = False
        if _ready is False and _problem:
            warnings.warn(
                f"Layers go on by Python, not C++, which is slower for small ones: {_problem} "
                "BATCHFORMER_HOST=python does without.", stacklevel=2,
            )  # fmt: skip
    return bool(_ready)


def _find_out() -> bool | None:
    """None: it is being built."""
    global _builder, _problem
    _problem = ""
    if os.environ.get("BATCHFORMER_HOST") == "python":
        return False
    if _builder is not None and _builder.is_alive():
        return None
    if path().is_file():
        return _load()
    compiler = _compiler()
    if compiler is None:  # nor has Triton one
        return False
    failed = _failed(compiler)
    if failed.is_file():
        _problem = f"{compiler} could not build the library; why is written in {failed}, delete it to try again."
        return False
    if _builder is None:
        _builder = threading.Thread(target=_build_aside, name="batchformer: build of the host library", daemon=True)
        _builder.start()
        return None
    _problem = f"{compiler} could not build the library ({_reason.strip().splitlines()[0]})."
    return False


def _build_aside() -> None:
    global _reason
    _reason = build() or _reason


def wait_until_built() -> bool:
    """For benchmarks: whether layers run without Python, after what it takes to know."""
    if not is_ready() and _builder is not None:
        _builder.join()
    return is_ready()


def _load() -> bool:
    global _problem
    try:
        torch.ops.load_library(str(path()))
    except OSError as error:
        _problem = f"{path()} cannot be loaded ({str(error).splitlines()[0]})."
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


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _failed(compiler: str) -> Path:
    """What this compiler said, where it could not build the library: it would say the same again, another one, or a new
    version of it, perhaps not."""
    about = [compiler]
    for word in compiler.split():  # of "ccache g++", say, both
        if (found := shutil.which(word)) is not None:
            about += [os.path.realpath(found), str(os.stat(found).st_mtime_ns)]
    return path().with_suffix(f".{hashlib.sha256('|'.join(about).encode()).hexdigest()[:8]}.failed")


def build() -> str | None:
    """Build the library, unless it is there or another process builds it: then wait for that one. What went wrong."""
    import fcntl  # not on every system, and neither are the kernels

    compiler = _compiler()
    if compiler is None:
        return "there is no C++ compiler"
    place, inside = path(), Path(torch.__file__).parent
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            failed = _failed(compiler)
            if place.is_file() or failed.is_file():
                return None if place.is_file() else failed.read_text()
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
                    if done.returncode > 0 and not any(word in done.stderr for word in _PASSING):
                        failed.write_text(done.stderr)
                    return done.stderr or f"{compiler} ended with {done.returncode}"
                made.replace(place)
    except OSError as problem:
        return str(problem)
    return None
