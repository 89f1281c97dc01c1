"""Mixup, CutMix, and a random choice of one method for each batch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError
from batchformer.mix.base import Draw, Images, Mix, Mixed, SoftLabels, Targets
from batchformer.nn.inputs import as_number


class Mixup(Mix):
    """x = (1 - s) x_A + s x_B and y = (1 - s) y_A + s y_B with s ~ Beta(alpha, alpha) (Zhang et al., 2018).

    The paper takes alpha between 0.1 and 0.4 for ImageNet, DeiT and TransMix 0.8; the default 1.0 is timm's. The
    paper's own code, like most, draws one number for the batch and a random permutation; so does the default here.

    Why not timm's or torchvision's: timm's draws from numpy's global generator, mixes in place and takes even batches
    only; torchvision's rolls the batch by one and has neither `prob`, smoothing, an own generator nor a lambda per
    image. With `partner="flip"` the arithmetic is timm's.
    """

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        share = draw.share.to(images.dtype)[:, None, None, None]
        mixed = torch.lerp(images, images[draw.partner], share)
        return Mixed(mixed, labels, draw.partner, draw.share.expand(len(images)))


class CutMix(Mix):
    """x = (1 - M) x_A + M x_B with M a box, y = (1 - s) y_A + s y_B with s its part of the image (Yun et al., 2019).

    The box has the sides sqrt(r) H and sqrt(r) W, r ~ Beta(alpha, alpha), around a point anywhere in the image, and is
    clipped at the border. The paper's eq. 2 would leave the label at r; its released code, timm and TransMix take the
    area of the clipped box, and so does this. One box for the whole batch, as all of them, unless `per_sample`.

    Own code for the reasons given at `Mixup`: timm and torchvision both cut with host numbers.
    """

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        mixed, mask, share = cut(images, draw.partner, draw.centre, draw.share)
        return Mixed(mixed, labels, draw.partner, share, mask)


def cut(
    images: Images, partner: Int[Tensor, " batch"], centre: Float[Tensor, "#batch 2"], share: Float[Tensor, " #batch"]
) -> tuple[Images, Float[Tensor, "#batch 1 height width"], Float[Tensor, " batch"]]:
    """The images with a box of their partners pasted, its mask, and its share of the image after clipping."""
    height, width = images.shape[-2:]
    box = box_around(centre, share, height, width)
    mask = box_mask(box, height, width)
    mixed = torch.where(mask.bool(), images[partner], images)
    return mixed, mask, box_share(box, height, width).expand(len(images))


def box_around(
    centre: Float[Tensor, "#boxes 2"], share: Float[Tensor, " #boxes"], height: int, width: int
) -> Int[Tensor, "boxes 4"]:
    """Boxes (top, bottom, left, right) of about `share` of the image, clipped to it; bottom and right are exclusive.

    CutMix, eq. 2: sides sqrt(share) times those of the image, rounded down to whole pixels, around the centre (given in
    parts of height and width). A side of odd length lies one pixel further down or right, as timm has it now; the code
    released with CutMix, SaliencyMix and TransMix halves it towards zero twice and loses that pixel.
    """
    # Square roots in float32 differ in the last bit between devices, which sometimes moves a side by a pixel.
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


@dataclass(frozen=True)
class ChosenDraw(Draw):
    """The method drawn for the batch, and the numbers that method drew."""

    mix: Mix
    drawn: Draw


class MixSwitch(Mix):
    """For each batch one of `mixes`, drawn with `weights`: the switch between mixup and CutMix of DeiT and TransMix.

    DeiT (timm's Mixup with both alphas) switches for the whole batch, half of the batches each. TransMix's released
    configuration takes CutMix for 0.8 of the batches with DeiT-B; for DeiT-S the option is written so that it is not
    read, and 0.5 is what ran. Here every method has the same weight unless `weights` says otherwise. A batch that falls
    to mixup keeps mixup's own targets.

    Args:
        mixes: the methods, all with the same number of classes.
        weights: how often each is taken, relative to each other.
        generator: decides which; on the CPU, since the host must know which method to run. Methods that have no
            generator of their own draw from this one too.
    """

    def __init__(
        self, mixes: Sequence[Mix], weights: Sequence[float] | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        if not isinstance(mixes, Sequence) or not mixes:
            raise UserError("MixSwitch takes a list of methods, [Mixup(10), CutMix(10)], with at least one in it.")
        for mix in mixes:
            if not isinstance(mix, Mix):
                what = f"the class {mix.__name__}" if isinstance(mix, type) else f"of the type {type(mix).__name__}"
                raise UserError(
                    f"MixSwitch takes a list of methods, [Mixup(10), CutMix(10)], and one of those given is {what}."
                )
        if len({mix.num_classes for mix in mixes}) > 1:
            raise UserError(
                f"the methods of a MixSwitch differ in num_classes ({', '.join(str(m.num_classes) for m in mixes)}): "
                f"give all of them the same."
            )
        super().__init__(mixes[0].num_classes, generator=generator)
        given = [1.0] * len(mixes) if weights is None else weights
        chances = [as_number(weight) for weight in given] if isinstance(given, Iterable) else []
        if len(chances) != len(mixes) or not min(chances) >= 0 or not 0 < sum(chances) < math.inf:
            raise UserError(
                f"MixSwitch: weights={weights!r} must be one number for each of the {len(mixes)} methods, finite, none "
                f"below 0 and not all 0."
            )
        if generator is not None and generator.device.type != "cpu":
            raise UserError("MixSwitch takes a generator on the CPU: its choice decides what the host does next.")
        self.mixes, self.weights = list(mixes), chances
        self._share_generator(generator, self._seed)

    def _share_generator(self, generator: torch.Generator | None, seed: int | None) -> None:
        """Set the generator of the methods that have none, also inside a nested MixSwitch."""
        for mix in self.mixes:
            if mix.generator is None:
                mix.generator, mix._seed = generator, seed
                if isinstance(mix, MixSwitch):
                    mix._share_generator(generator, seed)

    def draw_method(self) -> Mix:
        """Draw the method of the next batch."""
        self.warn_of_copied_generator()
        at = torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu").item() * sum(self.weights)
        for mix, weight in zip(self.mixes, self.weights, strict=True):
            if at < weight:
                return mix
            at -= weight
        return next(m for m, weight in zip(self.mixes[::-1], self.weights[::-1], strict=True) if weight)  # rounding

    def __call__(self, images: Images, targets: Targets) -> Mixed:
        return self.draw_method()(images, targets)

    def draw(self, images: Images) -> ChosenDraw:
        """Draw the method of the batch and its numbers; the caller of `apply` smooths the labels."""
        mix = self.draw_method()
        drawn = mix.draw(images)
        return ChosenDraw(drawn.partner, drawn.share, drawn.centre, mix, drawn)

    def apply(self, images: Images, labels: SoftLabels, draw: Draw) -> Mixed:
        if not isinstance(draw, ChosenDraw):
            raise UserError("MixSwitch applies what its own draw has drawn, and was given the draw of another method.")
        return draw.mix.apply(images, labels, draw.drawn)

    def close(self) -> None:
        for mix in self.mixes:
            mix.close()

    def __repr__(self) -> str:
        parts = [f"{weight:g} x {mix!r}" for mix, weight in zip(self.mixes, self.weights, strict=True)]
        return f"MixSwitch({', '.join(parts)})"
