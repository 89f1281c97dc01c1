"""The names of augmentations and statistics in recipes, and constants that their implementations share.

What each augmentation does: `augment.batched` (on the device) and `augment.host`.
"""

from typing import Literal, NamedTuple

from batchformer.errors import UserError

View = Literal["simclr", "moco-v3-1", "moco-v3-2", "paco-key"]
ArrayAugmentation = Literal["none", "crop-flip", "crop-flip-rotate", "autoaugment-cutout", "resized-crop", "mae",
                            "randaugment", View]  # fmt: skip
FileAugmentation = Literal["none", "imagenet", "imagenet-lt", "inaturalist", "resized-crop", "mae", "randaugment",
                           "domains", "centre", "paco-query", View]  # fmt: skip
Statistics = tuple[float, float, float]

IMAGENET_MEAN: Statistics = (0.485, 0.456, 0.406)
IMAGENET_STD: Statistics = (0.229, 0.224, 0.225)

ROTATION = 15.0  # degrees at most, of "crop-flip-rotate"
RANDAUGMENT = "rand-m9-mstd0.5-inc1"
ERASE = "pixel"
# augmentations that train on resized regions of an image, and the smallest part of its area they take
SMALLEST_AREA = {"randaugment": 0.08, "resized-crop": 0.05, "mae": 0.2}


class RegionView(NamedTuple):
    """A random region resized bilinearly, flip, and changes of colour, in this order.

    Args:
        area: the region is this part of the image or more.
        jitter: ColorJitter's strengths of brightness, contrast, saturation and hue.
        jitter_prob: probability of the jitter.
        grey: probability of losing the colour.
        blur: probability of a Gaussian blur, its sigma uniform in BLUR_SIGMA pixels.
        solarize: probability of inverting the pixels of 128 and more.
    """

    area: float
    jitter: tuple[float, float, float, float]
    jitter_prob: float = 1.0
    grey: float = 0.0
    blur: float = 0.0
    solarize: float = 0.0


#: "domains": DomainBed and the Transfer-Learning-Library; "simclr": MoCo-v2, and the keys of PaCo on CIFAR;
#: "moco-v3-1", "moco-v3-2": the two views of MoCo-v3 (as in BYOL); "paco-key": of PaCo on ImageNet-LT and Places-LT
REGION_VIEWS = {
    "domains": RegionView(0.7, (0.3, 0.3, 0.3, 0.3), grey=0.1),
    "simclr": RegionView(0.2, (0.4, 0.4, 0.4, 0.1), 0.8, grey=0.2, blur=0.5),
    "moco-v3-1": RegionView(0.2, (0.4, 0.4, 0.2, 0.1), 0.8, grey=0.2, blur=1.0),
    "moco-v3-2": RegionView(0.2, (0.4, 0.4, 0.2, 0.1), 0.8, grey=0.2, blur=0.1, solarize=0.2),
    "paco-key": RegionView(0.08, (0.4, 0.4, 0.4, 0.0), grey=0.2, blur=0.5),
}
BLUR_SIGMA = (0.1, 2.0)
SOLARIZE_THRESHOLD = 128


def blur_pixels(size: int) -> int:
    """Width of the blur's kernel: three deviations of the largest sigma, less in images too small to mirror so far.

    MoCo and PaCo blur with PIL, which approximates a Gaussian of unlimited width.
    """
    return min(13, 2 * size - 1)


def evaluation_size(name: str, size: int) -> int:
    """The size evaluation resizes to before its centre crop of `size`: 256 / 224 of it where training crops regions."""
    return round(size * 256 / 224) if name in SMALLEST_AREA else size


def check_at_least(least: int, **given: int | None) -> None:
    """Refuse an option below `least`; one that is None is not set."""
    for name, value in given.items():
        if value is not None and value < least:
            raise UserError(f"data.{name} must be at least {least}, got {value}.")


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UserError(f"data.{name} is a part of the images, from 0 to below 1, got {value}.")


def check_images(image_size: int, std: Statistics, erase_prob: float = 0.0) -> None:
    check_at_least(1, image_size=image_size)
    if not 0 <= erase_prob <= 1:
        raise UserError(f"data.erase_prob is a probability from 0 to 1, got {erase_prob}.")
    if min(std) <= 0:
        raise UserError(f"data.std, which images are divided by, must be above 0 in every channel, got {list(std)}.")
