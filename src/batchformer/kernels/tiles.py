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
    head = padded(head)
    budget = head * element_size  # bytes of a row
    tile = padded(samples)
    largest = 128 if budget <= 128 else 64 if budget <= 256 else 32 if budget <= 512 else 16
    if tile <= largest:
        warps = 1 if tile * head <= 1024 else 2 if tile * head <= 2048 else 4 if tile < 128 else 8
        tiles = Tiles(tile, tile, warps, 1)
        return Plan(head, True, tiles, tiles, tiles)
    if budget <= 128:
        return Plan(head, False, Tiles(128, 64, 4, 3), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2))
    if budget <= 256:
        return Plan(head, False, Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2))
    if budget <= 512:
        return Plan(head, False, Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1))
    side = 32 if budget <= 1024 else 16
    return Plan(head, False, Tiles(side, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(side, 32, 8, 1))
