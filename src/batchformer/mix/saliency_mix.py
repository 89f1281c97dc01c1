"""SaliencyMix: CutMix around the most salient point of the image that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.errors import UserError
from batchformer.mix.base import Draw, Mix, Partner
from batchformer.mix.cutmix import cut
from batchformer.mix.mixed import Mixed
from batchformer.mix.normalisation import both_or_none, unit_range
from batchformer.mix.saliency import fine_grained_saliency, most_salient


class SaliencyMix(Mix):
    """CutMix with the box centred where image B is most salient, pasted at the same place (Uddin et al., 2021).

    **Paper.** The saliency map of each source image, its peak the centre of the box of sides sqrt(1 - lambda), lambda ~
    Beta(1, 1), clipped; the label follows the area. The saliency is the fine-grained static one of Montabone and Soto.

    **Released code.** One box for the whole batch, around the peak of a *single* image (the partner of the first one);
    prob 0.5 on CIFAR, 1.0 on ImageNet. It hands OpenCV the normalised float tensor, and `StaticSaliencyFineGrained`
    reads the bytes of those floats as pixels: on 200 CIFAR-100 images that map correlates with the map of the picture
    by 0.01, and its peak lies 14 of 32 pixels away in the median. The box of the released code is a box anywhere.

    **Here.** As the paper: `box="own"`, every image the box of its own partner. `box="first"` is one box for all, that
    of the partner of the first image, as released, but at the salient place of the picture. See
    `fine_grained_saliency` for what is computed; nothing waits for the device.

    Args:
        box: "own" or "first".
        mean, std: what the images were normalised by, a number for each channel or one for all, so that saliency sees
            the picture; without them each image is stretched to its own range, which changes little: saliency is
            normalised to its own maximum.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        alpha: float = 1.0,
        prob: float = 1.0,
        label_smoothing: float = 0.0,
        per_sample: bool = False,
        partner: Partner = "random",
        generator: torch.Generator | None = None,
        box: Literal["own", "first"] = "own",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            num_classes,
            alpha=alpha,
            prob=prob,
            label_smoothing=label_smoothing,
            per_sample=per_sample,
            partner=partner,
            generator=generator,
        )
        if box not in ("own", "first"):
            raise UserError(f'SaliencyMix: box={box!r} must be "own" or "first".')
        self.box = box
        self.mean, self.std = both_or_none("SaliencyMix", mean, std)

    def apply(
        self, images: Float[Tensor, "batch channels height width"], labels: Float[Tensor, "batch classes"], draw: Draw
    ) -> Mixed:
        height, width = images.shape[-2:]
        sources = images if self.box == "own" else images[draw.partner[:1]]
        peak = most_salient(fine_grained_saliency(unit_range(sources, self.mean, self.std))).float()
        if self.box == "own":
            peak = peak[draw.partner]
        centre = torch.stack([(peak[:, 0] + 0.5) / height, (peak[:, 1] + 0.5) / width], dim=1)
        mixed, mask, share = cut(images, draw.partner, centre, draw.share)
        return Mixed(mixed, labels, draw.partner, share, mask)
