"""The random numbers of one epoch: one table per purpose, one row per slot (see `batchformer.data.order`)."""

from enum import IntEnum

import numpy as np

from batchformer.data.seeds import generator

ATTEMPTS = 10  # regions torchvision and timm draw before they give up finding one that fits


class Draw(IntEnum):
    """Crop, flip, AutoAugment, Cutout. Reordering or adding columns changes every augmentation of every run."""

    ROW = 0
    COLUMN = 1
    FLIP = 2
    POLICY = 3
    CHANCE_FIRST = 4
    CHANCE_SECOND = 5
    SIGN_FIRST = 6
    SIGN_SECOND = 7
    HOLE_ROW = 8
    HOLE_COLUMN = 9


class RandDraw(IntEnum):
    """RandAugment: two operations, each done or not, their directions; two numbers make two normal ones."""

    OPERATION_FIRST = 0
    OPERATION_SECOND = 1
    CHANCE_FIRST = 2
    CHANCE_SECOND = 3
    SIGN_FIRST = 4
    SIGN_SECOND = 5
    RADIUS = 6
    ANGLE = 7


class RegionDraw(IntEnum):
    """A rectangle: whether, where, the key of its noise; from `AREAS` on the attempts' areas, then their ratios."""

    CHANCE = 0
    TOP = 1
    LEFT = 2
    KEY = 3
    AREAS = 4
    RATIOS = 4 + ATTEMPTS
    END = 4 + 2 * ATTEMPTS


COLUMNS = {"augment": len(Draw), "randaugment": len(RandDraw), "crop": RegionDraw.END, "erase": RegionDraw.END}


def draw_table(samples: int, seed: int, epoch: int, purpose: str = "augment", repeats: int = 1) -> np.ndarray:
    """Uniform numbers in [0, 1), (repeats * samples, columns): row `repeat * samples + i` belongs to sample i.

    Drawn for the whole data set, so that a sample's augmentation depends on (seed, epoch, index, repeat) and on nothing
    else: not on the batch size, the chunk, the process or the batch at which a run was resumed.
    """
    keys = [(purpose, repeat) if repeat else (purpose,) for repeat in range(repeats)]
    tables = [generator(seed, epoch, *key).random((samples, COLUMNS[purpose])) for key in keys]
    return tables[0] if repeats == 1 else np.concatenate(tables)


def choose(uniform: np.ndarray, choices: int | np.ndarray) -> np.ndarray:
    """Whole numbers 0 .. choices - 1, uniformly."""
    return (uniform * choices).astype(np.int64)
