"""One image with what is in it, in the form the losses of DETR want it, and batches of such."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.data.images import open_image
from batchformer.data.loading.samples import AddressedSamples
from batchformer.data.sets.boxes import Scenes, corners_to_centres
from batchformer.errors import UserError

Transform = Callable[[dict[str, Any]], dict[str, Any]]
Sample = tuple[Float[Tensor, "3 height width"], dict[str, Any]]
Target = dict[str, Any]


class DetectionSamples(AddressedSamples):
    """(pixels, target): see `DetectionData` for what a target holds. With `truth`, what evaluation compares with."""

    def __init__(
        self, scenes: Scenes, transform: Transform, seed: int | None, truth: bool = False, pad_multiple: int = 1
    ) -> None:
        super().__init__(seed)
        self.scenes, self.transform, self.truth, self.pad_multiple = scenes, transform, truth, pad_multiple
        self._trained = scenes.trained()
        self._decoded: dict[int, Any] | None = None

    def keep_decoded(self) -> None:
        """From now on each file is read once. Transforms change no image in place."""
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

    def _decode(self, index: int) -> Any:
        """What the files of an image hold."""
        return self._open(index)

    def _augment(self, index: int, stored: Any) -> Sample:
        from torchvision import tv_tensors

        rows = self.scenes.rows(index)
        chosen = self._trained[rows]
        height, width = (int(side) for side in self.scenes.sizes[index])
        boxes = torch.from_numpy(self.scenes.boxes[rows][chosen])
        canvas = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width), dtype=torch.float32)
        made = self.transform({"image": stored, "boxes": canvas})
        target = box_target(made["boxes"].numpy(), self.scenes.labels[rows][chosen], made["image"].shape[-2:])
        return made["image"].as_subclass(Tensor), self._described(index, target, made["image"].shape[-2:])

    def _open(self, index: int) -> Any:
        image = open_image(self.scenes.path(index))
        height, width = self.scenes.sizes[index]
        if image.size != (width, height):
            raise UserError(
                f"image {self.scenes.path(index)} is {image.width} x {image.height} pixels, but {self.scenes.source} "
                f"says {width} x {height}: its boxes are those of another version of the image."
            )
        return image

    def _described(self, index: int, target: Target, size: Sequence[int]) -> Target:
        target |= {
            "image_id": torch.tensor([self.scenes.ids[index]]),
            "orig_size": torch.from_numpy(self.scenes.sizes[index]).clone(),
            "size": torch.tensor(list(size)),
        }
        return target | {"truth": self._truth(index)} if self.truth else target

    def _truth(self, index: int) -> dict[str, Any]:
        """Everything that is annotated, in the original image. Arrays, so that it stays on the host."""
        rows, scenes = self.scenes.rows(index), self.scenes
        named = {"boxes": scenes.boxes, "labels": scenes.labels, "area": scenes.area,
                 "iscrowd": scenes.crowd, "ignore": scenes.ignore}  # fmt: skip
        return {name: values[rows].copy() for name, values in named.items()}


def box_target(boxes: Float[np.ndarray, "boxes 4"], labels: np.ndarray, size: Sequence[int]) -> Target:
    """Class labels, boxes as fractions, areas in pixels; boxes a crop has left nothing of are gone."""
    height, width = size
    boxes = boxes.astype(np.float64).clip(0, [width, height, width, height])
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    boxes = boxes[keep]
    sides = boxes[:, 2:] - boxes[:, :2]
    return {
        "class_labels": torch.from_numpy(labels[keep]),
        "boxes": torch.from_numpy(corners_to_centres(boxes, height, width)).float(),
        "area": torch.from_numpy(sides[:, 0] * sides[:, 1]).float(),
        "iscrowd": torch.zeros(len(boxes), dtype=torch.int64),
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
