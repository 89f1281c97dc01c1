"""Resized crops against torchvision's, and the regions they are cut from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import RandomResizedCrop as Reference
from torchvision.transforms.v2 import functional as F

from batchformer.data.augment.draws import draw_table
from batchformer.data.augment.resample import _weights, crop_rectangles, resize, resized_crop
from tests.interpreter import interpreted

BICUBIC = InterpolationMode.BICUBIC


def noise(n, size, seed=0):
    return torch.randint(0, 256, (n, 3, size, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def regions(n, size):
    rng = np.random.default_rng(0)
    height, width = rng.integers(2, size + 1, (2, n))
    top, left = (rng.random((2, n)) * (size + 1 - np.stack([height, width]))).astype(int)
    return torch.from_numpy(np.stack([top, left, height, width], 1))


@pytest.mark.parametrize(("native", "size"), [(32, 224), (32, 32), (20, 33), (32, 20), (32, 9)])
def test_resized_crops_are_torchvisions_within_two_grey_levels(native, size):
    """Both compute bytes with weights of about 15 bits: on noise, one in 100 falls on the other side."""
    images, region = noise(16, native), regions(16, native)
    result = resized_crop(images, region, size).int()
    expected = torch.stack(
        [F.resized_crop(image, *box, [size, size], BICUBIC) for image, box in zip(images, region.tolist(), strict=True)]
    ).int()
    difference = (result - expected).abs()
    assert difference.max() <= 2
    assert (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize("native", [20, 32])
def test_enlarged_crops_are_pils(native):
    images, region = noise(16, native), regions(16, native)
    result = resized_crop(images, region, 48).int()
    for ours, image, (top, left, height, width) in zip(result, images, region.tolist(), strict=True):
        cut = F.to_pil_image(image).crop((left, top, left + width, top + height))
        difference = (ours - F.pil_to_tensor(cut.resize((48, 48), 3)).int()).abs()
        assert difference.max() <= 2
        assert (difference > 0).float().mean() < 0.01


def test_mirrored_where_asked():
    images, region = noise(4, 12), regions(4, 12)
    mirror = torch.tensor([True, False, False, True])
    plain, result = resized_crop(images, region, 20), resized_crop(images, region, 20, mirror)
    assert torch.equal(result[1:3], plain[1:3])
    assert torch.equal(result[mirror], plain[mirror].flip(3))


def test_the_native_size_is_the_image_itself():
    images = noise(3, 17)
    assert torch.equal(resize(images, 17), images)


def test_shrinking_is_smoothed():
    """A pattern of single black and white columns becomes grey, and not one of the two."""
    stripes = (torch.arange(64) % 2 * 255).to(torch.uint8).expand(1, 3, 64, 64).contiguous()
    assert (resize(stripes, 16).int() - 128).abs().max() < 12


def test_regions_are_drawn_as_torchvision_draws_them():
    """Same smallest and largest, same distribution of area and of the middle, for a tall image as well."""
    n, height, width = 20_000, 30, 24
    ours = crop_rectangles(draw_table(n, 0, 0, "crop"), height, width, (0.08, 1.0))
    torch.manual_seed(0)
    image = torch.zeros(3, height, width)
    drawn = [Reference.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(6000)]
    theirs = np.array(drawn).T
    for mine, reference in zip(ours, theirs, strict=True):
        assert np.quantile(mine, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(reference, [0.1, 0.5, 0.9]), abs=1)
        assert mine.mean() == pytest.approx(reference.mean(), abs=0.35)
    area = ours.height * ours.width / (height * width)
    assert area.mean() == pytest.approx((theirs[2] * theirs[3]).mean() / (height * width), abs=0.01)
    assert (ours.top >= 0).all()
    assert (ours.top + ours.height <= height).all()
    assert (ours.left >= 0).all()
    assert (ours.left + ours.width <= width).all()


def test_where_no_region_fits_the_largest_centre_is_taken():
    """All attempts ask for the whole area at a ratio the image does not have."""
    draws = np.full((1, draw_table(1, 0, 0, "crop").shape[1]), 0.999999)
    assert [int(v[0]) for v in crop_rectangles(draws, 32, 32, (1.0, 1.0))] == [0, 0, 32, 32]
    assert [int(v[0]) for v in crop_rectangles(draws, 10, 40, (1.0, 1.0))] == [0, 13, 10, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_precision_of_matrix_products_moves_no_pixel(dtype):
    """Inside somebody's autocast, and with float32 products allowed to run in bfloat16."""
    images, region = noise(6, 32), regions(6, 32)
    expected = resized_crop(images, region, 40)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype):
            assert torch.equal(resized_crop(images, region, 40), expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_weights_are_exact_in_eight_bits_each():
    region = regions(50, 32)
    for part in _weights(region[:, 1], region[:, 3], 40, 32):
        assert torch.equal(part.to(torch.bfloat16).float(), part)


def test_the_kernel_computes_what_the_tensor_operations_do():
    agreed = interpreted(Path(__file__).with_name("interpret_resample.py"))
    assert agreed == ["32x32 to 224", "20x28 to 33", "9x16 to 70", "64x64 to 40"]
