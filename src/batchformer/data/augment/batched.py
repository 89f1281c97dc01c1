"""The batched augmentations by name: what happens to a chunk of images that already lie on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.data.augment.autoaugment import autoaugment, plan_autoaugment
from batchformer.data.augment.crop_flip import crop_flip
from batchformer.data.augment.cutout import cutout
from batchformer.data.augment.draws import Draw, choose
from batchformer.errors import UserError


@dataclass(frozen=True)
class BatchedAugmentation:
    """Crop from a zero border of `pad` pixels, flip, AutoAugment, one black square: in this order, each optional."""

    pad: int = 0
    flip: bool = False
    autoaugment: bool = False
    hole: int = 0

    def plan(self, draws: Float[np.ndarray, "n draws"], height: int, width: int) -> dict[str, np.ndarray]:
        """From the samples' random numbers to what is to be done: small arrays for the device, made on the host."""
        plan: dict[str, np.ndarray] = {}
        if self.pad or self.flip:
            plan["row"] = choose(draws[:, Draw.ROW], 2 * self.pad + 1)
            plan["column"] = choose(draws[:, Draw.COLUMN], 2 * self.pad + 1)
            plan["flip"] = choose(draws[:, Draw.FLIP], 2) if self.flip else np.zeros(len(draws), np.int64)
        if self.autoaugment:
            plan |= plan_autoaugment(draws, height, width)
        if self.hole:
            plan["hole_row"] = choose(draws[:, Draw.HOLE_ROW], height)
            plan["hole_column"] = choose(draws[:, Draw.HOLE_COLUMN], width)
        return plan

    def store(self, images: UInt8[Tensor, "all 3 height width"]) -> Tensor:
        """The data set as the device keeps it: with the zero border on."""
        return torch.nn.functional.pad(images, (self.pad,) * 4) if self.pad else images.contiguous()

    def apply(
        self, store: Tensor, index: Int[Tensor, " n"], plan: dict[str, Tensor]
    ) -> UInt8[Tensor, "n 3 height width"]:
        """The augmented images of the samples `index`, in that order."""
        if "row" in plan:
            height, width = store.shape[2] - 2 * self.pad, store.shape[3] - 2 * self.pad
            images = crop_flip(store, index, plan["row"], plan["column"], plan["flip"], height, width)
        else:
            images = store.index_select(0, index)
        if self.autoaugment:
            images = autoaugment(images, plan)
        if self.hole:
            images = cutout(images, plan["hole_row"], plan["hole_column"], self.hole)
        return images


BATCHED_AUGMENTATIONS: dict[str, BatchedAugmentation] = {
    "none": BatchedAugmentation(),
    "shift": BatchedAugmentation(pad=1),
    "crop-flip": BatchedAugmentation(pad=4, flip=True),
    "autoaugment-cutout": BatchedAugmentation(pad=4, flip=True, autoaugment=True, hole=16),
}


def batched_augmentation(name: str) -> BatchedAugmentation:
    if name not in BATCHED_AUGMENTATIONS:
        raise UserError(f"unknown augmentation {name!r}: choose one of {', '.join(BATCHED_AUGMENTATIONS)}.")
    return BATCHED_AUGMENTATIONS[name]
