"""Random rectangles for the crop and for random erasing, drawn on the host for many samples at once."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from batchformer.data.augment.draws import ATTEMPTS, RegionDraw, choose

Range = tuple[float, float]


class Rectangles(NamedTuple):
    top: Int[np.ndarray, " n"]
    left: Int[np.ndarray, " n"]
    height: Int[np.ndarray, " n"]
    width: Int[np.ndarray, " n"]


def _sides(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, area: Range, ratio: Range, largest: tuple[int, int]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Heights and widths of the first attempts from 1 to `largest`; 0 where none of them was.

    The area is uniform in `area` of the image, width / height log-uniform in `ratio`. Later attempts are computed for
    the few samples that need them.
    """
    tall, wide = np.zeros((2, len(draws)), np.int64)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    open_ones = np.arange(len(draws))
    for attempt in range(ATTEMPTS):
        target = area[0] + (area[1] - area[0]) * draws[open_ones, RegionDraw.AREAS + attempt]
        across = np.sqrt(height * width * target)
        stretch = np.exp(0.5 * (low + (high - low) * draws[open_ones, RegionDraw.RATIOS + attempt]))
        h, w = np.rint(across / stretch).astype(np.int64), np.rint(across * stretch).astype(np.int64)
        fits = (h > 0) & (h <= largest[0]) & (w > 0) & (w <= largest[1])
        tall[open_ones[fits]], wide[open_ones[fits]] = h[fits], w[fits]
        open_ones = open_ones[~fits]
        if not len(open_ones):
            break
    return tall, wide


def _placed(draws: np.ndarray, tall: np.ndarray, wide: np.ndarray, height: int, width: int) -> Rectangles:
    top = choose(draws[:, RegionDraw.TOP], height - tall + 1)
    left = choose(draws[:, RegionDraw.LEFT], width - wide + 1)
    return Rectangles(top, left, tall, wide)


def crop_rectangles(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, area: Range, ratio: Range = (3 / 4, 4 / 3)
) -> Rectangles:
    """torchvision's RandomResizedCrop: the first of ten attempts that fits, or else the largest centre that may be."""
    tall, wide = _sides(draws, height, width, area, ratio, (height, width))
    drawn = _placed(draws, tall, wide, height, width)
    last_tall, last_wide = _largest(height, width, ratio)
    centre = (height - last_tall) // 2, (width - last_wide) // 2, last_tall, last_wide
    found = tall > 0
    return Rectangles(*(np.where(found, value, last) for value, last in zip(drawn, centre, strict=True)))


def _largest(height: int, width: int, ratio: Range) -> tuple[int, int]:
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def erased_rectangles(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, probability: float
) -> tuple[Int[np.ndarray, " erased"], Rectangles]:
    """timm's RandomErasing: (which samples, what of them): 2 to 33 % of the area, sides of 0.3 to 1 / 0.3.

    A sample that draws ten rectangles as high or as wide as the image is left alone.
    """
    members = np.flatnonzero(draws[:, RegionDraw.CHANCE] < probability)
    chosen = draws[members]
    tall, wide = _sides(chosen, height, width, (0.02, 1 / 3), (0.3, 1 / 0.3), (height - 1, width - 1))
    found = tall > 0
    return members[found], _placed(chosen[found], tall[found], wide[found], height, width)
