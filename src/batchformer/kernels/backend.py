"""Which backend computes the attention of a module, and why; decided before every call, without importing Triton."""

import importlib.util
import os
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Backend = Literal["auto", "reference", "sdpa", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "sdpa", "triton")
Memory = Literal["fast", "lean"]
MEMORIES: tuple[Memory, ...] = ("fast", "lean")

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Compute capabilities with enough shared memory for a tile of the widest heads: cards of data centres.
_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))
_NARROWEST_HEAD, _WIDE_HEAD, _WIDEST_HEAD, _WIDEST_ROW = 16, 256, 512, 8192

# Types "auto" takes the kernels for: bfloat16 is measured in benchmarks/results/layer.json, float16 runs on the same
# units at the same rate.
_MEASURED = (torch.bfloat16, torch.float16)
# Looked up once: the functions below also run while `torch.compile` traces a module.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Triton runs its kernels on the CPU, element by element, when this was set before its first import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Choice(NamedTuple):
    """The backend that runs, and why not a faster one."""

    backend: Literal["reference", "sdpa", "triton"]
    why: str
    fused: bool = False  # the whole layer, not its attention alone


def choose_backend(backend: Backend, device: torch.device, dtype: torch.dtype, dim: int, heads: int) -> Choice:
    """Resolve the option `backend=` for inputs of this device, type and width."""
    if backend == "reference" or backend == "sdpa":
        return Choice(backend, f"backend={backend!r} was asked for")
    obstacle = why_not_triton(device, dtype, dim, heads)
    if obstacle is None and device.type == "cpu" and backend == "auto":
        obstacle = "Triton's interpreter is for tests; it runs only where backend='triton' asks for it"
    if obstacle is None and backend == "auto" and dtype not in _MEASURED:
        obstacle = (
            "in single precision the kernels are not known to be faster; they run where backend='triton' asks for them"
        )
    if obstacle is None:
        return Choice("triton", "the device, the type and the width of the heads allow it")
    return Choice("sdpa", obstacle)


def why_not_triton(device: torch.device, dtype: torch.dtype, dim: int, heads: int) -> str | None:
    """Why the kernels cannot run; None where they can."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    if device.type == "cpu" and not _INTERPRETED:
        return "the input is on the CPU"
    if device.type not in ("cuda", "cpu"):
        return f"the kernels are for CUDA devices, not for {device.type}"
    if device.type == "cuda" and not _is_recent(device):
        return f"{torch.cuda.get_device_name(device)} is older than the kernels (compute capability 8.0)"
    if dtype not in _TYPES:
        return f"the kernels know float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if not _NARROWEST_HEAD <= dim // heads <= _WIDEST_HEAD:
        return f"heads of width {dim // heads} lie outside of {_NARROWEST_HEAD} to {_WIDEST_HEAD}"
    unknown = device.type == "cpu" or torch.compiler.is_compiling()
    large = unknown or _capability(device) in _LARGE_SHARED_MEMORY
    if dim // heads > _WIDE_HEAD and (dtype == torch.float32 or not large):
        return f"heads of width {dim // heads} need half precision and a device with more shared memory"
    return None


def why_not_traceable(x: Tensor) -> str | None:
    """Why this call needs operations that torch can transform, which kernels are not; None where it does not."""
    if torch.compiler.is_compiling():  # the kernels are custom operators there
        return None
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return f"the input is a {type(x).__name__}, and the kernels take plain tensors"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is active"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are active"
    return None


def why_not_fused(dim: int, hidden_dim: int) -> str | None:
    """Why the layer around the attention cannot be fused, by its widths; None where it can."""
    widest = max(dim, hidden_dim)
    return f"rows of {widest} are wider than {_WIDEST_ROW}" if widest > _WIDEST_ROW else None


def _is_recent(device: torch.device) -> bool:
    if torch.compiler.is_compiling():  # the device cannot be queried there, and the compiler needs Triton anyway
        return True
    return torch.version.hip is None and _capability(device) >= (8, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
