"""timm's mixup and CutMix, with random numbers that are a function of (seed, step)."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError
from batchformer.tasks.classification_options import MixOptions
from batchformer.tasks.reseed import seed_from


class SeededMixup:
    """Images and label ids in, mixed images and soft labels (B, K) out, smoothing included.

    timm draws from numpy's global generator: here it is seeded for the call and put back as it was after it, so that
    what a batch is mixed with depends on nothing but the numbers given.
    """

    def __init__(self, options: MixOptions, label_smoothing: float, num_classes: int) -> None:
        from timm.data import Mixup

        self.mix = Mixup(
            mixup_alpha=options.mixup,
            cutmix_alpha=options.cutmix,
            prob=options.prob,
            switch_prob=options.switch_prob,
            mode=options.mode,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )

    def __call__(
        self, images: Float[Tensor, "batch channels height width"], labels: Int[Tensor, " batch"], *numbers: int
    ) -> tuple[Float[Tensor, "batch channels height width"], Float[Tensor, "batch classes"]]:
        if len(images) % 2:
            raise UserError(
                f"mixup and CutMix mix images in pairs, and this batch has {len(images)}: set an even data.batch_size "
                f"and data.drop_last true, or model.mix.mixup 0 and model.mix.cutmix 0."
            )
        before = np.random.get_state()
        np.random.seed(seed_from(*numbers) % 2**32)
        try:
            return self.mix(images.clone(), labels)  # timm mixes in place; the batch may be a view of the data
        finally:
            np.random.set_state(before)
