"""AutoAugment for a whole chunk of images: which sample gets what is decided on the host, the work is done in groups.

The random table lives on the host, so the samples an operation applies to are known there and each operation touches
only those, without asking the device anything.
"""

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from batchformer.data.augment.colour import COLOUR_OPS
from batchformer.data.augment.draws import Draw, choose
from batchformer.data.augment.geometric import affine, inverse_matrices
from batchformer.data.augment.policy import CIFAR10_POLICY, GEOMETRIC, strength

_STEPS = ((Draw.CHANCE_FIRST, Draw.SIGN_FIRST), (Draw.CHANCE_SECOND, Draw.SIGN_SECOND))
Plan = dict[str, np.ndarray]


def plan_autoaugment(draws: Float[np.ndarray, "n draws"], height: int, width: int) -> Plan:
    """For both steps and every operation: the samples it applies to and its strength there.

    Keys read "autoaugment/<step>/<operation>/index" and ".../value". All geometric operations of a step are one group
    ("Affine", values are matrices), because they are one gather on the device.
    """
    plan: Plan = {}
    policy = choose(draws[:, Draw.POLICY], len(CIFAR10_POLICY))
    by_policy = np.argsort(policy, kind="stable")
    bounds = np.searchsorted(policy[by_policy], np.arange(len(CIFAR10_POLICY) + 1))
    for step, (chance, sign) in enumerate(_STEPS):
        groups: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for number, sub_policy in enumerate(CIFAR10_POLICY):
            op, probability, level = sub_policy[step]
            members = by_policy[bounds[number] : bounds[number + 1]]
            members = members[draws[members, chance] < probability]
            if not len(members):
                continue
            direction = np.where(draws[members, sign] < 0.5, -1.0, 1.0)
            value = strength(op, level, direction, height, width)
            if op in GEOMETRIC:
                groups.setdefault("Affine", []).append((members, inverse_matrices(op, value, height, width)))
            else:
                groups.setdefault(op, []).append((members, value.astype(np.float32)))
        for op, parts in groups.items():
            plan[f"autoaugment/{step}/{op}/index"] = np.concatenate([members for members, _ in parts])
            plan[f"autoaugment/{step}/{op}/value"] = np.concatenate([value for _, value in parts])
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
        changed = affine(chosen, value) if op == "Affine" else COLOUR_OPS[op](chosen, value)
        images.index_copy_(0, index, changed)
    return images
