"""Launching a kernel by the shortest way there is.

Triton finds out anew at every launch which of its compiled kernels fits the arguments, in Python; for small inputs that
takes longer than the work. Here what was compiled is remembered by what it depends on, and its launcher called as
Triton itself does in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not in a torch without CUDA


class Launch(NamedTuple):
    """One launch, as it was asked for; `compiled` is None where Triton looks for it at every launch."""

    kernel: Kernel
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    compiled: Any


_watcher: Callable[[Launch], None] | None = None


def watch(watcher: Callable[[Launch], None] | None) -> None:
    """Have every launch reported, after it; None: no longer."""
    global _watcher
    _watcher = watcher


class Kernel:
    """A Triton kernel whose parameters are, in this order: tensors (or None), numbers, constants of the compilation.

    Numbers have to be named in `do_not_specialize`: a compiled kernel must fit them all.
    """

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, Callable[..., None]]] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
        constants: tuple[Any, ...], warps: int = 4, stages: int = 1, registers: int | None = None,
    ) -> None:  # fmt: skip
        watcher = _watcher  # read once: another thread may stop watching meanwhile
        if watcher is not None:
            with _disable_current_modes():  # what Triton itself does with tensors is its own affair
                compiled = self._start(programs, tensors, numbers, constants, warps, stages, registers)
            watcher(Launch(self, programs, tensors, numbers, constants, compiled))
            return
        self._start(programs, tensors, numbers, constants, warps, stages, registers)

    def _start(self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
               constants: tuple[Any, ...], warps: int, stages: int, registers: int | None) -> Any:  # fmt: skip
        """What was compiled, where it is remembered."""
        device = tensors[0].get_device()  # type: ignore[union-attr]  # the first is always given
        key = (device, constants, warps, stages, registers, *[None if t is None else t.dtype for t in tensors])
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        together = 0
        for address in addresses:
            if address is not None:
                together |= address
        # An address that is no multiple of 16 bytes needs a kernel of its own: rare, and Triton finds it.
        if not together & 15:
            known = self._compiled.get(key)
            if known is not None:
                known[1](programs, *addresses, *numbers, *constants)
                return known[0]
        limit = {} if registers is None else {"maxnreg": registers}
        compiled = self.jit[(programs,)](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages, **limit)
        if compiled is not None and not together & 15:  # the interpreter gives nothing back
            self._compiled[key] = compiled, _launcher(compiled, device)
            return compiled
        return None

    def compiled_last(self) -> Any:
        """What Triton gave for the latest kind of arguments; None when there is none."""
        return next(reversed(self._compiled.values()), (None,))[0]


def _launcher(compiled: Any, device: int) -> Callable[..., None]:
    """Starts what was compiled, on the stream that is current then. No hooks of Triton's run: they are for profilers
    that want to see sources."""
    run, function, metadata, stream_of = compiled.run, compiled.function, compiled.packed_metadata, _stream_of
    assert stream_of is not None

    def launch(programs: int, *arguments: Any) -> None:
        run(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *arguments)

    return launch
