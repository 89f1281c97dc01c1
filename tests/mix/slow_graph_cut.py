"""The minimum of a grid energy, one grid after the other: by alpha-beta swap, as Puzzle-Mix's code, and by trying all.

Energies are numpy arrays of integers, unary (labels, height, width), edges right (height, width - 1) and down
(height - 1, width); an edge costs the squared difference of its two labels (0, 1, 2).
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow


def energy(labels: np.ndarray, unary: np.ndarray, right: np.ndarray, down: np.ndarray) -> int:
    cells = np.take_along_axis(unary, labels[None], 0).sum()
    return int(cells + (right * np.diff(labels, axis=1) ** 2).sum() + (down * np.diff(labels, axis=0) ** 2).sum())


def swap(unary: np.ndarray, right: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Alpha-beta swap (Boykov, Veksler and Zabih, 2001) from all zeros; every swap an exact maximum flow."""
    count, height, width = unary.shape
    labels = np.zeros((height, width), dtype=np.int64)
    best = energy(labels, unary, right, down)
    while True:
        before = best
        for alpha, beta in itertools.combinations(range(count), 2):
            tried = _swapped(labels, alpha, beta, unary, right, down)
            value = energy(tried, unary, right, down)
            if value < best:
                labels, best = tried, value
        if best == before:
            return labels


def _swapped(labels, alpha, beta, unary, right, down) -> np.ndarray:
    """The best labelling that only changes cells between alpha and beta."""
    height, width = labels.shape
    number = -np.ones(labels.shape, dtype=int)
    inside = (labels == alpha) | (labels == beta)
    number[inside] = np.arange(inside.sum())
    cost = {label: unary[label].astype(np.int64).copy() for label in (alpha, beta)}
    links = []
    for (y, x), edge, (v, u) in _pairs(right, down, height, width):
        if inside[y, x] and inside[v, u]:
            links.append((number[y, x], number[v, u], edge * (alpha - beta) ** 2))
        elif inside[y, x] or inside[v, u]:
            (cell, other) = ((y, x), labels[v, u]) if inside[y, x] else ((v, u), labels[y, x])
            for label in (alpha, beta):
                cost[label][cell] += edge * (label - other) ** 2
    side = min_cut(cost[alpha][inside], cost[beta][inside], links)
    result = labels.copy()
    result[inside] = np.where(side, alpha, beta)
    return result


def _pairs(right, down, height, width):
    for y, x in itertools.product(range(height), range(width)):
        if x + 1 < width:
            yield (y, x), right[y, x], (y, x + 1)
        if y + 1 < height:
            yield (y, x), down[y, x], (y + 1, x)


def min_cut(first: np.ndarray, second: np.ndarray, links: list[tuple[int, int, int]]) -> np.ndarray:
    """Which cells pay `first` (True) and which `second` at the least sum, a link paid where its ends differ."""
    count = len(first)
    source, sink = count, count + 1
    rows, columns, weights = [], [], []
    for cell in range(count):
        common = min(first[cell], second[cell])
        rows += [source, cell]
        columns += [cell, sink]
        weights += [second[cell] - common, first[cell] - common]
    for one, two, weight in links:
        rows += [one, two]
        columns += [two, one]
        weights += [weight, weight]
    ends = np.array(rows, dtype=np.int32), np.array(columns, dtype=np.int32)  # what maximum_flow takes in every scipy
    graph = coo_array((np.array(weights, dtype=np.int32), ends), shape=(count + 2, count + 2)).tocsr()
    flow = maximum_flow(graph, source, sink).flow
    residual = (graph - flow).tocsr()
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, source, return_predecessors=False)
    side = np.zeros(count + 2, dtype=bool)
    side[reached] = True
    return side[:count]


def try_all(unary: np.ndarray, right: np.ndarray, down: np.ndarray) -> int:
    """The least energy of all labellings."""
    count, height, width = unary.shape
    return min(
        energy(np.array(labels).reshape(height, width), unary, right, down)
        for labels in itertools.product(range(count), repeat=height * width)
    )
