"""Tile sizes of the kernels, by the samples of a group, the width of a head or a row and the size of an element.

Tables, not a search: a search at run time would measure in the middle of a training step, again in every process, and
not at all while a CUDA graph is being captured. `benchmarks/kernel_tuning.py` measures the candidates.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Tiles(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # a thread may have at most; fewer of them let more programs run side by side


class Plan(NamedTuple):
    head: int  # width of a head, padded
    single: bool  # a group fits one tile
    forward: Tiles
    backward_keys: Tiles
    backward_queries: Tiles


class RowTiles(NamedTuple):
    """Of the kernels over rows: those that go forward take `rows` in a program, those that go back take turns."""

    width: int  # of a row, padded
    rows: int
    warps: int
    backward_rows: int
    backward_warps: int
    programs: int  # for each multiprocessor, backward

    def for_more_registers(self) -> RowTiles:
        """Where a backward computes again what it could have read: so many programs fit side by side then."""
        return self._replace(programs=max(1, 2 * self.programs // 3))


def padded(size: int) -> int:
    """The power of two that holds `size`, at least 16: the smallest side of a matrix product on the device."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def row_tiles(width: int) -> RowTiles:
    """Narrow rows: four loads of 16 bytes for each thread forward; one backward, which has its sums to keep in
    registers too, in many small programs."""
    columns = padded(width)
    if columns <= 512:
        warps = 1 if columns <= 256 else 2
        return RowTiles(columns, 2048 // columns, 2, 256 * warps // columns, warps, 24 // warps)
    warps = 4 if columns <= 2048 else 8
    return RowTiles(columns, max(1, 2048 // columns), warps, 1, warps, 6)


@cache
def plan(samples: int, head: int, element_size: int) -> Plan:
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
        return Plan(head, False, Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, 160))
    if head <= 128:
        return Plan(head, False, Tiles(128, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(64, 64, 4, 2))
    if head <= 256:
        return Plan(head, False, Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))
    return Plan(head, False, Tiles(16, 64, 8, 1), Tiles(16, 16, 4, 1), Tiles(16, 64, 8, 1))


def _full_precision(tile: int, head: int) -> Plan:
    """Exact products of single precision run outside of the matrix units, and take registers for every operand."""
    if tile <= 32 and head <= 128:
        tiles = Tiles(tile, tile, 4 if tile * head <= 2048 else 8, 1)
        return _one(head, tiles, tiles)
    side = 32 if head <= 128 else 16
    return Plan(head, False, Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1))


def _one(head: int, forward: Tiles, backward: Tiles) -> Plan:
    return Plan(head, True, forward, backward, backward)
