"""The batched augmentations by name, for a chunk of images that are already on the device."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.crop_erase import crop_flip, cutout, plan_erasing
from batchformer.data.augment.draws import AugmentDraw, uniform_integers
from batchformer.data.augment.operations import affine, inverse_matrices
from batchformer.data.augment.options import REGION_VIEWS, ROTATION, SMALLEST_AREA, RegionView, evaluation_size
from batchformer.data.augment.policies import (
    apply_view,
    autoaugment,
    plan_autoaugment,
    plan_randaugment,
    plan_view,
    randaugment,
    view_purposes,
)
from batchformer.data.augment.resample import crop_rectangles, resize, resized_crop
from batchformer.errors import UserError


@dataclass(frozen=True)
class BatchedAugmentation:
    """An augmentation pipeline for batches of images: these steps, each optional, in this order.

    A crop from a zero border of `pad` pixels, or a random region of at least `area` of the image, resized to `size`;
    flip; a rotation by at most `rotate` degrees, black where nothing is left of the image; AutoAugment; one black
    square of `hole` pixels; the whole image resized to `size`, of which the `centre` is kept; RandAugment, with the
    colour `fill` where nothing is left; noise in one rectangle (`erase_prob`).
    Or, after the flip, the colours of a `view`.
    Evaluation resizes to `evaluate_at`, where it is set, and takes the centre of `size`.
    """

    pad: int = 0
    flip: bool = False
    rotate: float = 0.0
    autoaugment: bool = False
    hole: int = 0
    size: int | None = None
    centre: int | None = None
    area: float | None = None
    randaugment: bool = False
    erase_prob: float = 0.0
    fill: tuple[int, int, int] = (128, 128, 128)
    evaluate_at: int | None = None
    bilinear: bool = False
    view: RegionView | None = None

    @property
    def purposes(self) -> tuple[str, ...]:
        """The tables of random numbers that `plan` needs (see `draws`)."""
        wanted = {
            "augment": self.pad or self.flip or self.autoaugment or self.hole,
            "crop": self.area is not None,
            "randaugment": self.randaugment,
            "erase": self.erase_prob,
            "rotate": self.rotate,
        }
        named = tuple(name for name, needed in wanted.items() if needed)
        return named if self.view is None else (*named, *view_purposes(self.view))

    def evaluation(self) -> "BatchedAugmentation":
        """The pipeline for the test images of a model trained with this one: resize and centre crop only."""
        return BatchedAugmentation(size=self.evaluate_at or self.size, centre=self.size, bilinear=self.bilinear)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.centre or self.size
        return (height, width) if size is None else (size, size)

    def plan(self, draws: dict[str, Float[np.ndarray, "n draws"]], height: int, width: int) -> dict[str, np.ndarray]:
        """Convert the samples' random numbers to parameters of the operations: small host arrays for the device.

        `height` and `width` are those of the stored images.
        """
        plan: dict[str, np.ndarray] = {}
        if self.pad or self.flip:
            basic = draws["augment"]
            plan["flip"] = (
                uniform_integers(basic[:, AugmentDraw.FLIP], 2) if self.flip else np.zeros(len(basic), np.int64)
            )
            plan["row"] = uniform_integers(basic[:, AugmentDraw.ROW], 2 * self.pad + 1)
            plan["column"] = uniform_integers(basic[:, AugmentDraw.COLUMN], 2 * self.pad + 1)
        if self.area is not None:
            plan["region"] = np.stack(crop_rectangles(draws["crop"], height, width, (self.area, 1.0)), axis=1)
        if self.rotate:
            degrees = self.rotate * (2 * draws["rotate"][:, 0] - 1)
            plan["rotation"] = inverse_matrices("Rotate", degrees, height, width)
        if self.autoaugment:
            plan |= plan_autoaugment(draws["augment"], height, width)
        if self.hole:
            plan["hole_row"] = uniform_integers(draws["augment"][:, AugmentDraw.HOLE_ROW], height)
            plan["hole_column"] = uniform_integers(draws["augment"][:, AugmentDraw.HOLE_COLUMN], width)
        if self.randaugment:
            plan |= plan_randaugment(draws["randaugment"], *self.output_size(height, width))
        if self.view is not None:
            plan |= plan_view(draws, self.view)
        if self.erase_prob:
            plan |= plan_erasing(draws["erase"], *self.output_size(height, width), self.erase_prob)
        return plan

    def store(self, images: UInt8[Tensor, "all 3 height width"]) -> Tensor:
        """The data set as stored on the device: with the zero border added."""
        return torch.nn.functional.pad(images, (self.pad,) * 4) if self.pad else images.contiguous()

    def apply(
        self, store: Tensor, index: Int[Tensor, " n"], plan: dict[str, Tensor]
    ) -> UInt8[Tensor, "n 3 out_height out_width"]:
        """The augmented images of the samples `index`, in that order."""
        images = self._taken(store, index, plan)
        if self.rotate:
            images = affine(images, plan["rotation"], fill=0)
        if self.autoaugment:
            images = autoaugment(images, plan)
        if self.hole:
            images = cutout(images, plan["hole_row"], plan["hole_column"], self.hole)
        if self.size is not None and self.area is None:
            images = resize(images, self.size, self.bilinear)
        if self.centre is not None and self.centre != self.size:
            first = [round((length - self.centre) / 2) for length in images.shape[2:]]
            images = images[:, :, first[0] : first[0] + self.centre, first[1] : first[1] + self.centre]
        if self.randaugment:
            images = randaugment(images, plan, self.fill)
        if self.view is not None:
            images = apply_view(images, plan)
        return images

    def _taken(self, store: Tensor, index: Tensor, plan: dict[str, Tensor]) -> Tensor:
        if "region" in plan:
            mirror = plan["flip"].bool() if "flip" in plan else None
            size = self.size or store.shape[2]
            return resized_crop(store.index_select(0, index), plan["region"], size, mirror, self.bilinear)
        if "row" in plan:
            height, width = store.shape[2] - 2 * self.pad, store.shape[3] - 2 * self.pad
            return crop_flip(store, index, plan["row"], plan["column"], plan["flip"], height, width)
        return store.index_select(0, index)


BATCHED_AUGMENTATIONS: dict[str, BatchedAugmentation] = {
    "none": BatchedAugmentation(),
    "shift": BatchedAugmentation(pad=1),
    "crop-flip": BatchedAugmentation(pad=4, flip=True),
    "crop-flip-rotate": BatchedAugmentation(pad=4, flip=True, rotate=ROTATION),  # RIDE's, for CIFAR
    "autoaugment-cutout": BatchedAugmentation(pad=4, flip=True, autoaugment=True, hole=16),
    **{name: BatchedAugmentation(flip=True, area=SMALLEST_AREA[name]) for name in ("resized-crop", "mae")},
    # at another size than the native one a random region takes the place of the padded crop
    "randaugment": BatchedAugmentation(pad=4, flip=True, randaugment=True),
    **{
        name: BatchedAugmentation(flip=True, area=view.area, bilinear=True, view=view)
        for name, view in REGION_VIEWS.items()
    },
}


def batched_augmentation(
    name: str,
    native: int | None = None,
    size: int | None = None,
    erase_prob: float = 0.0,
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5),
) -> BatchedAugmentation:
    """The named augmentation for images of `native` pixels trained at `size` (None: as they are)."""
    if name not in BATCHED_AUGMENTATIONS:
        raise UserError(f"unknown augmentation {name!r}: choose one of {', '.join(BATCHED_AUGMENTATIONS)}.")
    red, green, blue = (min(255, round(255 * value)) for value in mean)
    augmentation = replace(BATCHED_AUGMENTATIONS[name], erase_prob=erase_prob, fill=(red, green, blue))
    if size is None or size == native:
        return augmentation
    if name not in SMALLEST_AREA:
        return replace(augmentation, size=size)
    return replace(augmentation, size=size, pad=0, area=SMALLEST_AREA[name], evaluate_at=evaluation_size(name, size))
