"""The mean and std of normalised images: checked as options, undone, and exchanged for those of another network."""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from batchformer.errors import UserError
from batchformer.nn.inputs import as_number

#: one for each channel, or one for all of them
ChannelNumbers = float | tuple[float, ...]


def both_or_none(
    name: str, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> tuple[ChannelNumbers | None, ChannelNumbers | None]:
    """Check the options mean= and std=: both given, or both None."""
    if (mean is None) != (std is None):
        raise UserError(f"{name}: mean and std belong together; pass both, or neither.")
    if mean is None or std is None:
        return None, None
    return _channel_numbers(name, "mean", mean), _channel_numbers(name, "std", std)


def _channel_numbers(name: str, option: str, given: float | Sequence[float]) -> ChannelNumbers:
    """The option as floats: a tuple of one for each channel, or one for all."""
    many = isinstance(given, Iterable) and getattr(given, "ndim", 1) == 1
    numbers = tuple(map(as_number, given)) if many else (as_number(given),)  # type: ignore[arg-type]
    least = 0.0 if option.endswith("std") else -math.inf
    if not numbers or not all(least < number < math.inf for number in numbers):
        raise UserError(
            f"{name}: {option}={given!r} must be a number for each channel or one for all"
            f"{', above 0.' if option.endswith('std') else '.'}"
        )
    return numbers if many else numbers[0]


def unit_range(
    images: Float[Tensor, "batch channels height width"],
    mean: ChannelNumbers | None = None,
    std: ChannelNumbers | None = None,
) -> Float[Tensor, "batch channels height width"]:
    """Normalised images back in [0, 1]: by the mean and std that normalised them, or each stretched to its range."""
    images = images.detach().float()
    if mean is not None and std is not None:
        mean, std = ((one,) * images.shape[1] if isinstance(one, float) else one for one in (mean, std))
        if not len(mean) == len(std) == images.shape[1]:
            raise UserError(
                f"mean and std have {len(mean)} and {len(std)} numbers and the images {images.shape[1]} channels: "
                f"give one of each for every channel, or a single number for all."
            )
        # channel by channel with Python numbers: a tensor of them would need a synchronous copy to the device
        return torch.stack([images[:, c] * std[c] + mean[c] for c in range(len(mean))], dim=1).clamp(0, 1)
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return (images - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


class Renormalize:
    """Convert images normalised by one mean and std to another mean and std (ImageNet's by default).

    Each is a number for every channel, or one for all of them.
    """

    def __init__(
        self,
        mean: float | Sequence[float],
        std: float | Sequence[float],
        to_mean: float | Sequence[float] = (0.485, 0.456, 0.406),
        to_std: float | Sequence[float] = (0.229, 0.224, 0.225),
    ) -> None:
        options = {"mean": mean, "std": std, "to_mean": to_mean, "to_std": to_std}
        given = [_channel_numbers("Renormalize", name, value) for name, value in options.items()]
        counts = {len(one) for one in given if isinstance(one, tuple)}
        if len(counts) > 1:
            raise UserError(
                "Renormalize: mean, std, to_mean and to_std must have one number for each channel, or a single number "
                "for all."
            )
        channels = counts.pop() if counts else 1
        mean, std, to_mean, to_std = (one if isinstance(one, tuple) else (one,) * channels for one in given)
        # x std + mean is the picture, (picture - to_mean) / to_std what is wanted: one scale and shift a channel
        self.scale = [s / t for s, t in zip(std, to_std, strict=True)]
        self.shift = [(m - n) / t for m, n, t in zip(mean, to_mean, to_std, strict=True)]

    def __call__(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        if len(self.scale) == 1:
            return images * self.scale[0] + self.shift[0]
        if len(self.scale) != images.shape[1]:
            raise UserError(
                f"Renormalize has numbers for {len(self.scale)} channels and the images have {images.shape[1]}: give "
                f"one for each channel."
            )
        return torch.stack([images[:, c] * self.scale[c] + self.shift[c] for c in range(len(self.scale))], dim=1)
