"""Augmentation image by image with torchvision v2: for files, and for arrays when the device is not to be used.

The released code's transforms: CIFAR as in `augment.batched`; ImageNet-LT and Places-LT RandomResizedCrop, flip and
ColorJitter(.4, .4, .4, 0); iNaturalist 2018 without the jitter; evaluation resizes the short side to 256 / 224 of the
image size and takes the centre.
"""

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from batchformer.data.augment.cutout import cutout
from batchformer.errors import UserError

Statistics = tuple[float, float, float]
FILE_AUGMENTATIONS = ("none", "imagenet-lt", "inaturalist")


class Cutout(torch.nn.Module):
    """`augment.cutout` for one (3, H, W) image of bytes, centre from torch's generator."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        row, column = torch.randint(height, (1,)), torch.randint(width, (1,))
        return cutout(image.unsqueeze(0), row, column, self.size).squeeze(0)


def _to_rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _finish(mean: Statistics, std: Statistics) -> list[Callable]:
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]


def array_transform(name: str, size: int, mean: Statistics, std: Statistics) -> Callable[[Tensor], Tensor]:
    """From one (3, H, W) image of bytes to the normalised tensor."""
    crop_flip = [v2.RandomCrop(size, padding=4), v2.RandomHorizontalFlip()]
    steps: dict[str, list[Callable]] = {
        "none": [],
        "shift": [v2.RandomCrop(size, padding=1)],
        "crop-flip": crop_flip,
        "autoaugment-cutout": [*crop_flip, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, fill=128), Cutout(16)],
    }
    return v2.Compose([*steps[name], *_finish(mean, std)])


def small_image_transform(size: int, mean: Statistics, std: Statistics) -> Callable[[Image.Image], Tensor]:
    """A user's image for a model of small images: the whole of it, resized."""
    return v2.Compose([_to_rgb, v2.Resize((size, size)), v2.PILToTensor(), *_finish(mean, std)])


def file_transform(name: str, size: int, mean: Statistics, std: Statistics) -> Callable[[Image.Image], Tensor]:
    """Training: from an RGB image to the augmented, normalised (3, size, size) tensor."""
    if name not in FILE_AUGMENTATIONS:
        raise UserError(f"unknown augmentation {name!r}: choose one of {', '.join(FILE_AUGMENTATIONS)}.")
    if name == "none":
        return evaluation_transform(size, mean, std)
    jitter = [v2.ColorJitter(0.4, 0.4, 0.4, 0)] if name == "imagenet-lt" else []
    steps = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *jitter]
    return v2.Compose([*steps, v2.PILToTensor(), *_finish(mean, std)])


def evaluation_transform(size: int, mean: Statistics, std: Statistics) -> Callable[[Image.Image], Tensor]:
    """The centre of the image: short side to 256 / 224 of `size`, then a crop of `size`."""
    steps = [_to_rgb, v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()]
    return v2.Compose([*steps, *_finish(mean, std)])
