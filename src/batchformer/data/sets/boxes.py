"""Images and the boxes in them, as arrays, and what every set of boxes must fulfil."""

import hashlib
import os
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from batchformer.errors import UserError

_BEYOND = 0.1  # of an image's side a box may reach out of it; annotators' boxes do so by a pixel or two
_PER_BOX = ("boxes", "labels", "area", "crowd", "ignore", "segment_ids")
_PER_IMAGE = ("paths", "ids", "sizes", "segmentations")


@dataclass(frozen=True)
class Categories:
    """The categories in label order: their official ids and names, and for each whether it is a thing (or stuff)."""

    ids: list[int]
    names: list[str]
    things: list[bool]


@dataclass(frozen=True)
class Scenes:
    """Images, and the boxes of all of them one after another: arrays, which forked workers share without copying.

    Boxes are as annotated: corners x1, y1, x2, y2 in pixels, crowds and degenerate ones included. `ignore` marks what
    need not be found but may be (VOC's difficult objects).
    """

    source: str  # the file or folder the boxes are from, for messages
    folder: str  # paths are relative to it
    paths: np.ndarray  # bytes
    ids: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]  # height, width
    first: Int[np.ndarray, " images+1"]  # the boxes of image k are those from first[k] to first[k + 1]
    boxes: Float[np.ndarray, "boxes 4"]
    labels: Int[np.ndarray, " boxes"]
    area: Float[np.ndarray, " boxes"]
    crowd: Bool[np.ndarray, " boxes"]
    ignore: Bool[np.ndarray, " boxes"]

    def __len__(self) -> int:
        return len(self.ids)

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.paths[index]))

    def rows(self, index: int) -> slice:
        return slice(int(self.first[index]), int(self.first[index + 1]))

    def trained(self) -> Bool[np.ndarray, " boxes"]:
        """Which boxes a detector is trained on: no crowds, nothing to ignore, and some area inside the image."""
        inside = self.boxes.clip(0, np.repeat(self.sizes[:, [1, 0, 1, 0]], np.diff(self.first), axis=0))
        return ~self.crowd & ~self.ignore & (inside[:, 2:] > inside[:, :2]).all(1)

    def some(self, images: Int[np.ndarray, " some"]) -> "Scenes":
        """Only these images, in this order."""
        counts = np.diff(self.first)[images]
        rows = np.concatenate([np.arange(0), *(np.arange(self.first[k], self.first[k + 1]) for k in images)]).astype(
            int
        )
        arrays = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name in _PER_BOX + _PER_IMAGE
        }
        chosen = {name: array[rows if name in _PER_BOX else images] for name, array in arrays.items()}
        return replace(self, first=np.concatenate([[0], np.cumsum(counts)]), **chosen)

    def fingerprint(self) -> str:
        """sha256 of everything but the place it was read from."""
        digest = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and field.name != "segmentations":
                digest.update(f"{field.name} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()


def make_scenes(
    source: str,
    folder: str,
    images: list[tuple[int, str, int, int]],
    owner: Int[np.ndarray, " boxes"],
    names: list[Any],
    **per_box: np.ndarray,
) -> Scenes:
    """From images (id, path, height, width) and boxes in any order, each with the place of its image (`owner`).

    `names` are what messages call the boxes.
    """
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(images)) if len(owner) else np.zeros(len(images), dtype=np.int64)
    scenes = Scenes(
        source=source,
        folder=folder,
        paths=np.array([os.fsencode(path) for _, path, _, _ in images]),
        ids=np.array([image for image, _, _, _ in images], dtype=np.int64),
        sizes=np.array([size for _, _, *size in images], dtype=np.int64).reshape(-1, 2),
        first=np.concatenate([[0], np.cumsum(counts)]),
        **{name: values[order] for name, values in per_box.items()},
    )
    _check_boxes(scenes, owner[order], [names[k] for k in order])
    return scenes


def _check_boxes(scenes: Scenes, owner: np.ndarray, names: list[Any]) -> None:
    """Refuse boxes that are no numbers or lie out of their image: they are in another format, or of another image."""
    sides = scenes.sizes[owner][:, [1, 0, 1, 0]].reshape(-1, 4)
    beyond = np.maximum(-scenes.boxes, scenes.boxes - sides) > np.maximum(_BEYOND * sides, 2)
    wrong = np.flatnonzero(~np.isfinite(scenes.boxes).all(1) | beyond.any(1))
    if not len(wrong):
        return
    k = wrong[0]
    x1, y1, x2, y2 = (f"{value:g}" for value in scenes.boxes[k])
    height, width = scenes.sizes[owner[k]]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise UserError(
        f"{scenes.source}: the box of annotation {names[k]}{more} reaches from ({x1}, {y1}) to ({x2}, {y2}), "
        f"out of its image of {width} x {height} pixels: check that boxes are in pixels and in this data set's format."
    )


def corners_to_centres(boxes: Float[np.ndarray, "boxes 4"], height: int, width: int) -> Float[np.ndarray, "boxes 4"]:
    """x1, y1, x2, y2 in pixels to centre and size in fractions of the image, the form of DETR's losses."""
    low, high = boxes[:, :2], boxes[:, 2:]
    return np.concatenate([(low + high) / 2, high - low], axis=1) / np.array([width, height, width, height])
