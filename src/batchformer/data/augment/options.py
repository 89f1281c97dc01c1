"""The names of augmentations and statistics in recipes, and constants that their implementations share.

What each augmentation does: `augment.batched` (on the device) and `augment.host`.
"""

from typing import Literal

from batchformer.errors import UserError

ArrayAugmentation = Literal["none", "crop-flip", "autoaugment-cutout", "resized-crop", "randaugment"]
FileAugmentation = Literal[
    "none", "imagenet", "imagenet-lt", "inaturalist", "resized-crop", "randaugment", "domains", "centre"
]
Statistics = tuple[float, float, float]

IMAGENET_MEAN: Statistics = (0.485, 0.456, 0.406)
IMAGENET_STD: Statistics = (0.229, 0.224, 0.225)

RANDAUGMENT = "rand-m9-mstd0.5-inc1"
ERASE = "pixel"
# augmentations that train on resized regions of an image, and the smallest part of its area they take
SMALLEST_AREA = {"randaugment": 0.08, "resized-crop": 0.05}
# of "domains": the smallest part, the strength of the four changes of colour, how often an image becomes grey
DOMAINS_AREA, DOMAINS_JITTER, DOMAINS_GREY = 0.7, 0.3, 0.1


def evaluation_size(name: str, size: int) -> int:
    """The size evaluation resizes to before its centre crop of `size`: 256 / 224 of it where training crops regions."""
    return round(size * 256 / 224) if name in SMALLEST_AREA else size


def check_at_least(least: int, **given: int | None) -> None:
    """Refuse an option below `least`; one that is None is not set."""
    for name, value in given.items():
        if value is not None and value < least:
            raise UserError(f"data.{name} must be at least {least}, got {value}.")


def check_images(image_size: int, std: Statistics, erase_prob: float = 0.0) -> None:
    check_at_least(1, image_size=image_size)
    if not 0 <= erase_prob <= 1:
        raise UserError(f"data.erase_prob is a probability from 0 to 1, got {erase_prob}.")
    if min(std) <= 0:
        raise UserError(f"data.std, which images are divided by, must be above 0 in every channel, got {list(std)}.")
