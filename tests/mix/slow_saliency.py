"""Fine-grained saliency, pixel by pixel from its description: slow, and easy to believe."""

from __future__ import annotations

import numpy as np


def slow_saliency(rgb: np.ndarray, surrounds: tuple[int, ...] = (12, 24, 48, 28, 56, 112)) -> np.ndarray:
    """(height, width, 3) bytes to a map in [0, 1]."""
    weights = np.array([9798, 19235, 3735])
    grey = (rgb.astype(np.int64) @ weights + 2**14) // 2**15
    grey = smooth(smooth(grey))
    height, width = grey.shape
    on, off = np.zeros(grey.shape), np.zeros(grey.shape)
    for reach in surrounds:
        for y in range(height):
            for x in range(width):
                window = grey[max(y - reach + 1, 0) : y + reach + 1, max(x - reach + 1, 0) : x + reach + 1]
                others = np.float32(window.sum() - grey[y, x]) / np.float32(window.size - 1)
                difference = np.float32(grey[y, x]) - others
                on[y, x] += int(max(difference, 0))
                off[y, x] += int(max(-difference, 0))
    return stretch(stretch(on) + stretch(off)) / 255


def smooth(grey: np.ndarray) -> np.ndarray:
    height, width = grey.shape
    mirrored = np.pad(grey, 1, mode="reflect")
    kernel = np.outer([1, 2, 1], [1, 2, 1])
    return (
        np.array([[(mirrored[y : y + 3, x : x + 3] * kernel).sum() + 8 for x in range(width)] for y in range(height)])
        // 16
    )


def stretch(values: np.ndarray) -> np.ndarray:
    return np.floor(255 * (values / values.max()).astype(np.float32))
