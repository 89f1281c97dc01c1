"""Networks and batches that do not fit each other, told in one sentence that names the setting."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from batchformer.errors import UserError


def refuse_other_image_size(net: nn.Module, backbone: str, image_size: int) -> None:
    """Vision transformers of timm are built for one size, and say so only when the first batch arrives."""
    embedding: Any = getattr(net, "patch_embed", None)
    built: Any = getattr(embedding, "img_size", None)
    if not getattr(embedding, "strict_img_size", False) or built is None or tuple(built) == (image_size, image_size):
        return
    other_way = f", or set data.image_size to {built[0]}" if built[0] == built[1] else ""
    raise UserError(
        f"{backbone} is built for images of {built[0]} x {built[1]} pixels, and data.image_size is {image_size}: add "
        f"--model.backbone_args.img_size {image_size}{other_way}."
    )


def in_one_sentence(problem: Exception) -> UserError | None:
    """What torch says of batches that are too small or too large, with the way out; None of anything else.

    And what Lightning finds only once it has the loaders: a part of the batches that is less than one of them.
    """
    if isinstance(problem, MisconfigurationException):
        return UserError(f"Lightning refuses the trainer settings: {' '.join(str(problem).split()).rstrip('.')}.")
    if isinstance(problem, ValueError) and str(problem).startswith("Expected more than 1 value per channel"):
        return UserError(
            "BatchNorm cannot train on a batch of one image whose map is one pixel: raise data.batch_size to 2 or "
            "more, or data.image_size."
        )
    if isinstance(problem, torch.OutOfMemoryError):
        return UserError(
            "the memory of the device is full: lower data.batch_size (with trainer.accumulate_grad_batches the "
            "optimiser still sees as many images) or data.image_size."
        )
    return None
