"""Translate, shear and rotate as one batched affine gather, every sample with its own matrix.

`affine` equals torchvision's `affine` and `rotate` with nearest interpolation and a fill value (AutoAugment),
`affine_bicubic` PIL's `transform` (RandAugment as timm has it). The source position is computed element by element in
float32 and never by a matrix product, because a product may run in TF32, whose ten bits move pixels.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

GREY = 128


def inverse_matrices(
    op: str, magnitude: np.ndarray, height: int, width: int, whole_pixels: bool = True
) -> Float[np.ndarray, "n 2 3"]:
    """From an output position to its source, both relative to the image centre, as torchvision has it.

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
    # a sum that is whole in exact arithmetic must not be cut to the number below
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
