"""Small layers without Python in between: what a layer does is written down once and done again by `_host.cpp`.

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
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchformer.kernels import record
from batchformer.kernels.functions import LayerSettings, LayerWeights
from batchformer.kernels.layer import fast_backward, fast_forward

SOURCE = Path(__file__).with_name("_host.cpp")
# Elements of an input beyond which the device is busy for longer than Python.
MOST_ELEMENTS = 14 * 2**20


class Programs(NamedTuple):
    ahead: Any
    back: Any


_recorded: dict[tuple[Any, ...], Programs | None] = {}
_recording = threading.Lock()


def run_layer(x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None) -> Tensor | None:
    """`layer.fast_layer` with a new seed; None where it has to be done by Python."""
    if not (x.is_cuda and torch.is_grad_enabled() and 0 < x.numel() <= MOST_ELEMENTS and is_ready()):
        return None
    return replay(x, weights, settings, valid)


def replay(x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None) -> Tensor | None:
    if torch._C._len_torch_dispatch_stack():  # somebody watches what is done
        return None
    exact = settings.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    key = (x.shape, x.dtype, x.device, settings, valid is None, exact)
    programs = _recorded.get(key, False)
    if programs is False:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        programs = _recorded[key] = _record(x, weights, settings, valid)
    if programs is None:
        return None
    inputs = [x, *weights] if valid is None else [x, *weights, valid]
    made = _layer()(inputs, *programs)
    return made[0] if made else None


@cache
def _layer() -> Any:
    return torch.ops.batchformer_host.layer.default


def _record(x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None) -> Programs | None:
    """Forward and backward once, on these very inputs; torch's generator is left alone."""
    x, weights = x.detach(), LayerWeights(*[w.detach() for w in weights])
    inputs = [x, *weights, *([] if valid is None else [valid])]
    seed = torch.zeros(1, dtype=torch.int64, device=x.device) if settings.dropout > 0.0 else None
    new = torch.classes.batchformer_host.Program
    try:
        with _recording, torch.no_grad():
            ahead = record.Recorder(new(launcher()), inputs, record.start_of, seed)
            with ahead:
                out, saved, facts = fast_forward(x, valid, seed, settings, weights)
            places = [None if tensor is None else ahead.view(tensor) for tensor in saved]
            # An input is kept as it is, not a view of it, so that torch sees when it is changed in between.
            kept = dict.fromkeys(place[0] for place in places if place is not None)
            ahead.program.gives([ahead.view(out), *(ahead.view(ahead.slots[slot]) for slot in kept)])
            grad = torch.zeros_like(out)
            back = record.Recorder(new(launcher()), [grad, *(ahead.slots[slot] for slot in kept)], record.start_of)
            with back:
                grad_x, gradients = fast_backward(grad, saved, facts)
            given = [back.view(t) for t in (grad_x, *gradients) if t is not None]
            if len(given) != 1 + len(weights):
                raise record.NotRecordable("a gradient is missing")
            back.program.gives(given)
    except record.NotRecordable:
        return None
    return Programs(ahead.program, back.program)


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
