"""Cut a rectangle out of each image and bring it to one size: bicubic, smoothed where it shrinks, the batch at once.

The definition is PIL's, which torchvision follows: cubic convolution with a = -1/2 over the pixels of the rectangle
only, its support widened by the factor of shrinking, first along the rows, then along the columns, whole numbers after
each. On noise one byte in 300 differs from PIL's and one in 100 from torchvision's, by one grey level and rarely by
two, because the weights have 15 bits (PIL's have 22, torchvision's for bytes about 15).

Done by matrix products, which may run in TF32 or bfloat16 where the user allows that. Both parts of the weights have
eight bits, as the pixels have, so every product and every sum is exact in all of these, and the result is the same.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

_COARSE, _FINE = 2.0**7, 2.0**15


def _cubic(distance: Tensor) -> Tensor:
    """The kernel of Keys (1981) with a = -1/2."""
    d = distance.abs()
    near = (1.5 * d - 2.5) * d * d + 1.0
    far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _weights(
    first: Int[Tensor, " n"], length: Int[Tensor, " n"], size: int, pixels: int, mirror: Tensor | None = None
) -> Float[Tensor, "2 n {size} {pixels}"]:
    """What each of `pixels` pixels of a line adds to each of `size` positions made from `first` .. `first + length`:
    a coarse part and a fine one."""
    device = first.device
    position = torch.arange(size, device=device).expand(len(first), size)
    if mirror is not None:
        position = torch.where(mirror.view(-1, 1), size - 1 - position, position)
    step = length.to(torch.float32).view(-1, 1) / size
    begin, end = first.view(-1, 1, 1), (first + length).view(-1, 1, 1)
    centre = first.view(-1, 1) + (position + 0.5) * step
    pixel = torch.arange(pixels, device=device)
    weight = _cubic((pixel + 0.5 - centre.unsqueeze(2)) / step.clamp(min=1.0).unsqueeze(2))
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
) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """The `region` (top, left, height, width) of each image as a square of `size` pixels, mirrored where said so."""
    rows, columns = images.shape[2:]
    top, left, height, width = region.unbind(1)
    across = _weights(left, width, size, columns, mirror)
    down = _weights(top, height, size, rows)
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


def resize(images: UInt8[Tensor, "n 3 height width"], size: int) -> UInt8[Tensor, "n 3 {size} {size}"]:
    """The whole image."""
    whole = torch.zeros(1, 4, dtype=torch.int64, device=images.device)
    whole[:, 2], whole[:, 3] = images.shape[2], images.shape[3]
    return resized_crop(images, whole, size)
