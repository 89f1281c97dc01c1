"""AutoAugment's and RandAugment's colour operations on batches of bytes, every sample with its own strength.

Each is torchvision's operation of the same name on uint8 images: results are cut (not rounded) to whole numbers as
there. PIL's differ from them by one grey level where it rounds the grey image first. No operation asks the device for a
number, so none makes the host wait.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

Images = UInt8[Tensor, "n 3 height width"]
Strength = Float[Tensor, " n"]


def _per_sample(strength: Tensor) -> Tensor:
    return strength.view(-1, 1, 1, 1)


def _to_bytes(images: Tensor) -> Tensor:
    return images.clamp(0, 255).to(torch.uint8)


def _blend(images: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    return _to_bytes(torch.addcmul(images * ratio, other, 1.0 - ratio))


def _grey(images: Tensor) -> Tensor:
    """ITU-R 601 luma in whole numbers, (n, 1, height, width), float32."""
    red, green, blue = images.float().unbind(1)
    return (red * 0.2989 + green * 0.587 + blue * 0.114).floor().unsqueeze(1)


def brightness(images: Images, factor: Strength) -> Images:
    return _to_bytes(images * _per_sample(factor))


def saturation(images: Images, factor: Strength) -> Images:
    return _blend(images, _grey(images), _per_sample(factor))


def contrast(images: Images, factor: Strength) -> Images:
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), _per_sample(factor))


def sharpness(images: Images, factor: Strength) -> Images:
    """Blend with the 3 x 3 smoothing (1 1 1, 1 5 1, 1 1 1) / 13; the border stays.

    Sums of whole numbers instead of a convolution: exact, whatever precision convolutions run in.
    """
    height, width = images.shape[2:]
    if height <= 2 or width <= 2:
        return images
    whole = images.short()
    rows = whole[:, :, :-2] + whole[:, :, 1:-1] + whole[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * whole[:, :, 1:-1, 1:-1]
    smooth = (total / 13.0).round()
    inner = images[:, :, 1:-1, 1:-1].float()
    sharp = images.clone()
    sharp[:, :, 1:-1, 1:-1] = _to_bytes(inner + (smooth - inner) * (1.0 - _per_sample(factor)))
    return sharp


def posterize(images: Images, bits: Strength) -> Images:
    """Keep the highest `bits` bits."""
    mask = 256 - 2 ** (8 - _per_sample(bits).to(torch.int32))
    return (images.to(torch.int32) & mask).to(torch.uint8)


def solarize(images: Images, threshold: Strength) -> Images:
    return torch.where(images >= _per_sample(threshold), 255 - images, images)


def solarize_add(images: Images, amount: Strength) -> Images:
    """Brighten the darker half; timm's operation, torchvision has none of the name."""
    brighter = _to_bytes(images + _per_sample(amount))
    return torch.where(images < 128, brighter, images)


def invert(images: Images, _: Strength | None = None) -> Images:
    return 255 - images


def autocontrast(images: Images, _: Strength | None = None) -> Images:
    """Stretch every channel to 0 .. 255; a channel of one value stays."""
    values = images.float()
    low, high = values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low) * (1.0 / 255.0))
    return _to_bytes((values - torch.where(flat, 0.0, low)) / scale)


def equalize(images: Images, _: Strength | None = None) -> Images:
    """Equalise the histogram of every channel the way PIL does; a channel with too few values to spread stays."""
    n, channels, height, width = images.shape
    lines, pixels = n * channels, height * width
    values = images.reshape(lines, pixels).long()
    first_bin = torch.arange(lines, device=images.device).view(-1, 1) * 256
    # flat, because scattering along one dimension is also allowed under torch.use_deterministic_algorithms
    histogram = torch.zeros(lines * 256, dtype=torch.int32, device=images.device)
    ones = torch.ones(1, dtype=torch.int32, device=images.device).expand(lines * pixels)
    histogram = histogram.scatter_add_(0, (values + first_bin).view(-1), ones).view(lines, 256)
    brightest = histogram.gather(1, values.amax(1, keepdim=True))
    step = (pixels - brightest).div(255, rounding_mode="floor")
    below = histogram.cumsum(1, dtype=torch.int32) - histogram
    table = (below + step // 2).div(step.clamp(min=1), rounding_mode="floor").clamp(0, 255)
    spread = table.gather(1, values)
    return torch.where(step == 0, values.int(), spread).to(torch.uint8).view_as(images)


COLOUR_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Brightness": brightness,
    "Color": saturation,
    "Contrast": contrast,
    "Sharpness": sharpness,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Invert": invert,
    "AutoContrast": autocontrast,
    "Equalize": equalize,
}
