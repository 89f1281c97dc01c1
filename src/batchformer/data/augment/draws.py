"""Tables of the random numbers of one epoch, and the copy of augmentation parameters to the device.

One table per purpose, one row per slot (see `batchformer.data.loading.order`). The tables are on the host, so the
samples an operation applies to are known there: each operation touches only those (`apply_groups`), without host
synchronisation, and the parameters are sent to the device in one copy (`to_device`).
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from batchformer.data.loading.order import generator

_ALIGNMENT = 16
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}
ATTEMPTS = 10  # regions torchvision and timm draw at most to find one that fits


class AugmentDraw(IntEnum):
    """Columns for crop, flip, AutoAugment, Cutout. Reordering or adding any changes every augmentation of every run."""

    ROW = 0
    COLUMN = 1
    FLIP = 2
    POLICY = 3
    CHANCE_FIRST = 4
    CHANCE_SECOND = 5
    SIGN_FIRST = 6
    SIGN_SECOND = 7
    HOLE_ROW = 8
    HOLE_COLUMN = 9


class RandAugmentDraw(IntEnum):
    """RandAugment: two operations, each done or not, their directions; two numbers make two normal ones."""

    OPERATION_FIRST = 0
    OPERATION_SECOND = 1
    CHANCE_FIRST = 2
    CHANCE_SECOND = 3
    SIGN_FIRST = 4
    SIGN_SECOND = 5
    RADIUS = 6
    ANGLE = 7


class JitterDraw(IntEnum):
    """ColorJitter and RandomGrayscale: the order of the four changes, their strengths, whether grey."""

    ORDER = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    GREY = 5


class ViewDraw(IntEnum):
    """The other steps of a `RegionView`: whether jittered, blurred (and by how much), solarised."""

    JITTER = 0
    BLUR = 1
    SIGMA = 2
    SOLARIZE = 3


class RegionDraw(IntEnum):
    """Columns for a rectangle: whether, where, noise key; from `AREAS` on the attempts' areas, then their ratios."""

    CHANCE = 0
    TOP = 1
    LEFT = 2
    KEY = 3
    AREAS = 4
    RATIOS = 4 + ATTEMPTS
    END = 4 + 2 * ATTEMPTS


COLUMNS = {
    "augment": len(AugmentDraw),
    "randaugment": len(RandAugmentDraw),
    "crop": RegionDraw.END,
    "erase": RegionDraw.END,
    "jitter": len(JitterDraw),
    "rotate": 1,
    "view": len(ViewDraw),
}


def draw_table(
    samples: int, seed: int, epoch: int, purpose: str = "augment", repeats: int = 1, view: int = 0
) -> np.ndarray:
    """Uniform numbers in [0, 1), (repeats * samples, columns): row `repeat * samples + i` belongs to sample i.

    Drawn for the whole data set, so that a sample's augmentation depends on (seed, epoch, index, repeat, view) and on
    nothing else: not on the batch size, the chunk, the process or the batch at which a run was resumed.
    """
    further = ("view", view) if view else ()
    keys = [(purpose, repeat, *further) if repeat or view else (purpose,) for repeat in range(repeats)]
    tables = [generator(seed, epoch, *key).random((samples, COLUMNS[purpose])) for key in keys]
    return tables[0] if repeats == 1 else np.concatenate(tables)


def uniform_integers(uniform: np.ndarray, choices: int | np.ndarray) -> np.ndarray:
    """Whole numbers 0 .. choices - 1, uniformly."""
    return (uniform * choices).astype(np.int64)


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


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy int64 and float32 arrays in one (on CUDA: pinned) buffer to the device, and return views of it.

    One copy per array would cost more than the augmentation; the copy is asynchronous, so the host goes on while the
    device is still busy with earlier steps.
    """
    offsets, total = {}, 0
    for name, array in arrays.items():
        offsets[name] = total
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host[offsets[name] : offsets[name] + array.nbytes] = flat
    copied = buffer.to(device, non_blocking=True)
    return {
        name: copied[offsets[name] : offsets[name] + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for name, array in arrays.items()
    }
