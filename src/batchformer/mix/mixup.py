"""Mixup: two images blended."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.mix.base import Draw, Mix
from batchformer.mix.mixed import Mixed


class Mixup(Mix):
    """x = (1 - s) x_A + s x_B and y = (1 - s) y_A + s y_B with s ~ Beta(alpha, alpha) (Zhang et al., 2018).

    The paper takes alpha between 0.1 and 0.4 for ImageNet, DeiT and TransMix 0.8; the default 1.0 is timm's. The
    paper's own code, like most, draws one number for the batch and a random permutation; so does the default here.

    Why not timm's or torchvision's: timm's draws from numpy's global generator, mixes in place and takes even batches
    only; torchvision's rolls the batch by one and has neither `prob`, smoothing, an own generator nor a lambda per
    image. With `partner="flip"` the arithmetic is timm's.
    """

    def apply(
        self, images: Float[Tensor, "batch channels height width"], labels: Float[Tensor, "batch classes"], draw: Draw
    ) -> Mixed:
        share = draw.share.to(images.dtype)[:, None, None, None]
        mixed = torch.lerp(images, images[draw.partner], share)
        return Mixed(mixed, labels, draw.partner, draw.share.expand(len(images)))
