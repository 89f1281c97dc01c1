"""Tile sizes of the attention kernels, by the samples of a group, the width of a head and the size of an element.

A table, not a search: a search at run time would measure in the middle of a training step, again in every process, and
not at all while a CUDA graph is being captured.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    head: int  # width of a head, padded
    single: bool  # a group fits one tile
    forward: Tiles
    backward_keys: Tiles
    backward_queries: Tiles


def padded(size: int) -> int:
    """The power of two that holds `size`, at least 16: the smallest side of a matrix product on the device."""
    return max(16, 1 << (size - 1).bit_length())


def plan(samples: int, head: int, element_size: int) -> Plan:
    head, tile = padded(head), padded(samples)
    if element_size == 4:
        return _full_precision(tile, head)
    largest = 128 if head <= 64 else 64 if head <= 128 else 32 if head <= 256 else 16
    if tile <= largest:
        size = tile * head
        warps = 1 if size <= 1024 else 2 if size <= 2048 else 4 if tile < 128 else 8
        return _one(head, Tiles(tile, tile, warps, 1))
    if head <= 64:
        return Plan(head, False, Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2))
    if head <= 128:
        return Plan(head, False, Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2))
    if head <= 256:
        return Plan(head, False, Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))
    return Plan(head, False, Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(32, 32, 8, 1))


def _full_precision(tile: int, head: int) -> Plan:
    """Exact products of single precision run outside of the matrix units, and take registers for every operand."""
    if tile <= 32 and head <= 128:
        return _one(head, Tiles(tile, tile, 4 if tile * head <= 2048 else 8, 1))
    side = 32 if head <= 128 else 16
    return Plan(head, False, Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1), Tiles(side, 32, 8, 1))


def _one(head: int, tiles: Tiles) -> Plan:
    return Plan(head, True, tiles, tiles, tiles)
