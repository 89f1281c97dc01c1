"""Mixup against a slow loop, and against timm's on the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import timm.data
import torch

import batchformer as bf
from batchformer.mix.base import Draw, soft_labels


@pytest.mark.parametrize("per_sample", [False, True])
def test_every_image_is_blended_with_its_partner(per_sample):
    images, ids = torch.randn(5, 3, 6, 9), torch.arange(5)
    mixed = bf.mix.Mixup(5, per_sample=per_sample)(images, ids)
    assert mixed.mask is None
    assert len(set(mixed.share.tolist())) == (5 if per_sample else 1)
    for i, j in enumerate(mixed.partner.tolist()):
        s = mixed.share[i]
        torch.testing.assert_close(mixed.images[i], (1 - s) * images[i] + s * images[j])


def test_flipped_pairs_give_what_timm_gives():
    images, ids = torch.randn(6, 3, 8, 8), torch.arange(6)
    theirs = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=0, label_smoothing=0.1, num_classes=6)
    np.random.seed(4)
    expected, targets = theirs(images.clone(), ids)
    np.random.seed(4)
    np.random.rand()  # whether to mix at all
    share = torch.tensor([1 - np.random.beta(0.8, 0.8)], dtype=torch.float32)
    mix = bf.mix.Mixup(6, alpha=0.8, label_smoothing=0.1, partner="flip")
    draw = Draw(mix.draw(images).partner, share, torch.zeros(1, 2))
    mixed = mix.apply(images, soft_labels(ids, 6, 0.1), draw)
    torch.testing.assert_close(mixed.images, expected)
    torch.testing.assert_close(mixed.targets(), targets)


def test_half_precision_images_stay_so_and_the_input_is_not_touched():
    images, ids = torch.randn(4, 3, 8, 8).bfloat16(), torch.arange(4)
    before = images.clone()
    assert bf.mix.Mixup(4)(images, ids).images.dtype == torch.bfloat16
    assert torch.equal(images, before)
