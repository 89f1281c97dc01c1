"""Operations of AutoAugment, RandAugment and views on batches of bytes, every sample with its own strength.

Each colour operation is torchvision's of the same name on uint8 images: results are cut (not rounded) to whole numbers
as there. PIL's differ from them by one grey level where it rounds the grey image first. No operation synchronises the
host with the device.

Translate, shear and rotate are one affine gather, every sample with its own matrix. `affine` equals torchvision's
`affine` and `rotate` with nearest interpolation and a fill value (AutoAugment), `affine_bicubic` PIL's `transform`
(RandAugment as timm has it). The source position is computed element by element in float32 and never by a matrix
product, because a product may run in TF32, whose ten bits move pixels.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from batchformer.data.augment.options import blur_pixels

Images = UInt8[Tensor, "n 3 height width"]
Strength = Float[Tensor, " n"]
GREY = 128


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


def hue(images: Images, turn: Strength) -> Images:
    """Rotate the hue by this fraction of a circle, -1/2 to 1/2; torchvision's, up to one grey level.

    Channel c is max - range * clamp(min(k, 4 - k), 0, 1) with k = (n + 6 hue) mod 6, n = 5, 3, 1: HSV to RGB without a
    case for each sixth of the circle, which would be a gather.
    """
    values = images.float()
    red, green, blue = values.unbind(1)
    low, high = values.aminmax(dim=1)
    spread = high - low
    divisor = spread.clamp(min=1.0)  # avoids 0 / 0 for a grey pixel, where the hue has no effect
    of_green_or_blue = torch.where(high == green, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0)
    place = torch.where(high == red, (green - blue) / divisor, of_green_or_blue) + 6.0 * turn.view(-1, 1, 1)
    channels = []
    for offset in (5.0, 3.0, 1.0):
        k = (place + offset).remainder(6.0)
        channels.append(high - spread * torch.minimum(k, 4.0 - k).clamp(0.0, 1.0))
    return _to_bytes(torch.stack(channels, 1) * (255.999 / 255.0))  # as torchvision makes bytes of floats


def grey(images: Images, _: Strength | None = None) -> Images:
    return _grey(images).to(torch.uint8).expand_as(images)


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


def blur(images: Images, sigma: Strength) -> Images:
    """Gaussian blur of `blur_pixels`, the border mirrored, rounded; torchvision's, up to one grey level.

    Columns, then rows, as sums of shifted images: a convolution may run in TF32, and cannot have a kernel per sample.
    """
    height, width = images.shape[2:]
    values = images.float()
    for length, dim in ((height, 2), (width, 3)):
        reach = blur_pixels(length) // 2
        offset = torch.arange(-reach, reach + 1, device=images.device)
        weights = (-0.5 * (offset / sigma.view(-1, 1)).square()).softmax(1)
        padded = F.pad(values, (0, 0, reach, reach) if dim == 2 else (reach, reach, 0, 0), mode="reflect")
        values = torch.zeros_like(values)
        for tap in range(2 * reach + 1):
            values.addcmul_(padded.narrow(dim, tap, length), _per_sample(weights[:, tap]))
    return _to_bytes(values.round_())


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
    "Hue": hue,
    "Grey": grey,
    "Blur": blur,
}


def inverse_matrices(
    op: str, magnitude: np.ndarray, height: int, width: int, whole_pixels: bool = True
) -> Float[np.ndarray, "n 2 3"]:
    """Affine matrices from output to source positions, both relative to the image centre, as torchvision has them.

    Translations are whole pixels, because torchvision truncates, if `whole_pixels`; shears keep the top left corner in
    place; a rotation is counter-clockwise, in degrees.
    """
    shift = np.trunc(magnitude) if whole_pixels else magnitude
    matrices = np.zeros((len(magnitude), 2, 3))
    matrices[:, 0, 0] = matrices[:, 1, 1] = 1.0
    if op == "TranslateX":
        matrices[:, 0, 2] = -shift
    elif op == "TranslateY":
        matrices[:, 1, 2] = -shift
    elif op == "ShearX":
        matrices[:, 0, 1] = magnitude
        matrices[:, 0, 2] = magnitude * height / 2
    elif op == "ShearY":
        matrices[:, 1, 0] = magnitude
        matrices[:, 1, 2] = magnitude * width / 2
    elif op == "Rotate":
        angle = np.radians(-magnitude)
        matrices[:, 0, 0] = matrices[:, 1, 1] = np.cos(angle)
        matrices[:, 0, 1] = np.sin(angle)
        matrices[:, 1, 0] = -np.sin(angle)
    else:
        raise ValueError(f"{op} is not a geometric operation")
    return matrices.astype(np.float32)


def affine(
    images: UInt8[Tensor, "n 3 height width"], matrices: Float[Tensor, "n 2 3"], fill: int = GREY
) -> UInt8[Tensor, "n 3 height width"]:
    """Each output pixel takes the nearest source pixel, or `fill` where the source lies outside."""
    n, channels, height, width = images.shape
    source_x, source_y, _ = _source(matrices, height, width)
    column, row = source_x.round().long(), source_y.round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    position = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(n, 1, -1).expand(-1, channels, -1)
    moved = images.flatten(2).gather(2, position).view_as(images)
    return moved.masked_fill(~inside.unsqueeze(1), fill)


def _source(matrices: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each output pixel comes from: column and row, and whether that lies in the image (edge to edge)."""
    device = matrices.device
    x = (torch.arange(width, device=device) + (0.5 - width / 2)).view(1, 1, width)
    y = (torch.arange(height, device=device) + (0.5 - height / 2)).view(1, height, 1)
    terms = matrices.view(-1, 2, 3, 1, 1)
    column = terms[:, 0, 0] * x + terms[:, 0, 1] * y + terms[:, 0, 2] + (width / 2 - 0.5)
    row = terms[:, 1, 0] * x + terms[:, 1, 1] * y + terms[:, 1, 2] + (height / 2 - 0.5)
    inside = (column >= -0.5) & (column < width - 0.5) & (row >= -0.5) & (row < height - 0.5)
    return column, row, inside


def affine_bicubic(
    images: UInt8[Tensor, "n 3 height width"],
    matrices: Float[Tensor, "n 2 3"],
    fill: tuple[int, int, int],
    along: str = "both",
) -> UInt8[Tensor, "n 3 height width"]:
    """The same with PIL's bicubic interpolation: cubic convolution with a = -1, cut (not rounded) to whole numbers.

    `along` "x" or "y" says that the matrices move pixels along that direction only, which takes four gathers, not 16.
    """
    n, channels, height, width = images.shape
    column, row, inside = _source(matrices, height, width)
    columns, rows = _cubic_taps(column, along != "y"), _cubic_taps(row, along != "x")
    source = images.flatten(2).float()
    total = torch.zeros_like(source)
    for y, weight_y in rows:
        line = y.clamp(0, height - 1) * width
        for x, weight_x in columns:
            position = (line + x.clamp(0, width - 1)).view(n, 1, -1).expand(-1, channels, -1)
            total.addcmul_(source.gather(2, position), (weight_y * weight_x).view(n, 1, -1))
    # a sum that is an integer in exact arithmetic must not be truncated to the one below
    moved = (total + 1e-3).clamp_(0, 255).to(torch.uint8).view_as(images)
    outside = ~inside
    for channel, colour in enumerate(fill):  # a tensor of the colours would have to be copied to the device
        moved[:, channel].masked_fill_(outside, colour)
    return moved


def _cubic_taps(position: Tensor, between: bool) -> list[tuple[Tensor, Tensor]]:
    """(pixel, weight) of the four neighbours, or of the one that `position` is where it lies on whole pixels."""
    if not between:
        whole = position.round()
        return [(whole.long(), torch.ones_like(position))]
    low = position.floor()
    d = position - low
    square, cube = d * d, d * d * d
    weights = (2 * square - d - cube, 1 - 2 * square + cube, d + square - cube, cube - square)
    return [(low.long() + offset, weight) for offset, weight in zip((-1, 0, 1, 2), weights, strict=True)]
