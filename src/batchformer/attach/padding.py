"""Batches of images that differ in size: which positions are padding, and blank inputs that have some.

A batch shares one canvas: every image stands at its top left corner, the rest is padding. A position of BatchFormerV2
is a cell of that canvas (of several feature maps: a cell of one of them): the same distance from the corner in every
image, not the same part of it. So the grids of all images are aligned whatever their sizes; beyond the edge of a
smaller image a larger one finds padding to attend to, as in the released code. `mask_padding=True` leaves it out.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from batchformer.errors import UserError

_PIXEL_MASK = "pixel_mask"  # how transformers' detectors are told which pixels are image
_MASK = "attention_mask"  # how they tell their encoder layers which positions are


def argument_names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def takes_padded_images(model: nn.Module) -> bool:
    """Whether a model takes images of several sizes in one batch, as every detector of transformers does."""
    return _PIXEL_MASK in argument_names(type(model).forward)


def blank_mask(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """For a dry run: the last image is half as wide as the canvas, because masks of whole images are not passed on."""
    if not takes_padded_images(model):
        return {}
    mask = torch.ones(len(images), *images.shape[-2:], dtype=torch.long, device=images.device)
    mask[-1, :, images.shape[-1] // 2 :] = 0
    return {_PIXEL_MASK: mask}


class LayerPadding:
    """Finds the valid positions in what an encoder layer is called with.

    In the arguments, and not noted while running: when gradient checkpointing calls the layer again, the masks of other
    batches may have gone by.
    """

    def __init__(self, layer: nn.Module, path: str) -> None:
        names = argument_names(type(layer).forward)
        if _MASK not in names:
            raise UserError(
                f"mask_padding=True needs a layer that is told the padding in an argument {_MASK!r}, as the encoder "
                f"layers of transformers' detectors are; {path!r} ({type(layer).__name__}) is not: leave it out."
            )
        self.at = names.index(_MASK)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bool[Tensor, "batch position"] | None:
        """None where nothing is padded."""
        mask = args[self.at] if self.at < len(args) else kwargs.get(_MASK)
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
            raise UserError(
                f"mask_padding=True cannot read padding from a {type(mask).__name__}: build the model with "
                f'attn_implementation="sdpa" or "eager".'
            )
        if mask.ndim == 4:  # (batch, 1, query, key), the same keys for every query
            mask = mask[:, 0, 0]
        # Masks that are added to the scores have zero where one may look, and minus a lot elsewhere.
        return mask == 0 if mask.is_floating_point() else mask != 0
