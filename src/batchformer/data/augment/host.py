"""Augmentation image by image with timm and torchvision: for files, and for arrays with `on_device=False`.

"imagenet-lt" is RandomResizedCrop, flip and ColorJitter(.4, .4, .4, 0), as the released code has it for ImageNet-LT and
Places-LT; "imagenet" and "inaturalist" are the same without the jitter. "randaugment" is DeiT's, made by timm:
RandomResizedCrop, flip, RandAugment `rand-m9-mstd0.5-inc1`, random erasing; "resized-crop" is what moco-v3's transfer
code trains with: regions of 5 to 100 % of the image, flip, and no more; "mae" is MAE's, the same with 20 to 100 %.
CIFAR at its own size: see `augment.batched`.
Evaluation resizes the short side to 256 / 224 of the image size and takes the centre; bicubic where training is.

"domains" is that of DomainBed and the Transfer-Learning-Library for unseen domains: regions of 70 to 100 %,
flip, ColorJitter(.3, .3, .3, .3), one image in ten grey; evaluation sees the whole image, squeezed into a square. It is
one of the `REGION_VIEWS`; the others are the views of contrastive learning. "paco-query" is what PaCo shows its queries
of ImageNet-LT: "imagenet-lt" and then RandAugment `rand-n2-m10-mstd0.5`.
"centre" is TLL's for VisDA: the image squeezed into a square, its centre (224 / 256 of a side), and flip.
"""

from collections.abc import Callable
from typing import get_args

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from batchformer.data.augment.batched import batched_augmentation
from batchformer.data.augment.crop_erase import cutout
from batchformer.data.augment.options import (
    BLUR_SIGMA,
    ERASE,
    RANDAUGMENT,
    REGION_VIEWS,
    ROTATION,
    SMALLEST_AREA,
    SOLARIZE_THRESHOLD,
    FileAugmentation,
    Statistics,
    blur_pixels,
    evaluation_size,
)
from batchformer.errors import UserError

FILE_AUGMENTATIONS = get_args(FileAugmentation)


class Cutout(torch.nn.Module):
    """`cutout` for one (3, H, W) image of bytes, centre from torch's generator."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        row, column = torch.randint(height, (1,)), torch.randint(width, (1,))
        return cutout(image.unsqueeze(0), row, column, self.size).squeeze(0)


def _finish(mean: Statistics, std: Statistics, erase_prob: float = 0.0) -> list[Callable]:
    erase: list[Callable] = []
    if erase_prob:
        from timm.data.random_erasing import RandomErasing

        erase = [RandomErasing(erase_prob, mode=ERASE, device="cpu")]
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std)), *erase]


def _deit(
    name: str, size: int, mean: Statistics, std: Statistics, erase_prob: float, crop: Callable | None = None
) -> Callable[[Image.Image], Tensor]:
    """timm's own pipeline, from an RGB image; `crop` in place of RandomResizedCrop, as DeiT does for 32 px."""
    from timm.data import create_transform

    transform = create_transform(
        size,
        is_training=True,
        scale=(SMALLEST_AREA[name], 1.0),
        color_jitter=None,  # type: ignore[arg-type]  # None disables it
        auto_augment=RANDAUGMENT if name == "randaugment" else None,
        interpolation="bicubic",
        mean=mean,
        std=std,
        re_prob=erase_prob,
        re_mode=ERASE,
    )
    if crop is not None:
        transform.transforms[0] = crop
    for step in transform.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name == "PosterizeIncreasing":
                operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Posterize that accepts 0 bits (magnitude 10, one draw in 44): black in older Pillows, an error in Pillow 13."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


def _view(name: str, size: int) -> list[Callable]:
    view = REGION_VIEWS[name]
    jitter: Callable = v2.ColorJitter(*view.jitter)
    steps = [v2.RandomResizedCrop(size, scale=(view.area, 1.0)), v2.RandomHorizontalFlip()]
    steps += [jitter if view.jitter_prob == 1 else v2.RandomApply([jitter], view.jitter_prob)]
    steps += [v2.RandomGrayscale(view.grey)]
    if view.blur:
        steps += [v2.RandomApply([v2.GaussianBlur(blur_pixels(size), BLUR_SIGMA)], view.blur)]
    if view.solarize:
        steps += [v2.RandomSolarize(SOLARIZE_THRESHOLD, view.solarize)]
    return steps


def _paco_randaugment(size: int, mean: Statistics) -> Callable[[Image.Image], Image.Image]:
    from timm.data.auto_augment import rand_augment_transform

    fill = tuple(min(255, round(255 * value)) for value in mean)
    return rand_augment_transform("rand-n2-m10-mstd0.5", {"translate_const": int(0.45 * size), "img_mean": fill})


def array_transform(
    name: str, native: int, size: int, mean: Statistics, std: Statistics, erase_prob: float = 0.0
) -> Callable[[Tensor], Tensor]:
    """From one (3, native, native) image of bytes to the augmented, normalised (3, size, size) tensor."""
    batched_augmentation(name)  # refuses an unknown name
    if name in SMALLEST_AREA:
        crop = v2.RandomCrop(size, padding=4) if size == native and name == "randaugment" else None
        return v2.Compose([v2.ToPILImage(), _deit(name, size, mean, std, erase_prob, crop)])
    crop_flip = [v2.RandomCrop(native, padding=4), v2.RandomHorizontalFlip()]
    steps: dict[str, list[Callable]] = {
        "none": [],
        "shift": [v2.RandomCrop(native, padding=1)],
        "crop-flip": crop_flip,
        "crop-flip-rotate": [*crop_flip, v2.RandomRotation(ROTATION)],
        "autoaugment-cutout": [*crop_flip, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, fill=128), Cutout(16)],
    }
    resize = [] if size == native else [v2.Resize((size, size), InterpolationMode.BICUBIC)]
    chosen = _view(name, size) if name in REGION_VIEWS else [*steps[name], *resize]
    return v2.Compose([*chosen, *_finish(mean, std, erase_prob)])


def array_evaluation(
    name: str, native: int, size: int, mean: Statistics, std: Statistics
) -> Callable[[Tensor | Image.Image], Tensor]:
    """From one (3, native, native) image of bytes to what a model trained with the named augmentation is tested on."""
    if size == native:
        return v2.Compose(_finish(mean, std))
    interpolation = InterpolationMode.BILINEAR if name in REGION_VIEWS else InterpolationMode.BICUBIC
    resize = v2.Resize((evaluation_size(name, size),) * 2, interpolation)
    return v2.Compose([resize, v2.CenterCrop(size), *_finish(mean, std)])


def small_image_transform(
    name: str, native: int, size: int, mean: Statistics, std: Statistics
) -> Callable[[Image.Image], Tensor]:
    """Transform of a user's image for a model of small images: all of it, reduced to the size of the data set's."""
    seen = v2.Resize((native, native))
    return v2.Compose([v2.RGB(), seen, v2.PILToTensor(), array_evaluation(name, native, size, mean, std)])


def file_transform(
    name: str, size: int, mean: Statistics, std: Statistics, erase_prob: float = 0.0
) -> Callable[[Image.Image], Tensor]:
    """Training: from an RGB image to the augmented, normalised (3, size, size) tensor."""
    if name not in FILE_AUGMENTATIONS:
        raise UserError(f"unknown augmentation {name!r}: choose one of {', '.join(FILE_AUGMENTATIONS)}.")
    if name in SMALLEST_AREA:
        return _deit(name, size, mean, std, erase_prob)
    if name == "none":
        steps: list[Callable] = _centre(size, InterpolationMode.BILINEAR)
    elif name in REGION_VIEWS:
        steps = _view(name, size)
    elif name == "centre":
        steps = [*_centre(size, InterpolationMode.BILINEAR, square=True), v2.RandomHorizontalFlip()]
    else:
        jitter = [v2.ColorJitter(0.4, 0.4, 0.4, 0)] if name in ("imagenet-lt", "paco-query") else []
        steps = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *jitter]
        steps += [_paco_randaugment(size, mean)] if name == "paco-query" else []
    return v2.Compose([*steps, v2.PILToTensor(), *_finish(mean, std, erase_prob)])


def evaluation_transform(name: str, size: int, mean: Statistics, std: Statistics) -> Callable[[Image.Image], Tensor]:
    """The centre of the image: short side to 256 / 224 of `size`, then a crop of `size`; for "domains" all of it.

    For "centre" both sides are resized to that.
    """
    if name == "domains":
        return v2.Compose([v2.RGB(), v2.Resize((size, size)), v2.PILToTensor(), *_finish(mean, std)])
    interpolation = InterpolationMode.BICUBIC if name in SMALLEST_AREA else InterpolationMode.BILINEAR
    centre = _centre(size, interpolation, square=name == "centre")
    return v2.Compose([v2.RGB(), *centre, v2.PILToTensor(), *_finish(mean, std)])


def _centre(size: int, interpolation: InterpolationMode, square: bool = False) -> list[Callable]:
    side = round(size * 256 / 224)
    return [v2.Resize((side, side) if square else side, interpolation), v2.CenterCrop(size)]
