"""Translate, shear and rotate as one batched affine gather, every sample with its own matrix.

Equal to torchvision's `affine` and `rotate` with nearest interpolation and a fill value. The source position is
computed element by element in float32 and never by a matrix product, because a product may run in TF32, whose ten bits
move pixels.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

GREY = 128


def inverse_matrices(op: str, magnitude: np.ndarray, height: int, width: int) -> np.ndarray:
    """(n, 2, 3): from an output position to its source, both relative to the image centre, as torchvision has it.

    Translations are whole pixels (torchvision truncates); shears keep the top left corner in place; a rotation is
    counter-clockwise, in degrees.
    """
    matrices = np.zeros((len(magnitude), 2, 3))
    matrices[:, 0, 0] = matrices[:, 1, 1] = 1.0
    if op == "TranslateX":
        matrices[:, 0, 2] = -np.trunc(magnitude)
    elif op == "TranslateY":
        matrices[:, 1, 2] = -np.trunc(magnitude)
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
    device = images.device
    x = (torch.arange(width, device=device) + (0.5 - width / 2)).view(1, 1, width)
    y = (torch.arange(height, device=device) + (0.5 - height / 2)).view(1, height, 1)
    terms = matrices.view(n, 2, 3, 1, 1)
    source_x = terms[:, 0, 0] * x + terms[:, 0, 1] * y + terms[:, 0, 2] + (width / 2 - 0.5)
    source_y = terms[:, 1, 0] * x + terms[:, 1, 1] * y + terms[:, 1, 2] + (height / 2 - 0.5)
    column, row = source_x.round().long(), source_y.round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    position = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(n, 1, -1).expand(-1, channels, -1)
    moved = images.flatten(2).gather(2, position).view_as(images)
    return moved.masked_fill(~inside.unsqueeze(1), fill)
