"""Layers without Python in between: what a layer does is written down once and done again by `_host.cpp`.

The device is done with a small layer long before Python has started all of it. So when a compiler is here, `_host.cpp`
is built, once for a version of torch, in the background; until then, and wherever it does not fit, Python does the
same. Nothing differs but the time the host takes: the same products and kernels run in the same order. Set
BATCHFORMER_HOST=python to leave all to Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchformer.kernels import attention, record
from batchformer.kernels.functions import LayerSettings, LayerWeights
from batchformer.kernels.layer import fast_backward, fast_forward
from batchformer.kernels.lean import lean_backward, lean_forward

SOURCE = Path(__file__).with_name("_host.cpp")
# A kind of input is written down when it has been seen so often: not what comes once, as images of all sizes do.
SEEN = 3
# Kinds that are remembered.
MOST_KINDS = 256


_recorded: dict[tuple[Any, ...], Known] = {}
_recording = threading.Lock()


class Known(NamedTuple):
    """What is known of a kind of input: how often it was seen, and then the number of its programs, or that there are
    none."""

    times: int
    number: int | None = None


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
    if type(x) not in (Tensor, nn.Parameter) or not x.is_contiguous() or _is_watched():
        return None
    exact = settings.dtype == torch.float32 and attention.is_exact()
    kind = (x.shape, x.dtype, x.device, weights.weight1.shape[0], weights.in_weight.dtype, settings, valid is None)
    key = (*kind, is_lean, exact)
    known = _recorded.get(key, Known(0))
    if known.times < SEEN:
        known = _seen_again(key, known, lambda: _record(x, weights, settings, valid, is_lean), (x, *weights))
    if known.number is None:
        return None
    inputs = [x, *weights] if valid is None else [x, *weights, valid]
    made = _operators().layer.default(inputs, known.number)
    return made[0] if made else None


def _is_watched() -> bool:
    """Whether somebody wants to see what is done: a mode of torch, or a compiler of backward passes."""
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch._C._len_torch_dispatch_stack() > 0 or (compiler is not None and compiler.compiled_autograd_enabled)


def _seen_again(
    key: tuple[Any, ...], known: Known, write_down: Callable[[], int | None], inputs: Sequence[Tensor]
) -> Known:
    """One more of this kind: the last time that is needed it is written down, if it can be just now."""
    if known.times + 1 >= SEEN:
        is_captured = inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured or not all(t.requires_grad for t in inputs) or _share_memory(inputs):
            return known
        known = _recorded[key] = Known(SEEN, write_down())
        return known
    with _recording:
        _recorded[key] = Known(known.times + 1)
        if len(_recorded) > MOST_KINDS:  # rather what was not written down
            del _recorded[next((old for old, it in _recorded.items() if it.times < SEEN), key)]
    return Known(0)


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Tied weights: what is done with the one and what with the other could not be told apart."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _record(
    x: Tensor, weights: LayerWeights, settings: LayerSettings, valid: Tensor | None, is_lean: bool
) -> int | None:
    """Forward and backward once, on these very inputs; torch's generator is left alone. The number of the programs, or
    None where that does not work: too little memory, say, or something that cannot be written down."""
    x, weights = x.detach(), LayerWeights(*[w.detach() for w in weights])
    inputs = [x, *weights, *([] if valid is None else [valid])]
    seed = torch.zeros(1, dtype=torch.int64, device=x.device) if settings.dropout > 0.0 else None
    new = getattr(torch.classes, library_name()).Program
    try:
        with _recording, torch.no_grad():
            ahead = record.Recorder(new(launcher()), inputs, record.start_of, seed)
            with ahead:
                out, saved, backward = (_lean if is_lean else _fast)(x, weights, settings, valid, seed)
            ahead.program.gives([ahead.view(tensor) for tensor in (out, *saved)])
            grad = torch.zeros_like(out)
            back = record.Recorder(new(launcher()), [grad, *saved], record.start_of)
            del out, saved
            with back:
                grad_x, gradients = backward(grad)
            if any(gradient is None for gradient in (grad_x, *gradients)):
                raise record.NotRecordable("a gradient is missing")
            back.program.gives([back.view(tensor) for tensor in (grad_x, *gradients)])  # type: ignore[arg-type]
    except (record.NotRecordable, torch.OutOfMemoryError):
        return None
    except Exception as problem:  # of a version of Triton, say, that is not known here
        warnings.warn(
            f"Layers go on by Python, not C++: writing one down failed ({type(problem).__name__}: {problem}). "
            "BATCHFORMER_HOST=python does without.", stacklevel=2,
        )  # fmt: skip
        return None
    return int(_operators().keep.default(ahead.program, back.program))


@cache
def _operators() -> Any:
    return getattr(torch.ops, library_name())


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
    if library().is_file():
        return _load()
    if _failed().is_file():
        return False
    if _builder is None:
        _builder = threading.Thread(target=build, name="batchformer: build of the host library", daemon=True)
        _builder.start()
        return None
    return None if _builder.is_alive() else library().is_file() and _load()


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
def library_name() -> str:
    """By what the library depends on."""
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    parts = (SOURCE.read_bytes(), torch.__version__.encode(), platform.machine().encode(), abi.encode())
    return f"batchformer_host_{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"


@cache
def library() -> Path:
    """Where it is, or will be."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "batchformer" / f"{library_name()}.so"


def _failed() -> Path:
    """What the compiler said, where it could not build the library: it would say the same again."""
    return library().with_suffix(".failed")


def build() -> str | None:
    """Build the library, unless it is there or another process builds it: then wait for that one. What went wrong."""
    import fcntl  # not on every system, and neither are the kernels

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "there is no C++ compiler"
    place, inside = library(), Path(torch.__file__).parent
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
                     f"-DBATCHFORMER_LIBRARY={library_name()}",
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
