"""Writes down what a function does with tensors, step by step, so that `_host.cpp` can do it again without Python.

Written down are allocations, matrix products, changes of type and launches of kernels, and of tensors only where they
lie: in which slot, at which offset, with which sizes and strides. Views cost nothing then. Whatever else a function
does to tensors cannot be written down: `NotRecordable`.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchformer.kernels import launch

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.t.default, aten.slice.Tensor, aten.expand.default,
          aten.split_with_sizes.default, aten.detach.default, aten.alias.default}  # fmt: skip
_MADE = {aten.empty.memory_format: "empty", aten.empty_like.default: "empty", aten._to_copy.default: "to",
         aten.mm.default: "mm", aten.addmm.default: "addmm", aten.cat.default: "cat",
         aten.clone.default: "clone"}  # fmt: skip
_CHANGED = {aten.addmm_.default: "addmm_", aten.baddbmm_.default: "baddbmm_", aten.add_.Tensor: "add_"}
_NONE = torch.uint8  # the type of what a step makes that makes nothing

Start = Callable[[launch.Launch], tuple[int, int, int, int]]


class NotRecordable(Exception):
    """The function does something that cannot be done again without Python."""


class Slot(NamedTuple):
    """Where a tensor lay when it was made."""

    address: int
    bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Recorder(TorchDispatchMode):
    """In here everything runs as usual, and is added to `program`. `start_of` gives for a launch the address of the
    function, threads of a program, bytes of shared memory and the number of arguments it takes in all."""

    def __init__(self, program: Any, inputs: Sequence[Tensor], start_of: Start, seed: Tensor | None = None) -> None:
        super().__init__()
        self.program, self.start_of, self.thread = program, start_of, threading.get_ident()
        self.slots: list[Slot] = []
        for tensor in inputs:
            program.takes(tensor)
            self._new(tensor)
        if seed is not None:
            self._add("seed", self._new(seed), [], seed.dtype, [])

    def __enter__(self) -> Recorder:
        launch.watch(self._launched)
        return super().__enter__()

    def __exit__(self, *problem: Any) -> None:
        launch.watch(None)
        super().__exit__(*problem)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operation(*arguments, **(keywords or {}))
        if operation in _VIEWS:
            return result
        name, keywords = _MADE.get(operation), keywords or {}
        is_plain = name in ("empty", "clone") or (
            keywords.keys() <= {"dtype"} and (name != "cat" or len(arguments) == 1)
        )
        if name is not None and is_plain and result.is_contiguous():
            given = {"empty": (), "cat": arguments[0]}.get(name, arguments)
            operands = [self.view(t) for t in given if isinstance(t, Tensor) and t.numel()]
            name = name if operands else "empty"
            numbers = list(result.shape) if name == "empty" else []
            self._add(name, self._new(result), operands, result.dtype, numbers)
        elif operation in _CHANGED and not keywords:
            self._add(_CHANGED[operation], -1, [self.view(t) for t in arguments], _NONE, [])
        else:
            raise NotRecordable(str(operation))
        return result

    def view(self, tensor: Tensor) -> list[int]:
        """Where a tensor lies."""
        slot, offset = self._place(tensor)
        held = self.slots[slot]
        is_whole = offset == 0 and tensor.shape == held.shape and tensor.stride() == held.stride
        return [slot, int(is_whole), offset // tensor.element_size(), *tensor.shape, *tensor.stride()]

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """The slot, and how many bytes behind its start. Where several tensors have lain the last one lies now."""
        address = tensor.data_ptr()
        for slot, held in reversed(list(enumerate(self.slots))):
            offset = address - held.address
            if 0 <= offset < held.bytes and held.dtype == tensor.dtype:
                return slot, offset
        raise NotRecordable("a tensor that came from elsewhere")

    def _new(self, tensor: Tensor) -> int:
        size = tensor.numel() * tensor.element_size()
        self.slots.append(Slot(tensor.data_ptr(), size, tensor.dtype, tensor.shape, tensor.stride()))
        return len(self.slots) - 1

    def _add(self, name: str, into: int, operands: list[list[int]], dtype: torch.dtype, numbers: list[int]) -> None:
        self.program.add(name, into, operands, _NUMBERS[dtype], numbers)

    def _launched(self, launched: launch.Launch) -> None:
        if threading.get_ident() != self.thread:
            return  # somebody else's
        function, threads, shared, count = self.start_of(launched)
        arguments: list[int] = []
        for tensor in launched.tensors:
            if tensor is not None:  # None is a constant of the compilation
                arguments += self._place(tensor) if tensor.numel() else (-1, 0)
        for number in launched.numbers:
            arguments += (-1, number if isinstance(number, int) else struct.unpack("<i", struct.pack("<f", number))[0])
        missing = count - len(arguments) // 2
        if not 0 <= missing <= 2:  # Triton adds addresses of scratch memory, which our kernels do not use
            raise NotRecordable(f"{launched.kernel.jit} takes other arguments than it was given")
        arguments += [-1, 0] * missing
        self._add("launch", -1, [], _NONE, [function, launched.programs, threads, shared, *arguments])


def start_of(launched: launch.Launch) -> tuple[int, int, int, int]:
    """Of a kernel Triton compiled for this device."""
    compiled = launched.compiled
    if compiled is None:
        raise NotRecordable("a kernel that Triton has to look for at every launch")
    about = compiled.metadata
    plain = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False, "launch_pdl": False,
             "num_ctas": 1}  # fmt: skip
    if any(getattr(about, name, value) != value for name, value in plain.items()):
        raise NotRecordable("a kernel that is not started in the plain way")
    kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    if not all(kind.startswith("*") or kind in ("i32", "i64", "fp32") for kind in kinds):
        raise NotRecordable(f"a kernel with arguments of types {kinds}")
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    if entry is None:
        raise NotRecordable("a kernel whose arguments are not known")
    return compiled.function, 32 * about.num_warps, about.shared, entry.group(1).count(".param")


# The numbers C++ knows the types by (c10/core/ScalarType.h).
_NUMBERS = {torch.uint8: 0, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bool: 11,
            torch.bfloat16: 15}  # fmt: skip
