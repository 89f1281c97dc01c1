"""CutMix: a box of one image pasted over the other."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.mix.base import Draw, Mix
from batchformer.mix.box import box_around, box_mask, box_share
from batchformer.mix.mixed import Mixed


class CutMix(Mix):
    """x = (1 - M) x_A + M x_B with M a box, y = (1 - s) y_A + s y_B with s its part of the image (Yun et al., 2019).

    The box has the sides sqrt(r) H and sqrt(r) W, r ~ Beta(alpha, alpha), around a point anywhere in the image, and is
    clipped at the border. The paper's eq. 2 would leave the label at r; its released code, timm and TransMix take what
    the clipped box really covers, and so does this. One box for the whole batch, as all of them, unless `per_sample`.

    Own code for the reasons given at `Mixup`: timm and torchvision both cut with host numbers.
    """

    def apply(
        self, images: Float[Tensor, "batch channels height width"], labels: Float[Tensor, "batch classes"], draw: Draw
    ) -> Mixed:
        mixed, mask, share = cut(images, draw.partner, draw.centre, draw.share)
        return Mixed(mixed, labels, draw.partner, share, mask)


def cut(
    images: Float[Tensor, "batch channels height width"],
    partner: Int[Tensor, " batch"],
    centre: Float[Tensor, "#batch 2"],
    share: Float[Tensor, " #batch"],
) -> tuple[
    Float[Tensor, "batch channels height width"], Float[Tensor, "#batch 1 height width"], Float[Tensor, " batch"]
]:
    """The images with a box of their partners, its mask, and the part of the image it really covers."""
    height, width = images.shape[-2:]
    box = box_around(centre, share, height, width)
    mask = box_mask(box, height, width)
    mixed = torch.where(mask.bool(), images[partner], images)
    return mixed, mask, box_share(box, height, width).expand(len(images))
