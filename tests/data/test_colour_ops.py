"""Every batched operation against torchvision's operation of the same name, image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment import operations
from batchformer.data.augment.operations import affine, inverse_matrices

FACTORS = [0.1, 0.4, 1.0, 1.3, 1.9]


def make_images(n=12, size=32, seed=0):
    """Noise, smooth gradients, narrow ranges and constant channels: what histogram operations stumble over."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    ramp = torch.linspace(0, 255, size).to(torch.uint8)
    images[1] = ramp.view(1, 1, -1)
    images[2] = (ramp // 8 + 90).view(1, -1, 1)
    images[3, 0] = 7
    images[4] = 200
    images[5, :, : size // 2] = 0
    return images


def one_by_one(op, images, values):
    return torch.stack([op(image, value) for image, value in zip(images, values, strict=True)])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (operations.brightness, F.adjust_brightness),
        (operations.saturation, F.adjust_saturation),
        (operations.contrast, F.adjust_contrast),
        (operations.sharpness, F.adjust_sharpness),
    ],
)
def test_factor_operations_agree_within_one_grey_level(ours, theirs):
    """Exact but for the last bit of float32 before the cut to whole numbers: one level, where the result is whole."""
    images = make_images(n=15)
    factors = [FACTORS[i % len(FACTORS)] for i in range(len(images))]
    expected = one_by_one(theirs, images, factors).int()
    difference = (ours(images, torch.tensor(factors)).int() - expected).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02
    assert (expected != images.int()).any(), "the factors must change something"


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_is_exact(bits):
    images = make_images()
    assert torch.equal(operations.posterize(images, torch.full((12,), float(bits))), F.posterize(images, bits))


@pytest.mark.parametrize("threshold", [0.0, 28.333, 113.3, 128.0, 255.0])
def test_solarize_is_exact(threshold):
    images = make_images()
    assert torch.equal(operations.solarize(images, torch.full((12,), threshold)), F.solarize(images, threshold))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(operations.invert, F.invert), (operations.autocontrast, F.autocontrast), (operations.equalize, F.equalize)],
)
@pytest.mark.parametrize("size", [8, 32])
def test_operations_without_strength_are_exact(ours, theirs, size):
    images = make_images(n=12, size=size)
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("size", [(32, 32), (20, 28)])
@pytest.mark.parametrize(
    ("op", "magnitudes"),
    [
        ("TranslateX", [-14.5, -3.2, 0.0, 4.8, 14.5]),
        ("TranslateY", [-14.5, -3.2, 0.0, 4.8, 14.5]),
        ("ShearX", [-0.3, -0.2666667, 0.0333333, 0.2333333]),
        ("ShearY", [-0.3, -0.2666667, 0.0333333, 0.2333333]),
        ("Rotate", [-30.0, -6.6666667, 0.0, 6.6666667, 20.0]),
    ],
)
def test_geometric_operations_are_exact(op, magnitudes, size):
    height, width = size
    images = make_images(n=6, size=32)[:, :, :height, :width].repeat_interleave(len(magnitudes), 0)
    values = np.array(magnitudes * 6)
    ours = affine(images, torch.from_numpy(inverse_matrices(op, values, height, width)))
    assert torch.equal(ours, one_by_one(lambda image, m: torchvision_geometric(op, image, m), images, values))


def torchvision_geometric(op, image, magnitude):
    from torchvision.transforms.v2 import AutoAugment

    magnitude = float(magnitude)
    transform = AutoAugment(fill=128)
    return transform._apply_image_or_video_transform(image, op, magnitude, transform.interpolation, transform._fill)


def test_contrast_strength_belongs_to_its_sample():
    images = make_images()[6:9]
    mixed = operations.contrast(images, torch.tensor([0.1, 1.0, 1.9]))
    assert torch.equal(mixed[1], images[1])
    assert not torch.equal(mixed[0], images[0])
    assert not torch.equal(mixed[2], images[2])
