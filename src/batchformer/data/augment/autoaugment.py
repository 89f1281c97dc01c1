"""AutoAugment for a whole chunk of images: which sample gets what is decided on the host, the work is done in groups.

The random table lives on the host, so the samples an operation applies to are known there and each operation touches
only those, without asking the device anything.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.colour import COLOUR_OPS
from batchformer.data.augment.draws import Draw, choose
from batchformer.data.augment.geometric import affine, inverse_matrices
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
        members = members[np.argsort(table.group[policy[members]], kind="stable")]
        theirs, direction = policy[members], (draws[members, sign] >= 0.5).astype(np.int64)
        bounds = np.searchsorted(table.group[theirs], np.arange(len(table.groups) + 1))
        for op, first, last in zip(table.groups, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                values = table.matrix if op == _AFFINE else table.value
                plan[f"autoaugment/{step}/{op}/index"] = members[first:last]
                plan[f"autoaugment/{step}/{op}/value"] = values[theirs[first:last], direction[first:last]]
    return plan


def autoaugment(
    images: UInt8[Tensor, "n 3 height width"], plan: dict[str, Tensor]
) -> UInt8[Tensor, "n 3 height width"]:
    """Apply the plan, first steps before second ones. Changes `images` in place and returns it."""
    for key, index in plan.items():
        if not (key.startswith("autoaugment/") and key.endswith("/index")):
            continue
        op = key.split("/")[2]
        value = plan[key.removesuffix("index") + "value"]
        chosen = images.index_select(0, index)
        changed = affine(chosen, value) if op == _AFFINE else COLOUR_OPS[op](chosen, value)
        images.index_copy_(0, index, changed)
    return images
