"""Random erasing: which rectangles, and noise that belongs to the sample."""

import random

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing

from batchformer.data.augment.crop_erase import erase, normal_noise, plan_erasing
from batchformer.data.augment.draws import draw_table, to_device
from batchformer.data.augment.resample import erased_rectangles

CPU = torch.device("cpu")


def test_noise_is_standard_normal_and_without_pattern():
    noise = normal_noise(torch.arange(64), 3 * 32 * 32).double()
    assert abs(noise.mean()) < 0.01
    assert noise.std() == pytest.approx(1.0, abs=0.01)
    assert (noise.abs() < 1).double().mean() == pytest.approx(0.6827, abs=0.005)
    assert (noise**4).mean() == pytest.approx(3.0, abs=0.1)
    assert abs(np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())[0, 1]) < 0.01, "neighbouring pixels"
    assert abs(np.corrcoef(noise[:-1].flatten(), noise[1:].flatten())[0, 1]) < 0.01, "neighbouring keys"
    assert torch.isfinite(noise).all()


def test_noise_depends_on_the_key_alone():
    key = torch.tensor([5, 2**53 - 1, 7])
    together = normal_noise(key, 301)
    assert together.shape == (3, 301)
    assert torch.equal(together[1:2], normal_noise(key[1:2], 301))
    assert not torch.equal(together[0], together[2])


def test_the_rectangle_alone_is_replaced():
    images = torch.full((50, 3, 20, 24), 9.0)
    draws = draw_table(50, 0, 0, "erase")
    members, rectangles = erased_rectangles(draws, 20, 24, 0.5)
    result = erase(images.clone(), to_device(plan_erasing(draws, 20, 24, 0.5), CPU))
    untouched = np.setdiff1d(np.arange(50), members)
    assert 15 < len(members) < 35
    assert torch.equal(result[untouched], images[untouched])
    for sample, top, left, height, width in zip(members, *rectangles, strict=True):
        inside = torch.zeros(20, 24, dtype=torch.bool)
        inside[top : top + height, left : left + width] = True
        assert inside.sum() == height * width
        assert (result[sample][:, ~inside] == 9).all()
        assert (result[sample][:, inside] != 9).all()


def test_rectangles_are_as_large_and_as_frequent_as_timms():
    n, size = 4000, 32
    members, rectangles = erased_rectangles(draw_table(n, 1, 0, "erase"), size, size, 0.25)
    random.seed(0)
    reference = RandomErasing(0.25, mode="pixel", device="cpu")
    images = reference(torch.full((n, 1, size, size), 99.0))
    theirs = (images != 99).flatten(1).sum(1).numpy()
    ours = rectangles.height * rectangles.width
    assert len(members) / n == pytest.approx((theirs > 0).mean(), abs=0.03)
    assert np.quantile(ours, [0.1, 0.5, 0.9]) == pytest.approx(
        np.quantile(theirs[theirs > 0], [0.1, 0.5, 0.9]), rel=0.1
    )
    assert max(rectangles.height.max(), rectangles.width.max()) == size - 1, "never from one border to the other"
    assert np.median(rectangles.height / rectangles.width) == pytest.approx(1.0, abs=0.1)


def test_nothing_is_erased_at_probability_zero():
    assert plan_erasing(draw_table(30, 0, 0, "erase"), 8, 8, 0.0) == {}
