"""The random numbers of one epoch: a table with one row per sample of the data set."""

from enum import IntEnum

import numpy as np

from batchformer.data.seeds import generator


class Draw(IntEnum):
    """What each column of the table decides; reordering or adding columns changes every augmentation of every run."""

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


def draw_table(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Uniform numbers in [0, 1), (samples, draws): row i belongs to sample i wherever it stands in the order.

    Drawn for the whole data set, so that a sample's augmentation depends on (seed, epoch, index) and on nothing else:
    not on the batch size, the chunk, the process or the batch at which a run was resumed.
    """
    return generator(seed, epoch, "augment").random((samples, len(Draw)))


def choose(uniform: np.ndarray, choices: int) -> np.ndarray:
    """Whole numbers 0 .. choices - 1, uniformly."""
    return (uniform * choices).astype(np.int64)
