"""The names augmentations and statistics go by in recipes. What each does: `augment.batched` and `augment.host`."""

from typing import Literal

from batchformer.errors import UserError

ArrayAugmentation = Literal["none", "crop-flip", "autoaugment-cutout", "resized-crop", "randaugment"]
FileAugmentation = Literal["none", "imagenet", "imagenet-lt", "inaturalist", "resized-crop", "randaugment"]
Statistics = tuple[float, float, float]

IMAGENET_MEAN: Statistics = (0.485, 0.456, 0.406)
IMAGENET_STD: Statistics = (0.229, 0.224, 0.225)


def check_image_options(image_size: int, erase_prob: float) -> None:
    if image_size < 1:
        raise UserError(f"data.image_size must be at least 1, got {image_size}.")
    if not 0 <= erase_prob <= 1:
        raise UserError(f"data.erase_prob is a probability from 0 to 1, got {erase_prob}.")


def check_statistics(std: Statistics) -> None:
    if min(std) <= 0:
        raise UserError(f"data.std, which images are divided by, must be above 0 in every channel, got {list(std)}.")
