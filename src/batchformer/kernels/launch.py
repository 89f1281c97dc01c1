"""Tile sizes of the kernels, and a low-overhead launcher for kernels that Triton has compiled before.

Tile sizes are tables, by the samples of a group, the width of a head or row and the size of an element. There is no
search at run time: it would measure in the middle of a training step, again in every process, and cannot run while a
CUDA graph is captured. `benchmarks/kernel_tuning.py` measures the candidates.

Triton looks up the compiled kernel that fits the arguments anew at every launch, in Python; for small inputs that takes
longer than the kernel. `Kernel` caches compiled kernels in a dictionary and calls their launcher as Triton itself does.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # missing in a torch without CUDA


class Tiles(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # limit per thread; a lower one lets more programs run at once


class AttentionTiles(NamedTuple):
    """Tiles of the attention kernels, for one size of group and head."""

    head: int  # width of a head, padded
    single: bool  # a group fits one tile
    forward: Tiles
    backward_keys: Tiles
    backward_queries: Tiles


class RowTiles(NamedTuple):
    """Tiles of the kernels over rows: a forward program takes `rows` of them, backward programs loop over all rows."""

    width: int  # of a row, padded
    rows: int
    warps: int
    backward_rows: int
    backward_warps: int
    programs: int  # for each multiprocessor, backward


def padded(size: int) -> int:
    """The power of two that holds `size`, at least 16: the smallest side of a matrix product on the device."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def row_tiles(width: int) -> RowTiles:
    """Tiles for rows of this width. Narrow ones: four loads of 16 bytes per thread forward; one backward, which keeps
    its sums in registers too, in many small programs."""
    columns = padded(width)
    if columns <= 512:
        warps = 1 if columns <= 256 else 2
        return RowTiles(columns, 2048 // columns, 2, 256 * warps // columns, warps, 24 // warps)
    warps = 4 if columns <= 2048 else 8
    return RowTiles(columns, max(1, 2048 // columns), warps, 1, warps, 6)


@cache
def attention_tiles(samples: int, head: int, element_size: int) -> AttentionTiles:
    head, tile = padded(head), padded(samples)
    if element_size == 4:
        return _full_precision(tile, head)
    largest = 128 if head <= 64 else 64 if head <= 128 else 32 if head <= 256 else 16
    if tile <= largest:
        size = tile * max(tile, head)
        forward = 1 if size <= 2048 else 4 if tile < 128 else 8
        backward = 1 if size <= 1024 else 2 if size <= 2048 else 4 if tile < 128 else 8
        return _one(head, Tiles(tile, tile, forward, 1), Tiles(tile, tile, backward, 1))
    if head <= 64:
        return AttentionTiles(head, False, Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, 160))
    if head <= 128:
        return AttentionTiles(head, False, Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 4, 2))
    if head <= 256:
        return AttentionTiles(head, False, Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))
    return AttentionTiles(head, False, Tiles(16, 64, 8, 1), Tiles(16, 16, 4, 1), Tiles(16, 64, 8, 1))


def _full_precision(tile: int, head: int) -> AttentionTiles:
    """Tiles for exact float32 products, which do not run on tensor cores and take registers for every operand."""
    if tile <= 32 and head <= 128:
        tiles = Tiles(tile, tile, 4 if tile * head <= 2048 else 8, 1)
        return _one(head, tiles, tiles)
    side = 32 if head <= 128 else 16
    return AttentionTiles(head, False, Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1))


def _one(head: int, forward: Tiles, backward: Tiles) -> AttentionTiles:
    return AttentionTiles(head, True, forward, backward, backward)


class Kernel:
    """A Triton kernel whose parameters are, in this order: tensors (or None), numbers, compile-time constants.

    Numbers have to be named in `do_not_specialize`, so that one compiled kernel fits all of them.
    """

    def __init__(self, kernel: Any) -> None:
        self.jit = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...],
        constants: tuple[Any, ...], warps: int = 4, stages: int = 1, registers: int | None = None,
    ) -> None:  # fmt: skip
        device = tensors[0].get_device()  # type: ignore[union-attr]  # the first is always given
        kind: list[Any] = [device, constants, warps, stages, registers]
        addresses: list[int | None] = []
        any_bits = 0
        for tensor in tensors:
            if tensor is None:
                kind.append(None)
                addresses.append(None)
            else:
                address = tensor.data_ptr()
                kind.append(tensor.dtype)
                addresses.append(address)
                any_bits |= address
        # An address that is not a multiple of 16 bytes needs a kernel of its own: rare, and left to Triton's lookup.
        is_aligned, key = not any_bits & 15, tuple(kind)
        known = self._compiled.get(key) if is_aligned else None
        if known is not None:  # on the current stream, without Triton's profiler hooks
            _, run, function, metadata = known
            run(programs, 1, 1, _stream_of(device), function, metadata, None, None, None, *addresses, *numbers,
                *constants)  # fmt: skip
            return
        limit = {} if registers is None else {"maxnreg": registers}
        compiled = self.jit[(programs,)](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages, **limit)
        if compiled is not None and is_aligned:  # the interpreter returns None
            self._compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata
