"""DETR's augmentation of an image and its boxes or segments, with torchvision's transforms."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment.options import Statistics
from batchformer.errors import UserError

DetectionAugmentation = Literal["detr", "flip", "none"]

PUBLISHED_SIZE = 800
_SCALES = tuple(range(480, PUBLISHED_SIZE + 1, 32))
_LONGEST = 1333
_BEFORE_CROP = (400, 500, 600)
_CROP = (384, 600)


class RandomSizedCrop(v2.Transform):
    """Random crop with height and width drawn independently from `smallest` to `largest` pixels."""

    def __init__(self, smallest: int, largest: int) -> None:
        super().__init__()
        self.smallest, self.largest = smallest, largest

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        sides = v2.query_size(flat_inputs)
        drawn = [_between(min(self.smallest, side), min(self.largest, side)) for side in sides]
        corner = [_between(0, side - size) for side, size in zip(sides, drawn, strict=True)]
        return {"top": corner[0], "left": corner[1], "height": drawn[0], "width": drawn[1]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, **params)


class ShortestSize(v2.RandomShortestSize):
    """torchvision's RandomShortestSize with sides of at least one pixel: it rounds narrow ones down to 0."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = super().make_params(flat_inputs)["size"]
        return {"size": (max(1, height), max(1, width))}


def training_transform(
    name: DetectionAugmentation,
    image_size: int,
    max_size: int | None,
    scales: list[int] | None,
    mean: Statistics,
    std: Statistics,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """`"detr"`: flip, then either a resize to one of `scales` or, as often, a resize, a crop and that resize.

    Published are short sides of 480 to 800 in steps of 32, at most 1333 for the long one, crops of 384 to 600 pixels
    from images whose short side is 400, 500 or 600. All of that is in proportion to `image_size`, the largest short
    side, unless `scales` and `max_size` are given. `"flip"`: flip and a resize to `image_size`; `"none"`:
    the resize alone. Images and masks must be called so in the dict: see `DetectionSamples`.
    """
    if name == "none":
        return evaluation_transform(image_size, max_size, mean, std)
    flip, finish = v2.RandomHorizontalFlip(), _finish(mean, std)
    longest = max_size or _scaled(_LONGEST, image_size)
    if name == "flip":
        return v2.Compose([flip, ShortestSize([image_size], longest), *finish])
    if name != "detr":
        raise UserError(f"unknown augmentation {name!r}: choose one of detr, flip, none.")
    resize = ShortestSize(scales or [_scaled(side, image_size) for side in _SCALES], longest)
    before = ShortestSize([_scaled(side, image_size) for side in _BEFORE_CROP])
    crop = RandomSizedCrop(*(_scaled(side, image_size) for side in _CROP))
    return v2.Compose([flip, v2.RandomChoice([resize, v2.Compose([before, crop, resize])]), *finish])


def evaluation_transform(
    image_size: int, max_size: int | None, mean: Statistics, std: Statistics
) -> Callable[[Any], Any]:
    """Resize the short side to `image_size`, the long one to at most `max_size`; then normalise."""
    longest = max_size or _scaled(_LONGEST, image_size)
    return v2.Compose([ShortestSize([image_size], longest), *_finish(mean, std)])


def _finish(mean: Statistics, std: Statistics) -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]


def _scaled(side: int, image_size: int) -> int:
    return max(1, round(side * image_size / PUBLISHED_SIZE))


def _between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))
