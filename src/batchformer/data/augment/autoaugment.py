"""AutoAugment for a whole chunk of images."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.colour import COLOUR_OPS
from batchformer.data.augment.draws import Draw, choose
from batchformer.data.augment.geometric import affine, inverse_matrices
from batchformer.data.augment.groups import apply_groups, split_by_group
from batchformer.data.augment.policy import CIFAR10_POLICY, GEOMETRIC, strength

_STEPS = ((Draw.CHANCE_FIRST, Draw.SIGN_FIRST), (Draw.CHANCE_SECOND, Draw.SIGN_SECOND))
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
    ops = [pair[step][0] for pair in CIFAR10_POLICY]
    names = [_AFFINE if op in GEOMETRIC else op for op in ops]
    groups = tuple(sorted(set(names)))
    signs = np.array([-1.0, 1.0])
    value = np.stack(
        [strength(op, pair[step][2], signs, height, width) for op, pair in zip(ops, CIFAR10_POLICY, strict=True)]
    )
    matrix = np.zeros((len(ops), 2, 2, 3), dtype=np.float32)
    for number, op in enumerate(ops):
        if op in GEOMETRIC:
            matrix[number] = inverse_matrices(op, value[number], height, width)
    return _StepTable(
        groups,
        np.array([groups.index(name) for name in names], dtype=np.int16),
        np.array([pair[step][1] for pair in CIFAR10_POLICY]),
        value.astype(np.float32),
        matrix,
    )


def plan_autoaugment(draws: Float[np.ndarray, "n draws"], height: int, width: int) -> dict[str, np.ndarray]:
    """For both steps and every operation: the samples it applies to and its strength there.

    Keys read "autoaugment/<step>/<operation>/index" and ".../value". All geometric operations of a step are one group
    ("Affine", values are matrices), because they are one gather on the device.
    """
    plan: dict[str, np.ndarray] = {}
    policy = choose(draws[:, Draw.POLICY], len(CIFAR10_POLICY))
    for step, (chance, sign) in enumerate(_STEPS):
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
    return apply_groups(images, plan, "autoaugment", _operate)


def _operate(op: str, images: Tensor, value: Tensor) -> Tensor:
    return affine(images, value) if op == _AFFINE else COLOUR_OPS[op](images, value)
