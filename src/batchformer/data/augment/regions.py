"""Random rectangles for the crop and for random erasing, drawn on the host for many samples at once."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from batchformer.data.augment.draws import RegionDraw, choose


class Rectangles(NamedTuple):
    top: Int[np.ndarray, " n"]
    left: Int[np.ndarray, " n"]
    height: Int[np.ndarray, " n"]
    width: Int[np.ndarray, " n"]


def _attempts(
    draws: Float[np.ndarray, "n draws"],
    pixels: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Int[np.ndarray, "n attempts"], Int[np.ndarray, "n attempts"]]:
    """Heights and widths: the area uniform in `area` of the image, width / height log-uniform in `ratio`."""
    areas = draws[:, RegionDraw.AREAS : RegionDraw.RATIOS]
    ratios = draws[:, RegionDraw.RATIOS : RegionDraw.END]
    target = pixels * (area[0] + (area[1] - area[0]) * areas)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = np.exp(low + (high - low) * ratios)
    return np.rint(np.sqrt(target / aspect)).astype(np.int64), np.rint(np.sqrt(target * aspect)).astype(np.int64)


def _first(fits: Bool[np.ndarray, "n attempts"], *values: np.ndarray) -> list[np.ndarray]:
    rows, place = np.arange(len(fits)), fits.argmax(1)
    return [value[rows, place] for value in values]


def crop_rectangles(
    draws: Float[np.ndarray, "n draws"],
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Rectangles:
    """torchvision's RandomResizedCrop: the first of ten attempts that fits, or else the largest centre that may be."""
    heights, widths = _attempts(draws, height * width, area, ratio)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    h, w = _first(fits, heights, widths)
    top = choose(draws[:, RegionDraw.TOP], height - h + 1)
    left = choose(draws[:, RegionDraw.LEFT], width - w + 1)
    last_h, last_w = _largest(height, width, ratio)
    centre = (height - last_h) // 2, (width - last_w) // 2, last_h, last_w
    found = fits.any(1)
    return Rectangles(*(np.where(found, drawn, last) for drawn, last in zip((top, left, h, w), centre, strict=True)))


def _largest(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def erased_rectangles(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, probability: float
) -> tuple[Int[np.ndarray, " erased"], Rectangles]:
    """timm's RandomErasing: (which samples, what of them): 2 to 33 % of the area, sides of 0.3 to 1 / 0.3."""
    heights, widths = _attempts(draws, height * width, (0.02, 1 / 3), (0.3, 1 / 0.3))
    fits = (heights < height) & (widths < width)
    members = np.flatnonzero((draws[:, RegionDraw.CHANCE] < probability) & fits.any(1))
    h, w = _first(fits[members], heights[members], widths[members])
    top = choose(draws[members, RegionDraw.TOP], height - h + 1)
    left = choose(draws[members, RegionDraw.LEFT], width - w + 1)
    return members, Rectangles(top, left, h, w)
