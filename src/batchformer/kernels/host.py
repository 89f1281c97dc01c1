"""Layers without Python in between: what a layer does is written down once and done again by `_host.cpp`.

The device is done with a small layer long before Python has started all of it. So when a compiler is here, `_host.cpp`
is built, once for a version of torch, in the background; until then, and wherever it does not fit, Python does the
same. Nothing differs but the time the host takes: the same products and kernels run in the same order. Set
BATCHFORMER_HOST=python to leave all to Python.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchformer.kernels import record
from batchformer.kernels.functions import LayerSettings, LayerWeights
from batchformer.kernels.layer import fast_backward, fast_forward
from batchformer.kernels.lean import lean_backward, lean_forward

SOURCE = Path(__file__).with_name("_host.cpp")
# A kind of input is written down when it has been seen so often: not what comes once, as images of all sizes do.
SEEN = 3
# Kinds that are remembered.
MOST_KINDS = 256


class Programs(NamedTuple):
    ahead: Any
    back: Any
    kept_inputs: int


_recorded: dict[tuple[Any, ...], Programs | int | None] = {}  # a number: so often seen; None: it cannot be done
_recording = threading.Lock()


def run_layer(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, is_lean: bool = False
) -> Tensor | None:
    """`layer.fast_layer` or `lean.lean_layer` with a new seed; None where it has to be done by Python."""
    if not (x.is_cuda and x.numel() and torch.is_grad_enabled() and is_ready()):
        return None
    return replay(x, weights, settings, valid, is_lean)


def replay(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, is_lean: bool = False
) -> Tensor | None:
    exact = settings.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    key = (x.shape, x.dtype, x.device, settings, valid is None, is_lean, exact)
    programs = _recorded.get(key, 0)
    if isinstance(programs, int):
        programs = _seen_again(key, programs, lambda: _record(x, weights, settings, valid, is_lean))
    if programs is None or torch._C._len_torch_dispatch_stack():  # the latter: somebody watches what is done
        return None
    inputs = [x, *weights] if valid is None else [x, *weights, valid]
    made = _layer()(inputs, *programs)
    return made[0] if made else None


def _seen_again(key: tuple[Any, ...], times: int, write_down: Callable[[], Programs | None]) -> Programs | None:
    is_busy = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if is_busy or torch._C._len_torch_dispatch_stack():
        return None
    if times + 1 < SEEN:
        _recorded[key] = times + 1
        if len(_recorded) > MOST_KINDS:  # rather what was not written down
            del _recorded[next((old for old, known in _recorded.items() if isinstance(known, int)), key)]
        return None
    programs = _recorded[key] = write_down()
    return programs


@cache
def _layer() -> Any:
    return torch.ops.batchformer_host.layer.default


def _record(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, is_lean: bool
) -> Programs | None:
    """Forward and backward once, on these very inputs; torch's generator is left alone."""
    x, weights = x.detach(), LayerWeights(*[w.detach() for w in weights])
    inputs = [x, *weights, *([] if valid is None else [valid])]
    seed = torch.zeros(1, dtype=torch.int64, device=x.device) if settings.dropout > 0.0 else None
    new = torch.classes.batchformer_host.Program
    try:
        with _recording, torch.no_grad():
            ahead = record.Recorder(new(launcher()), inputs, record.start_of, seed)
            with ahead:
                out, saved, backward = (_lean if is_lean else _fast)(x, weights, settings, valid, seed)
            # Of the inputs themselves are kept, not views of them, so that torch sees when one is changed in between.
            kept = {slot: inputs[slot] for slot, *_ in map(ahead.view, saved) if slot < len(inputs)}
            made = [tensor for tensor in saved if ahead.view(tensor)[0] >= len(inputs)]
            ahead.program.gives([ahead.view(tensor) for tensor in (out, *kept.values(), *made)])
            grad = torch.zeros_like(out)
            back = record.Recorder(new(launcher()), [grad, *kept.values(), *made], record.start_of)
            del out, saved, made
            with back:
                grad_x, gradients = backward(grad)
            if any(gradient is None for gradient in (grad_x, *gradients)):
                raise record.NotRecordable("a gradient is missing")
            back.program.gives([back.view(tensor) for tensor in (grad_x, *gradients)])  # type: ignore[arg-type]
    except record.NotRecordable:
        return None
    return Programs(ahead.program, back.program, len(kept))


Backward = Callable[[Tensor], tuple[Tensor | None, list[Tensor | None]]]


def _fast(x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None,
          seed: Tensor | None) -> tuple[Tensor, list[Tensor], Backward]:  # fmt: skip
    out, saved, facts = fast_forward(x, valid, seed, settings, weights)
    return out, [tensor for tensor in saved if tensor is not None], lambda grad: fast_backward(grad, saved, facts)


def _lean(x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None,
          seed: Tensor | None) -> tuple[Tensor, list[Tensor], Backward]:  # fmt: skip
    out = lean_forward(x, weights, settings, valid, seed)
    saved = [tensor for tensor in (x, valid, seed, *weights) if tensor is not None]
    return out, saved, lambda grad: lean_backward(grad, x, weights, settings, valid, seed)


@cache
def launcher() -> int:
    """The address of the driver's function that starts a kernel."""
    start = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    return ctypes.cast(start, ctypes.c_void_p).value or 0


_builder: threading.Thread | None = None
_ready: bool | None = None  # None: not known yet


def is_ready() -> bool:
    """Whether the library is loaded. The first who asks has it built."""
    global _builder, _ready
    if _ready is not None:
        return _ready
    if os.environ.get("BATCHFORMER_HOST") == "python":
        _ready = False
    elif library().is_file():
        _ready = _load()
    elif _builder is None:
        _builder = threading.Thread(target=build, name="batchformer: build of the host library", daemon=True)
        _builder.start()
    elif not _builder.is_alive():  # it has failed, or made the file since it was looked for
        _ready = library().is_file() and _load()
    return bool(_ready)


def wait_until_built() -> bool:
    """For benchmarks: whether small layers run without Python, after what it takes to know."""
    if not is_ready() and _builder is not None:
        _builder.join()
    return is_ready()


def _load() -> bool:
    try:
        torch.ops.load_library(str(library()))
    except OSError:
        return False
    return True


@cache
def library() -> Path:
    """Where it is, or will be: by what it depends on."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parts = (SOURCE.read_bytes(), torch.__version__.encode(), platform.machine().encode())
    return home / "batchformer" / f"host-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def build() -> str | None:
    """Build the library, unless it is there or another process builds it: then wait for that one. What went wrong."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler"
    place, inside = library(), Path(torch.__file__).parent
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.is_file():
                return None
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                made = Path(folder) / place.name
                done = subprocess.run(
                    [*compiler.split(), "-O2", "-std=c++17", "-fPIC", "-shared", str(SOURCE), "-o", str(made),
                     f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-I{inside / 'include'}",
                     f"-I{inside / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", f"-L{inside / 'lib'}",
                     "-ltorch", "-ltorch_cpu", "-lc10"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    return done.stderr
                made.replace(place)
    except OSError as problem:
        return str(problem)
    return None
