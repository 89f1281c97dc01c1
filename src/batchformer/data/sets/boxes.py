"""Images with boxes: as arrays, with validation; and as samples and batches for DETR."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from batchformer.data.images import open_image
from batchformer.data.loading.samples import AddressedSamples
from batchformer.data.sets.annotations import BEYOND
from batchformer.errors import UserError

Transform = Callable[[dict[str, Any]], dict[str, Any]]
Sample = tuple[Float[Tensor, "3 height width"], dict[str, Any]]
Target = dict[str, Any]

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
    """Images and the concatenated boxes of all of them, as arrays, which forked workers share without copying.

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
    left_out: int = field(default=0, kw_only=True)  # boxes of negative width or height, which are dropped

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

    def subset(self, images: Int[np.ndarray, " some"]) -> "Scenes":
        """Only these images, in this order."""
        counts = np.diff(self.first)[images]
        rows = np.concatenate([np.arange(0), *(np.arange(self.first[k], self.first[k + 1]) for k in images)])
        parts = {**dict.fromkeys(_PER_BOX, rows.astype(int)), **dict.fromkeys(_PER_IMAGE, images)}
        chosen = {each.name: getattr(self, each.name)[parts[each.name]] for each in fields(self) if each.name in parts}
        return replace(self, first=np.concatenate([[0], np.cumsum(counts)]), **chosen)

    def fingerprint(self) -> str:
        """sha256 of everything but the path it was read from."""
        digest = hashlib.sha256()
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray) and each.name != "segmentations":
                digest.update(f"{each.name} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()


def make_scenes(
    source: str,
    folder: str,
    images: list[tuple[int, str, int, int]],
    owner: Int[np.ndarray, " boxes"],
    names: list[Any],
    keep_negative: bool = False,
    **per_box: np.ndarray,
) -> Scenes:
    """From images (id, path, height, width) and boxes in any order, each with the position of its image (`owner`).

    `names` identify the boxes in messages. Those of negative width or height are dropped, in training and evaluation.
    """
    order = np.argsort(owner, kind="stable")
    negative = (per_box["boxes"][order, 2:] < per_box["boxes"][order, :2]).any(1) & (not keep_negative)
    order, left_out = order[~negative], int(negative.sum())
    owner = owner[order]
    counts = np.bincount(owner, minlength=len(images)) if len(owner) else np.zeros(len(images), dtype=np.int64)
    scenes = Scenes(
        source=source,
        folder=folder,
        paths=np.array([os.fsencode(path) for _, path, _, _ in images]),
        ids=np.array([image for image, _, _, _ in images], dtype=np.int64),
        sizes=np.array([size for _, _, *size in images], dtype=np.int64).reshape(-1, 2),
        first=np.concatenate([[0], np.cumsum(counts)]),
        **{name: values[order] for name, values in per_box.items()},
        left_out=left_out,
    )
    _check_boxes(scenes, owner, [names[k] for k in order])
    return scenes


def _check_boxes(scenes: Scenes, owner: np.ndarray, names: list[Any]) -> None:
    """Refuse boxes that are not finite or outside of their image: they are in another format, or of another image."""
    sides = scenes.sizes[owner][:, [1, 0, 1, 0]].reshape(-1, 4)
    beyond = np.maximum(-scenes.boxes, scenes.boxes - sides) > np.maximum(BEYOND * sides, 2)
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


class DetectionSamples(AddressedSamples):
    """Dataset of (pixels, target), see `DetectionData`. With `truth`, targets hold the annotations for evaluation."""

    def __init__(
        self, scenes: Scenes, transform: Transform, seed: int | None, truth: bool = False, pad_multiple: int = 1
    ) -> None:
        super().__init__(seed)
        self.scenes, self.transform, self.truth, self.pad_multiple = scenes, transform, truth, pad_multiple
        self._trained = scenes.trained()
        self._decoded: dict[int, Any] | None = None

    def keep_decoded(self) -> None:
        """Cache decoded files from now on. Transforms do not change images in place."""
        self._decoded = {}

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def collate(self) -> Callable[[list[Sample]], dict[str, Any]]:
        return partial(collate_detection, multiple=self.pad_multiple)

    def _read(self, index: int) -> Any:
        if self._decoded is None:
            return self._decode(index)
        if index not in self._decoded:
            self._decoded[index] = self._decode(index)
        return self._decoded[index]

    def _augment(self, index: int, stored: Any, view: int) -> Sample:
        from torchvision import tv_tensors

        rows = self.scenes.rows(index)
        chosen = self._trained[rows]
        height, width = (int(side) for side in self.scenes.sizes[index])
        boxes = torch.from_numpy(self.scenes.boxes[rows][chosen])
        canvas = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width), dtype=torch.float32)
        made = self.transform({"image": stored, "boxes": canvas})
        target = box_target(made["boxes"].numpy(), self.scenes.labels[rows][chosen], made["image"].shape[-2:])
        return made["image"].as_subclass(Tensor), self._described(index, target, made["image"].shape[-2:])

    def _decode(self, index: int) -> Any:
        """Decode the files of an image."""
        image = open_image(self.scenes.path(index))
        height, width = self.scenes.sizes[index]
        if image.size != (width, height):
            raise UserError(
                f"image {self.scenes.path(index)} is {image.width} x {image.height} pixels, but {self.scenes.source} "
                f"says {width} x {height}: its boxes are those of another version of the image."
            )
        return image

    def _described(self, index: int, target: Target, size: Sequence[int]) -> Target:
        """Add the image's id and sizes to the target, and as `truth` all its annotations, as arrays on the host."""
        rows, scenes = self.scenes.rows(index), self.scenes
        target |= {
            "image_id": torch.tensor([scenes.ids[index]]),
            "orig_size": torch.from_numpy(scenes.sizes[index]).clone(),
            "size": torch.tensor(list(size)),
        }
        if self.truth:
            named = {"boxes": scenes.boxes, "labels": scenes.labels, "area": scenes.area,
                     "iscrowd": scenes.crowd, "ignore": scenes.ignore}  # fmt: skip
            target["truth"] = {name: values[rows].copy() for name, values in named.items()}
        return target


def box_target(boxes: Float[np.ndarray, "boxes 4"], labels: np.ndarray, size: Sequence[int]) -> Target:
    """Target of class labels, boxes as fractions, areas in pixels; boxes that are empty after a crop are dropped.

    Input boxes are x1, y1, x2, y2 in pixels; those of the target are centre and size in fractions of the image, as in
    DETR's losses.
    """
    height, width = size
    canvas = np.array([width, height, width, height])
    boxes = boxes.astype(np.float64).clip(0, canvas)
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    low, high = boxes[keep, :2], boxes[keep, 2:]
    sides = high - low
    return {
        "class_labels": torch.from_numpy(labels[keep]),
        "boxes": torch.from_numpy(np.concatenate([(low + high) / 2, sides], axis=1) / canvas).float(),
        "area": torch.from_numpy(sides[:, 0] * sides[:, 1]).float(),
        "iscrowd": torch.zeros(len(sides), dtype=torch.int64),
    }


def collate_detection(samples: list[Sample], multiple: int = 1) -> dict[str, Any]:
    """`pixel_values` padded with 0 to the largest height and width (and up to a multiple), `pixel_mask` and `labels`.

    Masks in the labels are padded to the same canvas: transformers' mask loss resizes what the network predicts for the
    canvas to the size of the largest target, and would stretch it where these differ.
    """
    images, labels = zip(*samples, strict=True)
    height, width = (-(-max(image.shape[axis] for image in images) // multiple) * multiple for axis in (1, 2))
    device = images[0].device
    pixels = torch.zeros(len(images), 3, height, width, device=device)
    mask = torch.zeros(len(images), height, width, dtype=torch.int64, device=device)
    for k, image in enumerate(images):
        pixels[k, :, : image.shape[1], : image.shape[2]] = image
        mask[k, : image.shape[1], : image.shape[2]] = 1
    return {"pixel_values": pixels, "pixel_mask": mask, "labels": [_padded(label, height, width) for label in labels]}


def _padded(label: Target, height: int, width: int) -> Target:
    if "masks" not in label:
        return label
    masks = label["masks"]
    return label | {"masks": torch.nn.functional.pad(masks, (0, width - masks.shape[2], 0, height - masks.shape[1]))}
