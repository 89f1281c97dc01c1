"""Operations that only some samples of a chunk get: who gets what is decided on the host, the work is done in groups.

The random tables live on the host, so the samples an operation applies to are known there and each operation touches
only those, without asking the device anything.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor


def split_by_group(
    group: Int[np.ndarray, " n"], names: Sequence[str]
) -> Iterator[tuple[str, Int[np.ndarray, " members"]]]:
    """The name of every group that has a member, and its members in ascending order."""
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(names) + 1))
    for name, first, last in zip(names, bounds[:-1], bounds[1:], strict=True):
        if first < last:
            yield name, order[first:last]


def apply_groups(
    images: UInt8[Tensor, "n 3 height width"],
    plan: dict[str, Tensor],
    prefix: str,
    operation: Callable[[str, Tensor, Tensor], Tensor],
) -> UInt8[Tensor, "n 3 height width"]:
    """`operation(name, chosen images, values)` for every "<prefix>/<step>/<name>/index" of the plan and its "value".

    In the order of the plan, so first steps come before second ones. Changes `images` in place and returns it.
    """
    for key, index in plan.items():
        if not (key.startswith(f"{prefix}/") and key.endswith("/index")):
            continue
        value = plan[key.removesuffix("index") + "value"]
        changed = operation(key.split("/")[2], images.index_select(0, index), value)
        images.index_copy_(0, index, changed)
    return images
