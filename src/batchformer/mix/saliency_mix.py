"""SaliencyMix: CutMix around the most salient pixel of the image that is cut, and the saliency it needs."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from batchformer.errors import UserError, check_choice
from batchformer.mix.base import Draw, Images, Mix, Mixed, MixKeywords, SoftLabels
from batchformer.mix.mixup_cutmix import cut
from batchformer.mix.normalisation import both_or_none, unit_range


class SaliencyMix(Mix):
    """CutMix with the box centred where image B is most salient, pasted at the same place (Uddin et al., 2021).

    Paper: the saliency map of each source image, its peak the centre of the box of sides sqrt(1 - lambda), lambda ~
    Beta(1, 1), clipped; the label follows the area. The saliency is the fine-grained static one of Montabone and Soto.

    Released code: one box for the whole batch, around the peak of a single image (the partner of the first one);
    prob 0.5 on CIFAR, 1.0 on ImageNet. It hands OpenCV the normalised float tensor, and `StaticSaliencyFineGrained`
    reads the bytes of those floats as pixels: on 200 CIFAR-100 images that map correlates with the map of the picture
    by 0.01, and its peak lies 14 of 32 pixels away in the median. The box of the released code is a box anywhere.

    Here: as the paper: `box="own"`, every image the box of its own partner. `box="first"` is one box for all, that
    of the partner of the first image, as released, but at the salient point of the image. See
    `fine_grained_saliency` for what is computed; there is no host synchronisation.

    Args:
        box: "own" or "first".
        mean, std: what the images were normalised by, a number for each channel or one for all, so that saliency sees
            the picture; without them each image is stretched to its own range, which changes little: saliency is
            normalised to its own maximum.
        options: those of `Mix`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        box: Literal["own", "first"] = "own",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        **options: Unpack[MixKeywords],
    ) -> None:
        super().__init__(num_classes, **options)
        check_choice("SaliencyMix: box", box, ("own", "first"))
        self.box = box
        self.mean, self.std = both_or_none("SaliencyMix", mean, std)

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        height, width = images.shape[-2:]
        sources = images if self.box == "own" else images[draw.partner[:1]]
        peak = most_salient(fine_grained_saliency(unit_range(sources, self.mean, self.std))).float()
        if self.box == "own":
            peak = peak[draw.partner]
        centre = torch.stack([(peak[:, 0] + 0.5) / height, (peak[:, 1] + 0.5) / width], dim=1)
        mixed, mask, share = cut(images, draw.partner, centre, draw.share)
        return Mixed(mixed, labels, draw.partner, share, mask)


SURROUNDS = (12, 24, 48, 28, 56, 112)
_RED, _GREEN, _BLUE = 9798, 19235, 3735  # 0.299, 0.587, 0.114 in parts of 2**15, as OpenCV's 8-bit conversion has them


@torch.no_grad()
def fine_grained_saliency(
    images: Images | UInt8[Tensor, "batch channels height width"],
) -> Float[Tensor, "batch height width"]:
    """How much each pixel differs from its surround, in [0, 1]: Montabone and Soto (2010), as OpenCV computes it.

    The paper compares every pixel of the grey image, at full resolution, with the mean of square surrounds of several
    sizes, read from an integral image; what is brighter (on-centre) and what is darker (off-centre) is summed over the
    sizes, each stretched to the full range, and both are added. OpenCV's `StaticSaliencyFineGrained`, which SaliencyMix
    calls, does it in 8 bits: grey, twice smoothed by [1 2 1], six half-sides (`SURROUNDS`), the pixel itself left out
    of its surround, every difference and every stretch cut down to a whole number. So does this, on the device and
    without host synchronisation. It equals OpenCV's map exactly up to 65,793 pixels; above, OpenCV's integral image of
    32-bit floats rounds and this one does not: they then agree within 2 of 255 steps (one pixel in a thousand differs).

    Args:
        images: RGB (OpenCV reads BGR) or grey, bytes or floats from 0 to 1.
    """
    if (
        not isinstance(images, Tensor)
        or images.ndim != 4
        or not (images.is_floating_point() or images.dtype == torch.uint8)
    ):
        got = f"{tuple(images.shape)} of {images.dtype}" if isinstance(images, Tensor) else f"a {type(images).__name__}"
        raise UserError(
            f"saliency is that of images (batch, channels, height, width), bytes or floats from 0 to 1, not of {got}."
        )
    grey = _smooth(_smooth(_grey(images)))
    on, off = _centre_surround(grey)
    return _stretch(_stretch(on) + _stretch(off)) / 255


def most_salient(saliency: Float[Tensor, "batch height width"]) -> Int[Tensor, "batch 2"]:
    """(row, column) of the highest value; of several, the first in row-major order, on every device."""
    height, width = saliency.shape[1:]
    flat = saliency.flatten(1)
    places = torch.arange(height * width, device=flat.device)
    # on a GPU argmax may return any of several equal maxima, which are common in a map of 256 levels
    first = torch.where(flat == flat.amax(1, keepdim=True), places, height * width - 1).amin(1)
    return torch.stack([first // width, first % width], dim=1)


def _grey(images: Tensor) -> Float[Tensor, "batch height width"]:
    channels = images.shape[1]
    if channels not in (1, 3):
        raise UserError(f"saliency is that of a grey or RGB image, and these have {channels} channels.")
    levels = images.float() if images.dtype == torch.uint8 else torch.round(images.float() * 255)
    if channels == 1:
        return levels[:, 0]
    weighted = _RED * levels[:, 0] + _GREEN * levels[:, 1] + _BLUE * levels[:, 2]
    return torch.floor((weighted + 2**14) / 2**15)


def _smooth(grey: Float[Tensor, "batch height width"]) -> Float[Tensor, "batch height width"]:
    """[1 2 1] in both directions over 16, rounded half up, the border mirrored; exact, since all sums are integers."""
    rows, columns = (size > 1 for size in grey.shape[1:])
    padded = F.pad(grey[:, None], (1, 1, 0, 0), mode="reflect" if columns else "replicate")
    padded = F.pad(padded, (0, 0, 1, 1), mode="reflect" if rows else "replicate")[:, 0]
    across = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]
    return torch.floor((across[:, :-2] + 2 * across[:, 1:-1] + across[:, 2:] + 8) / 16)


def _centre_surround(grey: Float[Tensor, "batch height width"]) -> tuple[Tensor, Tensor]:
    """What is brighter and what is darker than its surrounds, in whole grey levels, summed over the sizes."""
    height, width = grey.shape[1:]
    integral = F.pad(grey.to(torch.int32).cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32), (1, 0, 1, 0))
    if grey.is_cuda and (in_one_launch := _kernel(grey.device)) is not None:
        return in_one_launch(grey.contiguous(), integral.contiguous(), SURROUNDS)
    signed, unsigned = torch.zeros_like(grey), torch.zeros_like(grey)
    # half-sides that cover the whole image all give the same result
    for reach, times in Counter(min(surround, max(height, width)) for surround in SURROUNDS).items():
        top, bottom = _window(height, reach, grey.device)
        left, right = _window(width, reach, grey.device)
        band = integral.index_select(1, bottom) - integral.index_select(1, top)
        total = (band.index_select(2, right) - band.index_select(2, left)).float()
        others = ((bottom - top)[:, None] * (right - left) - 1).clamp(min=1)
        difference = torch.trunc(grey - (total - grey) / others)
        signed.add_(difference, alpha=times)
        unsigned.add_(difference.abs(), alpha=times)
    return (unsigned + signed) / 2, (unsigned - signed) / 2


@cache
def _kernel(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """All sizes in one launch, if that runs here: Triton may be missing, or what it needs to build its launcher."""
    try:
        from batchformer.mix.triton_kernels import centre_surround_in_one_launch

        grey = torch.zeros(1, 2, 2, dtype=torch.float32, device=device)
        centre_surround_in_one_launch(grey, torch.zeros(1, 3, 3, dtype=torch.int32, device=device), SURROUNDS)
    except Exception as error:
        warnings.warn(f"saliency runs without its Triton kernel, which is slower: {error}", stacklevel=2)
        return None
    return centre_surround_in_one_launch


def _window(length: int, reach: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and last edge of the surround of every pixel; OpenCV's reaches one pixel further after than before it."""
    places = torch.arange(length, device=device)
    return (places - reach + 1).clamp(min=0), (places + reach + 1).clamp(max=length)


def _stretch(values: Float[Tensor, "batch height width"]) -> Float[Tensor, "batch height width"]:
    """Scale the largest value of each image to 255 and truncate to integers; an image of zeros is unchanged."""
    return torch.floor(255 * (values / values.amax((1, 2), keepdim=True).clamp(min=1)))
