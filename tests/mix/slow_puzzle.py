"""Puzzle-Mix for one pair of images, term by term and cell by cell."""

from __future__ import annotations

import itertools
import math

import numpy as np


def energy(
    mask: np.ndarray,
    saliency: tuple[np.ndarray, np.ndarray],
    pictures: tuple[np.ndarray, np.ndarray],
    share: float,
    *,
    labels: int = 3,
    beta: float = 1.2,
    gamma: float = 0.5,
    eta: float = 0.2,
    neighbourhood: int = 4,
) -> float:
    """The published energy of a mask (the share of image B in each cell); pictures (channels, height, width)."""
    blocks = len(mask)
    lost_a, lost_b = (_cells(one, blocks) for one in saliency)
    lost_a, lost_b = lost_a / lost_a.sum(), lost_b / lost_b.sum()
    total = 0.0
    for cell in itertools.product(range(blocks), repeat=2):
        z = mask[cell]
        k = round(z * (labels - 1))
        chance = math.comb(labels - 1, k) * share**k * (1 - share) ** (labels - 1 - k)
        total += (1 - z) * lost_b[cell] + z * lost_a[cell] - eta * math.log(chance) / blocks**2
    for axis in (0, 1):
        for cell in itertools.product(range(blocks), repeat=2):
            beyond = (cell[0] + (axis == 0), cell[1] + (axis == 1))
            if max(beyond) < blocks:
                smooth = (mask[cell] - mask[beyond]) ** 2
                seam = _seam_cost(mask[cell], mask[beyond], cell, axis, pictures, blocks, neighbourhood)
                total += beta / blocks / 16 * (smooth + gamma * seam)
    return total


def _seam_cost(first, second, cell, axis, pictures, blocks, neighbourhood) -> float:
    """Difference of colours across a seam, in the form the released code gives it: parts for each cell and for both.

    At labels 0 and 1 that is the difference itself and a constant; in between it is a definition.
    """
    d = {
        (a, b): _seam(pictures[a], pictures[b], cell, axis, blocks, neighbourhood)
        for a, b in itertools.product((0, 1), repeat=2)
    }
    alone_first = (1 - first) * (d[0, 0] + d[0, 1]) / 2 + first * (d[1, 0] + d[1, 1]) / 2
    alone_second = (1 - second) * (d[0, 0] + d[1, 0]) / 2 + second * (d[0, 1] + d[1, 1]) / 2
    together = (first - second) ** 2 * (d[0, 1] + d[1, 0] - d[0, 0] - d[1, 1]) / 2
    formed = alone_first + alone_second + together
    if {first, second} <= {0, 1}:
        assert math.isclose(formed, d[int(first), int(second)] + (d[0, 1] + d[1, 0]) / 2, rel_tol=1e-9)
    return formed


def _seam(one, two, cell, axis, blocks, neighbourhood) -> float:
    """Mean absolute difference of the last line of squares of a cell and the first line of the next one."""
    high, wide = one.shape[1] // blocks, one.shape[2] // blocks
    size = max(s for s in range(1, neighbourhood + 1) if high % s == 0 and wide % s == 0)
    y, x = cell[0] * high, cell[1] * wide
    if axis == 0:
        edge = one[:, y + high - size : y + high, x : x + wide], two[:, y + high : y + high + size, x : x + wide]
    else:
        edge = one[:, y : y + high, x + wide - size : x + wide], two[:, y : y + high, x + wide : x + wide + size]
    lines = [_squares(part, size) for part in edge]
    return float(np.abs(lines[0] - lines[1]).mean())


def _squares(part: np.ndarray, size: int) -> np.ndarray:
    channels, height, width = part.shape
    return part.reshape(channels, height // size, size, width // size, size).mean((2, 4))


def _cells(values: np.ndarray, blocks: int) -> np.ndarray:
    return values.reshape(blocks, len(values) // blocks, blocks, values.shape[1] // blocks).mean((1, 3))


def transport(saliency: np.ndarray, shown: np.ndarray, eps: float) -> np.ndarray:
    """What goes to each place, -1 where nothing does: dense matrices, rounds of taking places, as the code has it."""
    size = len(saliency)
    cells = [(y, x) for y in range(size) for x in range(size)]
    cost = np.array([[eps * ((a - c) ** 2 + (b - d) ** 2) / (size - 1) ** 2 for c, d in cells] for a, b in cells])
    cost -= np.outer(saliency.flatten(), shown.flatten())
    for _ in range(size):
        plan = np.zeros_like(cost)
        plan[np.arange(len(cells)), cost.argmin(1)] = 1
        winner = (plan * cost).argmin(0)
        won = np.zeros_like(cost)
        won[winner, np.arange(len(cells))] = 1
        won *= plan
        cost += plan - won
    return np.where(won.any(0), won.argmax(0), -1)
