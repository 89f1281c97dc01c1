"""Layers without Python in between: what a layer does is written down once and done again by `_host.cpp`.

The device is done with a small layer long before Python has started all of it. Until the library is built
(`host_library.py`), and wherever it does not fit, Python does the same. Nothing differs but the time the host takes:
the same products and kernels run in the same order. Set BATCHFORMER_HOST=python to leave all to Python, or =torch to
leave products in bfloat16 to torch, which go to cuBLAS without torch in between otherwise.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from batchformer.kernels import attention, host_library, record
from batchformer.kernels.functions import LayerSettings, LayerWeights
from batchformer.kernels.layer import fast_backward, fast_forward
from batchformer.kernels.lean import lean_backward, lean_forward

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
    if not (x.is_cuda and x.numel() and torch.is_grad_enabled() and host_library.is_ready()):
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
    new = getattr(torch.classes, host_library.name()).Program
    try:
        with _recording, torch.no_grad():
            ahead = record.Recorder(new(launcher(), blas()), inputs, record.start_of, seed)
            with ahead:
                out, saved, backward = (_lean if is_lean else _fast)(x, weights, settings, valid, seed)
            ahead.program.gives([ahead.view(tensor) for tensor in (out, *saved)])
            grad = torch.zeros_like(out)
            back = record.Recorder(new(launcher(), blas()), [grad, *saved], record.start_of)
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
    return getattr(torch.ops, host_library.name())


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


# torch's function for the handle of cuBLAS, as C++ spells it: without an argument, and with one
_HANDLES = ("_ZN2at4cuda24getCurrentCUDABlasHandleEv", "_ZN2at4cuda24getCurrentCUDABlasHandleEb")


@cache
def blas() -> list[int]:
    """The addresses of torch's function for its handle of cuBLAS, and of cuBLAS' functions for the mode and a product;
    none where they are not found, or not wanted: torch does all products then."""
    if os.environ.get("BATCHFORMER_HOST") == "torch":
        return []
    try:
        library = ctypes.CDLL("libtorch_cuda.so")
        handle_of = next(getattr(library, name) for name in _HANDLES if hasattr(library, name))
        functions = [handle_of, library.cublasSetMathMode, library.cublasGemmEx]
    except (OSError, AttributeError, StopIteration):
        return []
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
