"""One of several methods for each batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from batchformer.errors import UserError
from batchformer.mix.base import Draw, Mix
from batchformer.mix.mixed import Mixed
from batchformer.mix.workers import warn_of_copied_numbers
from batchformer.nn.inputs import as_number


@dataclass(frozen=True)
class ChosenDraw(Draw):
    """What the chosen method drew, and which that is."""

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
        self,
        mixes: Sequence[Mix],
        weights: Sequence[float] | None = None,
        *,
        generator: torch.Generator | None = None,
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
        self._hand_on(generator, self._seed)

    def _hand_on(self, generator: torch.Generator | None, seed: int | None) -> None:
        """To the methods that have none of their own, also inside a switch that is one of them."""
        for mix in self.mixes:
            if mix.generator is None:
                mix.generator, mix._seed = generator, seed
                if isinstance(mix, MixSwitch):
                    mix._hand_on(generator, seed)

    def choose(self) -> Mix:
        """The method of the next batch."""
        warn_of_copied_numbers("MixSwitch", self.generator, self._seed)
        at = torch.rand((), generator=self.generator, dtype=torch.float64, device="cpu").item() * sum(self.weights)
        for mix, weight in zip(self.mixes, self.weights, strict=True):
            if at < weight:
                return mix
            at -= weight
        return next(m for m, weight in zip(self.mixes[::-1], self.weights[::-1], strict=True) if weight)  # rounding

    def __call__(
        self,
        images: Float[Tensor, "batch channels height width"],
        targets: Int[Tensor, " batch"] | Float[Tensor, "batch classes"],
    ) -> Mixed:
        return self.choose()(images, targets)

    def draw(self, images: Float[Tensor, "batch channels height width"]) -> ChosenDraw:
        """The method of the batch, and what that draws; labels are smoothed by whoever calls `apply`."""
        mix = self.choose()
        drawn = mix.draw(images)
        return ChosenDraw(drawn.partner, drawn.share, drawn.centre, mix, drawn)

    def apply(
        self, images: Float[Tensor, "batch channels height width"], labels: Float[Tensor, "batch classes"], draw: Draw
    ) -> Mixed:
        if not isinstance(draw, ChosenDraw):
            raise UserError("MixSwitch applies what its own draw has drawn, and was given the draw of another method.")
        return draw.mix.apply(images, labels, draw.drawn)

    def close(self) -> None:
        for mix in self.mixes:
            mix.close()

    def __repr__(self) -> str:
        parts = [f"{weight:g} x {mix!r}" for mix, weight in zip(self.mixes, self.weights, strict=True)]
        return f"MixSwitch({', '.join(parts)})"
