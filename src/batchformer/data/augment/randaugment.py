"""RandAugment (Cubuk et al., 2020) for a whole chunk of images, as DeiT uses it: timm's `rand-m9-mstd0.5-inc1`.

Two operations, drawn from 15 with replacement, each done with probability 1/2, at a magnitude from a normal
distribution around 9 with deviation 0.5, cut to 0 .. 10. "inc1" chooses the scales on which a larger magnitude always
changes the image more. The paper has 14 operations (identity among them, no SolarizeAdd, no Invert) and one fixed
magnitude. Geometric operations interpolate bicubically and fill with the mean colour, as timm's transform does when it
is made for bicubic training.
"""

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.colour import COLOUR_OPS
from batchformer.data.augment.draws import RandDraw, choose
from batchformer.data.augment.geometric import affine_bicubic, inverse_matrices
from batchformer.data.augment.groups import apply_groups, split_by_group

OPERATIONS = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
)
_MOVES = {"Rotate": "both", "ShearX": "x", "ShearY": "y", "TranslateX": "x", "TranslateY": "y"}
_MAGNITUDE, _DEVIATION, _LARGEST = 9.0, 0.5, 10.0
_PROBABILITY = 0.5
_STEPS = (
    (RandDraw.OPERATION_FIRST, RandDraw.CHANCE_FIRST, RandDraw.SIGN_FIRST),
    (RandDraw.OPERATION_SECOND, RandDraw.CHANCE_SECOND, RandDraw.SIGN_SECOND),
)
# operations that move pixels in the same direction are one group, because they are the same gathers on the device
_GROUP_OF = np.array([f"move {_MOVES[op]}" if op in _MOVES else op for op in OPERATIONS])
_GROUPS = tuple(sorted(set(_GROUP_OF.tolist())))
_GROUP_NUMBER = np.array([_GROUPS.index(name) for name in _GROUP_OF])


def strength(
    op: str, magnitude: Float[np.ndarray, " n"], sign: Float[np.ndarray, " n"], height: int, width: int
) -> Float[np.ndarray, " n"]:
    """What the operation is called with: degrees, slope, pixels, factor, bits, threshold or amount."""
    part = magnitude / _LARGEST
    if op == "Rotate":
        return sign * 30.0 * part
    if op in ("ShearX", "ShearY"):
        return sign * 0.3 * part
    if op in ("TranslateX", "TranslateY"):
        return sign * 0.45 * part * (width if op == "TranslateX" else height)
    if op in ("Color", "Contrast", "Brightness", "Sharpness"):
        return np.maximum(0.1, 1.0 + sign * 0.9 * part)
    if op == "Posterize":
        return 4.0 - np.trunc(part * 4)
    if op == "Solarize":
        return 256.0 - np.trunc(part * 256)
    if op == "SolarizeAdd":
        return np.trunc(part * 110)
    return np.zeros_like(magnitude)


def magnitudes(draws: Float[np.ndarray, "n draws"]) -> Float[np.ndarray, "2 n"]:
    """Those of the first and of the second operation: two normal numbers from two uniform ones (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-draws[:, RandDraw.RADIUS]))
    angle = 2 * np.pi * draws[:, RandDraw.ANGLE]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)])
    return np.clip(_MAGNITUDE + _DEVIATION * normal, 0.0, _LARGEST)


def plan_randaugment(draws: Float[np.ndarray, "n draws"], height: int, width: int) -> dict[str, np.ndarray]:
    """For both steps and every group of operations: the samples, and strengths or matrices (see `apply_groups`)."""
    plan: dict[str, np.ndarray] = {}
    for step, ((operation, chance, sign), magnitude) in enumerate(zip(_STEPS, magnitudes(draws), strict=True)):
        members = np.flatnonzero(draws[:, chance] < _PROBABILITY)
        ops = choose(draws[members, operation], len(OPERATIONS))
        signs = np.where(draws[members, sign] < 0.5, 1.0, -1.0)
        for group, part in split_by_group(_GROUP_NUMBER[ops], _GROUPS):
            plan[f"randaugment/{step}/{group}/index"] = members[part]
            plan[f"randaugment/{step}/{group}/value"] = _values(
                ops[part], magnitude[members[part]], signs[part], height, width
            )
    return plan


def _values(ops: Int[np.ndarray, " n"], magnitude: np.ndarray, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """The group's numbers for the device: strengths, or matrices where pixels move."""
    moving = OPERATIONS[ops[0]] in _MOVES
    values = np.zeros((len(ops), 2, 3) if moving else len(ops), np.float32)
    for number in np.unique(ops):
        op, of_op = OPERATIONS[number], ops == number
        amount = strength(op, magnitude[of_op], sign[of_op], height, width)
        if op.startswith("Translate"):
            amount = -amount  # timm moves the place that is read, torchvision the image
        values[of_op] = inverse_matrices(op, amount, height, width, whole_pixels=False) if moving else amount
    return values


def randaugment(
    images: UInt8[Tensor, "n 3 height width"], plan: dict[str, Tensor], fill: tuple[int, int, int]
) -> UInt8[Tensor, "n 3 height width"]:
    """Apply the plan. Changes `images` in place and returns it."""

    def operate(group: str, chosen: Tensor, value: Tensor) -> Tensor:
        if group.startswith("move "):
            return affine_bicubic(chosen, value, fill, group.removeprefix("move "))
        return COLOUR_OPS[group](chosen, value)

    return apply_groups(images, plan, "randaugment", operate)
