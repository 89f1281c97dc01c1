"""Launching a kernel by the shortest way there is.

Triton finds out anew at every launch which of its compiled kernels fits the arguments, in Python; for small inputs that
takes longer than the work. Here what was compiled is remembered by what it depends on, and then called directly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Kernel:
    """A Triton kernel whose parameters are, in this order: tensors (or None), numbers, constants of the compilation.

    Numbers have to be named in `do_not_specialize`: a compiled kernel must fit them all.
    """

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
        constants: tuple[Any, ...], warps: int = 4, stages: int = 1,
    ) -> None:  # fmt: skip
        addresses: list[int | None] = []
        key: list[Any] = [constants, warps, stages]
        together, device = 0, None
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                key.append(None)
                continue
            address, device = tensor.data_ptr(), tensor.device
            together |= address
            addresses.append(address)
            key.append(tensor.dtype)
        key.append(device)
        known = tuple(key)
        compiled = self._compiled.get(known)
        # An address that is no multiple of 16 bytes needs a kernel of its own: rare, and Triton finds it.
        if compiled is not None and not together % 16:
            compiled[programs, 1, 1](*addresses, *numbers, *constants)
            return
        compiled = self.jit[(programs,)](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
        if compiled is not None and not together % 16:  # the interpreter gives nothing back
            self._compiled[known] = compiled
