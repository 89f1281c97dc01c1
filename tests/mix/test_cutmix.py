"""CutMix against a slow loop, and against timm's on the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import timm.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchformer as bf
from batchformer.mix.base import Draw, soft_labels
from batchformer.mix.mixup_cutmix import box_around, box_mask, box_share


@pytest.mark.parametrize("per_sample", [False, True])
@settings(max_examples=20, deadline=None)
@given(count=st.integers(2, 5), height=st.integers(1, 17), width=st.integers(1, 17), seed=st.integers(0, 2**31))
def test_every_pixel_comes_from_one_of_two_images_and_lambda_is_the_share_of_pixels(
    per_sample, count, height, width, seed
):
    images = torch.arange(count * 2 * height * width).reshape(count, 2, height, width).float()  # no two pixels alike
    generator = torch.Generator().manual_seed(seed)
    mixed = bf.mix.CutMix(count, per_sample=per_sample, generator=generator)(images, torch.arange(count))
    masks = mixed.mask.expand(count, 1, height, width)
    for i, j in enumerate(mixed.partner.tolist()):
        from_a, from_b = mixed.images[i] == images[i], mixed.images[i] == images[j]
        assert (from_a | from_b).all()
        assert torch.equal(from_b, masks[i].bool().expand_as(from_b) | (from_a & from_b))
        if i != j:
            torch.testing.assert_close(mixed.share[i], from_b.float().mean())


@settings(max_examples=300, deadline=None)
@given(
    share=st.floats(0, 1, width=32),
    centre=st.tuples(*[st.floats(0, 1, width=32, exclude_max=True)] * 2),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_the_box_is_that_of_the_paper_clipped_at_the_border(share, centre, size):
    height, width = size
    box = box_around(torch.tensor([centre]), torch.tensor([share]), height, width)
    top, bottom, left, right = box[0].tolist()
    assert 0 <= top <= bottom <= height
    assert 0 <= left <= right <= width
    side = np.sqrt(np.float64(share))
    row, column = int(np.float32(centre[0]) * height), int(np.float32(centre[1]) * width)
    tall, wide = int(side * height), int(side * width)
    assert [top, bottom] == [max(row - tall // 2, 0), min(row + (tall + 1) // 2, height)]
    assert [left, right] == [max(column - wide // 2, 0), min(column + (wide + 1) // 2, width)]
    mask = box_mask(box, height, width)
    assert mask.sum() == (bottom - top) * (right - left)
    assert mask[0, 0, top:bottom, left:right].all()
    torch.testing.assert_close(mask.mean((1, 2, 3)), box_share(box, height, width))


def test_flipped_pairs_give_what_timm_gives():
    images, ids = torch.randn(6, 3, 16, 24), torch.arange(6)
    theirs = timm.data.Mixup(mixup_alpha=0, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=6)
    for seed in range(5):
        np.random.seed(seed)
        expected, targets = theirs(images.clone(), ids)
        np.random.seed(seed)
        np.random.rand()  # whether to mix at all
        share = 1 - np.random.beta(1.0, 1.0)
        row, column = np.random.randint(0, 16), np.random.randint(0, 24)
        mix = bf.mix.CutMix(6, label_smoothing=0.1, partner="flip")
        centre = torch.tensor([[(row + 0.5) / 16, (column + 0.5) / 24]])
        draw = Draw(mix.draw(images).partner, torch.tensor([share], dtype=torch.float32), centre)
        mixed = mix.apply(images, soft_labels(ids, 6, 0.1), draw)
        assert torch.equal(mixed.images, expected)
        torch.testing.assert_close(mixed.targets(), targets)


def test_what_follows_the_draw_is_one_graph():
    images, ids = torch.randn(4, 3, 8, 8), torch.arange(4)
    mix = bf.mix.CutMix(4, per_sample=True)
    labels, draw = soft_labels(ids, 4), mix.draw(images)

    def rest(images: torch.Tensor, labels: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = mix.apply(images, labels, draw)
        return mixed.images, mixed.targets()

    compiled = torch.compile(rest, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(images, labels, draw), rest(images, labels, draw), strict=True):
        assert torch.equal(ours, theirs)
