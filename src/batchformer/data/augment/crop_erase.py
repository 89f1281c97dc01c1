"""Batched padded crop with flip, Cutout and random erasing.

Cutout (DeVries and Taylor, 2017): one square of each image becomes black. Random erasing (Zhong et al., 2020) as timm's
mode "pixel": noise in a rectangle of the normalised image.
"""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.draws import RegionDraw
from batchformer.data.augment.resample import erased_rectangles

_KEY_BITS = 53  # those of a uniform number of double precision


def crop_flip(
    padded: UInt8[Tensor, "store 3 padded_height padded_width"],
    index: Int[Tensor, " n"],
    row: Int[Tensor, " n"],
    column: Int[Tensor, " n"],
    flip: Int[Tensor, " n"],
    height: int,
    width: int,
) -> UInt8[Tensor, "n 3 height width"]:
    """The (height, width) window at (row, column) of each chosen image, mirrored where `flip` is 1: one gather.

    `padded` holds every image of the data set with its zero border already on, so cropping needs no test of bounds.
    """
    n, device = len(index), padded.device
    across = torch.arange(width, device=device)
    mirrored = torch.where(flip.view(n, 1).bool(), width - 1 - across, across)
    rows = row.view(n, 1) + torch.arange(height, device=device)
    columns = column.view(n, 1) + mirrored
    channels = torch.arange(padded.shape[1], device=device)
    return padded[index.view(n, 1, 1, 1), channels.view(1, -1, 1, 1), rows.view(n, 1, -1, 1), columns.view(n, 1, 1, -1)]


def cutout(
    images: UInt8[Tensor, "n 3 height width"], row: Int[Tensor, " n"], column: Int[Tensor, " n"], size: int
) -> UInt8[Tensor, "n 3 height width"]:
    """Zero the size x size square around (row, column), clipped at the border; before normalisation.

    The centre is uniform over the image, so squares at the border are smaller: this is the usual Cutout, and not a
    square that always lies inside.
    """
    half = size // 2
    return images.masked_fill(_hole(images, row - half, column - half, 2 * half, 2 * half), 0)


def _hole(
    images: Tensor, top: Tensor, left: Tensor, height: int | Tensor, width: int | Tensor
) -> Bool[Tensor, "n 1 height width"]:
    """Mask of the pixels inside the rectangle of their image, which may extend beyond the image."""
    rows, columns = (torch.arange(length, device=images.device) for length in images.shape[2:])
    inside_rows = (rows >= top.view(-1, 1)) & (rows < (top + height).view(-1, 1))
    inside_columns = (columns >= left.view(-1, 1)) & (columns < (left + width).view(-1, 1))
    return inside_rows[:, None, :, None] & inside_columns[:, None, None, :]


def plan_erasing(
    draws: Float[np.ndarray, "n draws"], height: int, width: int, probability: float
) -> dict[str, np.ndarray]:
    members, rectangles = erased_rectangles(draws, height, width, probability)
    if not len(members):
        return {}
    key = (draws[members, RegionDraw.KEY] * 2.0**_KEY_BITS).astype(np.int64)
    return {"erase/index": members, "erase/rectangle": np.stack(rectangles, axis=1), "erase/key": key}


def erase(images: Float[Tensor, "n 3 height width"], plan: dict[str, Tensor]) -> Float[Tensor, "n 3 height width"]:
    """Fill rectangles with standard normal noise, independent per pixel and channel. Changes `images` in place."""
    if "erase/index" not in plan:
        return images
    index = plan["erase/index"]
    chosen = images.index_select(0, index)
    hole = _hole(chosen, *plan["erase/rectangle"].unbind(1))
    noise = normal_noise(plan["erase/key"], chosen[0].numel()).view(chosen.shape)
    return images.index_copy_(0, index, torch.where(hole, noise, chosen))


def normal_noise(key: Int[Tensor, " n"], count: int) -> Float[Tensor, "n count"]:
    """`count` standard normal numbers that are a pure function of the key, on every device and in every batch.

    A torch generator has a state, so its numbers would depend on earlier samples. Here each pair of numbers is made
    from (key, position) by SplitMix64 (Steele et al., 2014), with the key as its state, and by Box and Muller.
    """
    half = -(-count // 2)
    bits = _mixed(key.view(-1, 1) + torch.arange(half, device=key.device) * _signed(0x9E3779B97F4A7C15))
    # 24 bits are what float32 can tell apart; half a step keeps the logarithm finite
    first = ((bits & 0xFFFFFF).float() + 0.5) / 2**24
    second = (_shifted(bits, 40) & 0xFFFFFF).float() / 2**24
    radius, angle = (-2 * first.log()).sqrt_(), second * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mixed(bits: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shifted(bits, 31)
