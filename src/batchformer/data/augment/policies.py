"""Batched AutoAugment, RandAugment, and the colours of a `RegionView`.

AutoAugment (Cubuk et al., 2019), the policy for CIFAR-10: the paper searched 25 sub-policies, each two operations with
a probability and a magnitude from 0 to 9. The operations and their ranges are those of
`torchvision.transforms.v2.AutoAugment(AutoAugmentPolicy.CIFAR10)`, with the grey fill 128 of the code released with
Balanced Softmax.

RandAugment (Cubuk et al., 2020) as DeiT uses it, timm's `rand-m9-mstd0.5-inc1`: two operations, drawn from 15 with
replacement, each done with probability 1/2, at a magnitude from a normal distribution around 9 with deviation 0.5, cut
to 0 .. 10. "inc1" chooses the scales on which a larger magnitude always changes the image more. The paper has 14
operations (identity among them, no SolarizeAdd, no Invert) and one fixed magnitude. Geometric operations interpolate
bicubically and fill with the mean colour, as timm's transform does when it is made for bicubic training.

A `RegionView` has torchvision's ColorJitter (brightness, contrast, saturation and hue, each by its own strength, in an
order drawn for every image), RandomGrayscale, GaussianBlur and RandomSolarize, each for a part of the images.
"""

from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.draws import (
    AugmentDraw,
    JitterDraw,
    RandAugmentDraw,
    ViewDraw,
    apply_groups,
    split_by_group,
    uniform_integers,
)
from batchformer.data.augment.operations import COLOUR_OPS, affine, affine_bicubic, inverse_matrices
from batchformer.data.augment.options import BLUR_SIGMA, SOLARIZE_THRESHOLD, RegionView

GEOMETRIC = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
_LEVELS = 9


def autoaugment_strength(op: str, level: int | None, sign: np.ndarray, height: int, width: int) -> np.ndarray:
    """The operation's argument, one number per sample: pixels, slope, degrees, factor, bits or threshold.

    `sign` (+1 or -1) counts only for the operations that have a direction.
    """
    part = 0.0 if level is None else level / _LEVELS
    if op in ("ShearX", "ShearY"):
        return sign * (0.3 * part)
    if op == "TranslateX":
        return sign * (150.0 / 331.0 * width * part)
    if op == "TranslateY":
        return sign * (150.0 / 331.0 * height * part)
    if op == "Rotate":
        return sign * (30.0 * part)
    if op in FACTORS:
        # torchvision's magnitudes are float32; a factor of 1 - float32(.6) cuts to other bytes than one of .4
        return 1.0 + sign * float(np.float32(0.9 * part))
    if op == "Posterize":
        return np.full(len(sign), np.round(8 - 4 * part))
    if op == "Solarize":
        return np.full(len(sign), 255.0 * (1.0 - part))
    return np.zeros(len(sign))


@lru_cache
def cifar10_policy() -> list[tuple[tuple[str, float, int | None], ...]]:
    """Torchvision's table: for each sub-policy two steps, each an operation, its probability and its magnitude."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy

    return AutoAugment(AutoAugmentPolicy.CIFAR10).policies


_AUTO_STEPS = ((AugmentDraw.CHANCE_FIRST, AugmentDraw.SIGN_FIRST), (AugmentDraw.CHANCE_SECOND, AugmentDraw.SIGN_SECOND))
_AFFINE = "Affine"


class _StepTable(NamedTuple):
    """One of the two steps of all sub-policies, looked up by the number of the sub-policy."""

    groups: tuple[str, ...]
    group: Int[np.ndarray, " policies"]
    probability: Float[np.ndarray, " policies"]
    value: Float[np.ndarray, "policies signs"]
    matrix: Float[np.ndarray, "policies signs 2 3"]


@lru_cache
def _step_table(step: int, height: int, width: int) -> _StepTable:
    ops, probability, levels = zip(*(pair[step] for pair in cifar10_policy()), strict=True)
    names = [_AFFINE if op in GEOMETRIC else op for op in ops]
    groups = tuple(sorted(set(names)))
    signs = np.array([-1.0, 1.0])
    strengths = [autoaugment_strength(op, level, signs, height, width) for op, level in zip(ops, levels, strict=True)]
    value = np.stack(strengths)
    matrix = np.zeros((len(ops), 2, 2, 3), dtype=np.float32)
    for number, op in enumerate(ops):
        if op in GEOMETRIC:
            matrix[number] = inverse_matrices(op, value[number], height, width)
    return _StepTable(
        groups,
        np.array([groups.index(name) for name in names], dtype=np.int16),
        np.array(probability),
        value.astype(np.float32),
        matrix,
    )


def plan_autoaugment(draws: Float[np.ndarray, "n draws"], height: int, width: int) -> dict[str, np.ndarray]:
    """For both steps and every operation: the samples it applies to and its strength there.

    Keys read "autoaugment/<step>/<operation>/index" and ".../value". All geometric operations of a step are one group
    ("Affine", values are matrices), because they are one gather on the device.
    """
    plan: dict[str, np.ndarray] = {}
    policy = uniform_integers(draws[:, AugmentDraw.POLICY], len(cifar10_policy()))
    for step, (chance, sign) in enumerate(_AUTO_STEPS):
        table = _step_table(step, height, width)
        members = np.flatnonzero(draws[:, chance] < table.probability[policy])
        for op, part in split_by_group(table.group[policy[members]], table.groups):
            chosen = members[part]
            values = table.matrix if op == _AFFINE else table.value
            direction = (draws[chosen, sign] >= 0.5).astype(np.int64)
            plan[f"autoaugment/{step}/{op}/index"] = chosen
            plan[f"autoaugment/{step}/{op}/value"] = values[policy[chosen], direction]
    return plan


def autoaugment(
    images: UInt8[Tensor, "n 3 height width"], plan: dict[str, Tensor]
) -> UInt8[Tensor, "n 3 height width"]:
    """Apply the plan. Changes `images` in place and returns it."""
    return apply_groups(images, plan, "autoaugment", _autoaugment_operation)


def _autoaugment_operation(op: str, images: Tensor, value: Tensor) -> Tensor:
    return affine(images, value) if op == _AFFINE else COLOUR_OPS[op](images, value)


OPERATIONS = ("AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "SolarizeAdd", "Color",
              "Contrast", "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY")  # fmt: skip
_MOVES = {"Rotate": "both", "ShearX": "x", "ShearY": "y", "TranslateX": "x", "TranslateY": "y"}
_MAGNITUDE, _DEVIATION, _LARGEST = 9.0, 0.5, 10.0
_PROBABILITY = 0.5
_RAND_STEPS = (
    (RandAugmentDraw.OPERATION_FIRST, RandAugmentDraw.CHANCE_FIRST, RandAugmentDraw.SIGN_FIRST),
    (RandAugmentDraw.OPERATION_SECOND, RandAugmentDraw.CHANCE_SECOND, RandAugmentDraw.SIGN_SECOND),
)
# operations that move pixels in the same direction are one group, because they are the same gathers on the device
_GROUP_OF = np.array([f"move {_MOVES[op]}" if op in _MOVES else op for op in OPERATIONS])
_GROUPS = tuple(sorted(set(_GROUP_OF.tolist())))
_GROUP_NUMBER = np.array([_GROUPS.index(name) for name in _GROUP_OF])


def randaugment_strength(
    op: str, magnitude: Float[np.ndarray, " n"], sign: Float[np.ndarray, " n"], height: int, width: int
) -> Float[np.ndarray, " n"]:
    """The operation's argument, one number per sample: degrees, slope, pixels, factor, bits, threshold or amount."""
    part = magnitude / _LARGEST
    if op == "Rotate":
        return sign * 30.0 * part
    if op in ("ShearX", "ShearY"):
        return sign * 0.3 * part
    if op in ("TranslateX", "TranslateY"):
        return sign * 0.45 * part * (width if op == "TranslateX" else height)
    if op in FACTORS:
        return np.maximum(0.1, 1.0 + sign * 0.9 * part)
    if op == "Posterize":
        return 4.0 - np.trunc(part * 4)
    if op == "Solarize":
        return 256.0 - np.trunc(part * 256)
    if op == "SolarizeAdd":
        return np.trunc(part * 110)
    return np.zeros_like(magnitude)


def magnitudes(draws: Float[np.ndarray, "n draws"]) -> Float[np.ndarray, "2 n"]:
    """Magnitudes of the first and second operation: two normal numbers from two uniform ones (Box and Muller)."""
    radius = np.sqrt(-2 * np.log1p(-draws[:, RandAugmentDraw.RADIUS]))
    angle = 2 * np.pi * draws[:, RandAugmentDraw.ANGLE]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)])
    return np.clip(_MAGNITUDE + _DEVIATION * normal, 0.0, _LARGEST)


def plan_randaugment(draws: Float[np.ndarray, "n draws"], height: int, width: int) -> dict[str, np.ndarray]:
    """For both steps and every group of operations: the samples, and strengths or matrices (see `apply_groups`)."""
    plan: dict[str, np.ndarray] = {}
    for step, ((operation, chance, sign), magnitude) in enumerate(zip(_RAND_STEPS, magnitudes(draws), strict=True)):
        members = np.flatnonzero(draws[:, chance] < _PROBABILITY)
        ops = uniform_integers(draws[members, operation], len(OPERATIONS))
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
        amount = randaugment_strength(op, magnitude[of_op], sign[of_op], height, width)
        if op.startswith("Translate"):
            amount = -amount  # timm translates the source position, torchvision the image
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


_JITTERED = ("Brightness", "Contrast", "Color", "Hue")  # in the order of JitterDraw
_ORDERS = np.array(list(permutations(range(len(_JITTERED)))))


def view_purposes(view: RegionView) -> tuple[str, ...]:
    """The tables of random numbers that `plan_view` needs."""
    return ("jitter", "view") if view.jitter_prob < 1 or view.blur or view.solarize else ("jitter",)


def plan_view(draws: dict[str, Float[np.ndarray, "n draws"]], view: RegionView) -> dict[str, np.ndarray]:
    """For every change of colour, in the order of the view, the samples and its strength there (see `apply_groups`).

    Factors are uniform in 1 - s .. 1 + s for a strength s of the jitter, turns of the hue in -s .. s.
    """
    plan: dict[str, np.ndarray] = {}
    colours = draws["jitter"]
    others = draws.get("view", np.zeros((len(colours), len(ViewDraw))))
    jittered = np.flatnonzero(others[:, ViewDraw.JITTER] < view.jitter_prob)
    orders = _ORDERS[uniform_integers(colours[:, JitterDraw.ORDER], len(_ORDERS))]
    uniform = colours[:, JitterDraw.BRIGHTNESS : JitterDraw.HUE + 1]
    strengths = np.array(view.jitter) * (2 * uniform - 1) + [1.0, 1.0, 1.0, 0.0]
    for step in range(len(_JITTERED)):
        for name, part in split_by_group(orders[jittered, step], _JITTERED):
            number, members = _JITTERED.index(name), jittered[part]
            if view.jitter[number]:
                plan[f"view/{step}/{name}/index"] = members
                plan[f"view/{step}/{name}/value"] = strengths[members, number].astype(np.float32)
    low, high = BLUR_SIGMA
    sigma = low + (high - low) * others[:, ViewDraw.SIGMA]
    for name, chance, probability, values in (
        ("Grey", colours[:, JitterDraw.GREY], view.grey, np.ones(len(colours))),
        ("Blur", others[:, ViewDraw.BLUR], view.blur, sigma),
        ("Solarize", others[:, ViewDraw.SOLARIZE], view.solarize, np.full(len(colours), SOLARIZE_THRESHOLD)),
    ):
        if len(members := np.flatnonzero(chance < probability)):
            plan[f"view/then/{name}/index"] = members
            plan[f"view/then/{name}/value"] = values[members].astype(np.float32)
    return plan


def apply_view(images: UInt8[Tensor, "n 3 height width"], plan: dict[str, Tensor]) -> UInt8[Tensor, "n 3 height width"]:
    """Apply the plan. Changes `images` in place and returns it."""
    return apply_groups(images, plan, "view", lambda name, chosen, value: COLOUR_OPS[name](chosen, value))
