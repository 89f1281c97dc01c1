"""Data of several domains: augmentation."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment import batched_augmentation, operations
from batchformer.data.augment.draws import JitterDraw, draw_table, to_device
from batchformer.data.augment.host import FILE_AUGMENTATIONS, array_transform, evaluation_transform, file_transform
from batchformer.data.augment.resample import crop_rectangles


def noise(n=10, size=24, seed=0):
    images = torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    images[0], images[1, 0], images[2] = 90, 0, torch.linspace(0, 255, size).to(torch.uint8)
    return images


def test_hue_and_grey_are_torchvisions():
    images = noise()
    turns = torch.linspace(-0.5, 0.5, len(images))
    turns[3] = 0.0
    expected = torch.stack([F.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)])
    off = (operations.hue(images, turns).int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.01
    assert (expected != images).any()
    assert torch.equal(operations.hue(images, turns)[3], images[3])
    assert torch.equal(operations.grey(images), F.rgb_to_grayscale(images, 3))


def test_the_augmentation_on_the_device_is_torchvisions_sample_by_sample():
    """Region, flip, the four changes of colour in the sample's own order, and grey, from the same random numbers."""
    images, size = noise(n=60), 20
    augmentation = batched_augmentation("domains", 24, size)
    draws = {purpose: draw_table(len(images), 3, 0, purpose) for purpose in augmentation.purposes}
    assert set(draws) == {"augment", "crop", "jitter"}
    plan = to_device(augmentation.plan(draws, 24, 24), torch.device("cpu"))
    ours = augmentation.apply(images.clone(), torch.arange(len(images)), plan)
    operations_of = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    regions = np.stack(crop_rectangles(draws["crop"], 24, 24, (0.7, 1.0)), 1)
    assert (regions[:, 2] * regions[:, 3] / 24**2).min() > 0.6
    off, orders, greys = [], set(), 0
    for i, image in enumerate(images):
        expected = F.resized_crop(image, *regions[i].tolist(), [size, size], antialias=True)
        if draws["augment"][i, 2] >= 0.5:
            expected = F.horizontal_flip(expected)
        row = draws["jitter"][i]
        order = sorted_order(int(row[JitterDraw.ORDER] * 24))
        orders.add(tuple(order))
        for number in order:
            amount = np.float32(0.3 * (2 * row[JitterDraw.BRIGHTNESS + number] - 1) + (number < 3))
            expected = operations_of[number](expected, float(amount))
        if row[JitterDraw.GREY] < 0.1:
            greys += 1
            expected = F.rgb_to_grayscale(expected, 3)
        off.append((ours[i].int() - expected.int()).abs())
    off = torch.stack(off)
    assert len(orders) > 15
    assert greys > 0
    assert off.float().mean() < 0.1  # a level that differs once is carried on by the later steps
    assert off.max() <= 6


def sorted_order(number):
    from itertools import permutations

    return list(permutations(range(4)))[number]


def test_the_device_draws_nothing_new_for_other_augmentations():
    assert batched_augmentation("crop-flip").purposes == ("augment",)
    assert batched_augmentation("resized-crop", 24, 20).purposes == ("augment", "crop")
    images = noise()
    plain = batched_augmentation("resized-crop", 24, 20).evaluation()
    bilinear = batched_augmentation("domains", 24, 20).evaluation()
    index = torch.arange(len(images))
    off = bilinear.apply(images, index, {}).int() - F.resize(images, [20, 20], antialias=True).int()
    assert off.abs().max() <= 1
    assert plain.size == 23
    assert plain.centre == 20


def test_files_are_augmented_on_the_host_and_evaluated_as_a_whole():
    assert "domains" in FILE_AUGMENTATIONS
    mean, std = (0.0,) * 3, (1.0,) * 3
    steps = [type(step).__name__ for step in file_transform("domains", 20, mean, std).transforms]
    assert steps[:4] == ["RandomResizedCrop", "RandomHorizontalFlip", "ColorJitter", "RandomGrayscale"]
    crop, _, jitter, grey = file_transform("domains", 20, mean, std).transforms[:4]
    assert crop.scale == (0.7, 1.0)
    assert jitter.hue == (-0.3, 0.3)
    assert jitter.contrast == (0.7, 1.3)
    assert grey.p == 0.1
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 60, 3)).astype(np.uint8))
    seen = evaluation_transform("domains", 20, mean, std)(image)
    whole = F.pil_to_tensor(image.resize((20, 20), Image.Resampling.BILINEAR)) / 255
    assert torch.allclose(seen, whole)
    assert array_transform("domains", 24, 20, mean, std)(noise()[5]).shape == (3, 20, 20)
