"""The box of CutMix: where it lies, the mask it makes, and the share of the image it really covers."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def box_around(
    centre: Float[Tensor, "#boxes 2"], share: Float[Tensor, " #boxes"], height: int, width: int
) -> Int[Tensor, "boxes 4"]:
    """Boxes (top, bottom, left, right) of about `share` of the image, clipped to it; bottom and right lie outside.

    CutMix, eq. 2: sides sqrt(share) times those of the image, rounded down to whole pixels, around the centre (given in
    parts of height and width). A side of odd length lies one pixel further down or right, as timm has it now; the code
    released with CutMix, SaliencyMix and TransMix halves it towards zero twice and loses that pixel.
    """
    # Roots in float32 differ in the last bit from device to device, and with it now and then a pixel.
    side = share.to(torch.float32 if share.device.type == "mps" else torch.float64).sqrt()
    top, bottom = _span(centre[:, 0], side, height)
    left, right = _span(centre[:, 1], side, width)
    return torch.stack(torch.broadcast_tensors(top, bottom, left, right), dim=1)


def _span(centre: Tensor, side: Tensor, length: int) -> tuple[Tensor, Tensor]:
    middle, size = (centre * length).long(), (side * length).long()
    low = middle - size // 2
    return low.clamp(min=0), (low + size).clamp(max=length)


def box_mask(box: Int[Tensor, "boxes 4"], height: int, width: int) -> Float[Tensor, "boxes 1 height width"]:
    """1 inside the box, 0 outside."""
    top, bottom, left, right = box[:, :, None].unbind(1)
    rows, columns = torch.arange(height, device=box.device), torch.arange(width, device=box.device)
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]
    return inside[:, None].float()


def box_share(box: Int[Tensor, "boxes 4"], height: int, width: int) -> Float[Tensor, " boxes"]:
    """The part of the image the box really covers."""
    top, bottom, left, right = box.unbind(1)
    return ((bottom - top) * (right - left)).float() / (height * width)
