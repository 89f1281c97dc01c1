"""Cut a rectangle out of each image and bring it to one size: bicubic, smoothed where it shrinks, the batch at once.

The definition is PIL's, which torchvision follows: cubic convolution with a = -1/2 over the pixels of the rectangle
only, its support widened by the factor of shrinking, first along the rows, then along the columns, whole numbers after
each. Differences of one grey level remain, from PIL's 22-bit and our 24-bit weights. Weighted sums of gathers instead
of a matrix product, because a product may run in TF32.
"""

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

_SUPPORT = 2.0


def _cubic(distance: Tensor) -> Tensor:
    """The kernel of Keys (1981) with a = -1/2."""
    d = distance.abs()
    near = (1.5 * d - 2.5) * d * d + 1.0
    far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _taps(
    first: Int[Tensor, " n"], length: Int[Tensor, " n"], size: int, most: int, mirror: Tensor | None
) -> tuple[Int[Tensor, "n size taps"], Float[Tensor, "n size taps"]]:
    """For each of `size` output positions the pixels it is made of, and their weights.

    `most` bounds `length`: the number of taps follows from it, so nothing has to be asked of the device.
    """
    device = first.device
    taps = 4 if most <= size else math.ceil(2 * _SUPPORT * most / size) + 1
    position = torch.arange(size, device=device).expand(len(first), size)
    if mirror is not None:
        position = torch.where(mirror.view(-1, 1), size - 1 - position, position)
    step = length.to(torch.float32).view(-1, 1) / size
    stretch = step.clamp(min=1.0)
    centre = (position + 0.5) * step
    low = (centre - _SUPPORT * stretch + 0.5).floor().clamp(min=0).unsqueeze(2)
    high = (centre + _SUPPORT * stretch + 0.5).floor().unsqueeze(2)
    last = length.view(-1, 1, 1) - 1
    pixel = low + torch.arange(taps, device=device)
    weight = _cubic((pixel - centre.unsqueeze(2) + 0.5) / stretch.unsqueeze(2))
    weight = torch.where((pixel < high) & (pixel <= last), weight, 0.0)
    weight = weight / weight.sum(2, keepdim=True)
    return torch.minimum(pixel.long(), last) + first.view(-1, 1, 1), weight


def _whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)


def resized_crop(
    images: UInt8[Tensor, "n 3 height width"],
    region: Int[Tensor, "n 4"],
    size: int,
    mirror: Tensor | None = None,
) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """The `region` (top, left, height, width) of each image as a square of `size` pixels, mirrored where said so."""
    top, left, height, width = region.unbind(1)
    n, channels, rows, columns = images.shape
    place, weight = _taps(left, width, size, columns, mirror)
    source = images.float()
    across = torch.zeros((n, channels, rows, size), device=images.device)
    for tap in range(place.shape[2]):
        index = place[:, None, None, :, tap].expand(n, channels, rows, size)
        across.addcmul_(source.gather(3, index), weight[:, None, None, :, tap])
    across = _whole(across)
    place, weight = _taps(top, height, size, rows, None)
    result = torch.zeros((n, channels, size, size), device=images.device)
    for tap in range(place.shape[2]):
        index = place[:, None, :, tap, None].expand(n, channels, size, size)
        result.addcmul_(across.gather(2, index), weight[:, None, :, tap, None])
    return _whole(result).to(torch.uint8)


def resize(images: UInt8[Tensor, "n 3 height width"], size: int) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """The whole image."""
    n, _, height, width = images.shape
    whole = torch.zeros(n, 4, dtype=torch.int64, device=images.device)
    whole[:, 2], whole[:, 3] = height, width
    return resized_crop(images, whole, size)
