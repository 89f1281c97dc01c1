"""Random rectangles, and batched crop and resize to one size.

Rectangles, for the crop and for random erasing, are drawn on the host. Resizing is bicubic (optionally bilinear), with
antialiasing where it shrinks.
The definition is PIL's, which torchvision follows: cubic convolution with a = -1/2 over the pixels of the rectangle
only, its support widened by the factor of shrinking, first along the rows, then along the columns, whole numbers after
each. On noise one byte in 300 differs from PIL's and one in 100 from torchvision's, by one grey level and rarely by
two, because the weights have 15 bits (PIL's have 22, torchvision's for bytes about 15).

Done by matrix products, which may run in TF32 or bfloat16 where the user allows that. Both parts of the weights have
eight bits, as the pixels have, so every product and every sum is exact in all of these, and the result is the same.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.draws import ATTEMPTS, RegionDraw, uniform_integers

Range = tuple[float, float]
_RATIO: Range = (3 / 4, 4 / 3)  # of width to height, of a random region
_COARSE, _FINE = 2.0**7, 2.0**15


class Rectangles(NamedTuple):
    top: Int[np.ndarray, " n"]
    left: Int[np.ndarray, " n"]
    height: Int[np.ndarray, " n"]
    width: Int[np.ndarray, " n"]


def _sides(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, area: Range, ratio: Range, largest: tuple[int, int]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Heights and widths of the first attempt within 1 to `largest`; 0 where there is none.

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
    top = uniform_integers(draws[:, RegionDraw.TOP], height - tall + 1)
    left = uniform_integers(draws[:, RegionDraw.LEFT], width - wide + 1)
    return Rectangles(top, left, tall, wide)


def crop_rectangles(draws: Float[np.ndarray, "n draws"], height: int, width: int, area: Range) -> Rectangles:
    """torchvision's RandomResizedCrop: the first of ten attempts that fits, or else the largest centre that may be."""
    tall, wide = _sides(draws, height, width, area, _RATIO, (height, width))
    drawn = _placed(draws, tall, wide, height, width)
    last_tall, last_wide = min(height, round(width / _RATIO[0])), min(width, round(height * _RATIO[1]))
    centre = (height - last_tall) // 2, (width - last_wide) // 2, last_tall, last_wide
    found = tall > 0
    return Rectangles(*(np.where(found, value, last) for value, last in zip(drawn, centre, strict=True)))


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


def _cubic(distance: Tensor) -> Tensor:
    """The kernel of Keys (1981) with a = -1/2."""
    d = distance.abs()
    near = (1.5 * d - 2.5) * d * d + 1.0
    far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _linear(distance: Tensor) -> Tensor:
    return (1.0 - distance.abs()).clamp(min=0.0)


def _weights(
    first: Int[Tensor, " n"],
    length: Int[Tensor, " n"],
    size: int,
    pixels: int,
    mirror: Tensor | None = None,
    bilinear: bool = False,
) -> Float[Tensor, "2 n {size} {pixels}"]:
    """Resampling weights of `pixels` input pixels for `size` output positions that cover `first` .. `first + length`,
    split into a coarse and a fine part."""
    device = first.device
    position = torch.arange(size, device=device).expand(len(first), size)
    if mirror is not None:
        position = torch.where(mirror.view(-1, 1), size - 1 - position, position)
    step = length.to(torch.float32).view(-1, 1) / size
    begin, end = first.view(-1, 1, 1), (first + length).view(-1, 1, 1)
    centre = first.view(-1, 1) + (position + 0.5) * step
    pixel = torch.arange(pixels, device=device)
    distance = (pixel + 0.5 - centre.unsqueeze(2)) / step.clamp(min=1.0).unsqueeze(2)
    weight = _linear(distance) if bilinear else _cubic(distance)
    weight = torch.where((pixel >= begin) & (pixel < end), weight, 0.0)
    weight = weight / weight.sum(2, keepdim=True)
    coarse = (weight * _COARSE).round() / _COARSE
    return torch.stack([coarse, ((weight - coarse) * _FINE).round() / _FINE])


def _whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)


def resized_crop(
    images: UInt8[Tensor, "n 3 height width"],
    region: Int[Tensor, "#n 4"],
    size: int,
    mirror: Tensor | None = None,
    bilinear: bool = False,
) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """The `region` (top, left, height, width) of each image as a square of `size` pixels, mirrored where said so."""
    rows, columns = images.shape[2:]
    top, left, height, width = region.unbind(1)
    across = _weights(left, width, size, columns, mirror, bilinear)
    down = _weights(top, height, size, rows, bilinear=bilinear)
    kernel = _kernel(images.device, rows, columns) if images.is_cuda else None
    return (kernel or _resample)(images, across, down)


def _resample(
    images: UInt8[Tensor, "n 3 rows columns"],
    across: Float[Tensor, "2 #n size columns"],
    down: Float[Tensor, "2 #n size rows"],
) -> UInt8[Tensor, "n 3 size size"]:
    n, channels, rows, columns = images.shape
    with torch.autocast(images.device.type, enabled=False):
        lines = images.float().view(n, channels * rows, columns)
        coarse, fine = across.transpose(2, 3)
        wide = _whole(lines @ coarse + lines @ fine).view(n, channels, rows, -1)
        coarse, fine = down.unsqueeze(2)
        return _whole((coarse @ wide).add_(fine @ wide)).to(torch.uint8)


@lru_cache(1024)  # folders may hold images of any number of sizes
def _kernel(device: torch.device, rows: int, columns: int) -> Callable[..., Tensor] | None:
    """Both products in one launch, if that runs here: Triton may be missing, or the images too large for it."""
    try:
        from batchformer.data.augment.resample_kernel import MOST_PIXELS, resample_in_one_launch

        if max(rows, columns) > MOST_PIXELS:
            return None
        image = torch.zeros(1, 3, rows, columns, dtype=torch.uint8, device=device)
        weights = [torch.zeros(2, 1, 1, pixels, device=device) for pixels in (columns, rows)]
        resample_in_one_launch(image, *weights)
    except Exception as error:
        warnings.warn(f"images are resized without their Triton kernel, which is slower: {error}", stacklevel=2)
        return None
    return resample_in_one_launch


def resize(
    images: UInt8[Tensor, "n 3 height width"], size: int, bilinear: bool = False
) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """Resize the whole image, without a crop."""
    whole = torch.zeros(1, 4, dtype=torch.int64, device=images.device)
    whole[:, 2], whole[:, 3] = images.shape[2], images.shape[3]
    return resized_crop(images, whole, size, bilinear=bilinear)
