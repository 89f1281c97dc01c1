"""A mixed batch: the images a model is shown, and the targets that go with them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError


class Mixed:
    """What a mix makes of a batch. "Image A" is the image of the row itself, "image B" the one mixed into it.

    Args:
        images: the mixed images.
        labels: what `soft_labels` made of the targets, one row per image, not mixed yet.
        partner: which row of the batch image B is.
        share: how much of the mixed image is image B.
        mask: share of image B at each pixel (0 or 1 for methods that cut), None where it is the same everywhere.
    """

    def __init__(
        self,
        images: Float[Tensor, "batch channels height width"],
        labels: Float[Tensor, "batch classes"],
        partner: Int[Tensor, " batch"],
        share: Float[Tensor, " batch"],
        mask: Float[Tensor, "#batch 1 height width"] | None = None,
    ) -> None:
        self.images, self.labels, self.partner, self.share, self.mask = images, labels, partner, share, mask

    def label_share(self) -> Float[Tensor, " batch"]:
        """How much of the target is image B's: the share in pixels, unless a method knows better (TransMix)."""
        return self.share

    def targets(self) -> Float[Tensor, "batch classes"]:
        """(1 - label_share) y_A + label_share y_B, for a loss that takes soft targets; no gradient flows into it."""
        return torch.lerp(self.labels, self.labels[self.partner], self.label_share()[:, None])

    def __len__(self) -> int:
        return len(self.images)


def soft_labels(
    targets: Int[Tensor, " batch"] | Float[Tensor, "batch classes"], num_classes: int, smoothing: float = 0.0
) -> Float[Tensor, "batch classes"]:
    """Class ids or soft targets as rows of `num_classes`, a part `smoothing` of each spread over all classes.

    As timm and the released TransMix code do it: 1 - s + s/K for the true class, s/K for the others.
    """
    if targets.ndim == 1 and not targets.is_floating_point():
        if targets.device.type == "cpu":  # elsewhere looking would make the host wait for the device
            _check_ids(targets, num_classes)
        rows = torch.zeros(len(targets), num_classes, dtype=torch.float32, device=targets.device)
        rows.scatter_(1, targets[:, None].long(), 1.0)
    elif targets.ndim == 2 and targets.shape[1] == num_classes:
        rows = targets.detach().float()
    else:
        raise UserError(
            f"targets of the shape {tuple(targets.shape)} and type {targets.dtype} cannot be mixed: pass class ids "
            f"(batch,) or soft targets (batch, {num_classes})."
        )
    return rows * (1 - smoothing) + smoothing / num_classes if smoothing else rows


def _check_ids(targets: Tensor, num_classes: int) -> None:
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
        raise UserError(
            f"the targets hold class ids from {int(targets.min())} to {int(targets.max())}, and num_classes="
            f"{num_classes}: ids must lie between 0 and {num_classes - 1}."
        )
