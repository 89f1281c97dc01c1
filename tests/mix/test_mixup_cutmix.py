"""Mixup and CutMix against a slow loop and against timm's on the same numbers; the random choice between methods."""

from __future__ import annotations

import numpy as np
import pytest
import timm.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

import batchformer as bf
from batchformer.errors import UserError
from batchformer.mix.base import Draw, soft_labels
from batchformer.mix.mixup_cutmix import box_around, box_mask, box_share


@pytest.mark.parametrize("per_sample", [False, True])
def test_every_image_is_blended_with_its_partner(per_sample):
    images, ids = torch.randn(5, 3, 6, 9), torch.arange(5)
    mixed = bf.mix.Mixup(5, per_sample=per_sample)(images, ids)
    assert mixed.mask is None
    assert len(set(mixed.share.tolist())) == (5 if per_sample else 1)
    for i, j in enumerate(mixed.partner.tolist()):
        s = mixed.share[i]
        torch.testing.assert_close(mixed.images[i], (1 - s) * images[i] + s * images[j])


def test_flipped_pairs_are_blended_as_timm_does():
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


@pytest.mark.skipif(Version(timm.__version__) < Version("1.0.29"), reason="older ones cut boxes of odd size too small")
def test_flipped_pairs_are_cut_as_timm_does():
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


@pytest.mark.traced
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


def test_each_method_gets_its_share_of_the_batches_and_keeps_its_own_targets():
    images, ids = torch.randn(4, 3, 8, 8), torch.arange(4)
    generator = torch.Generator().manual_seed(0)
    methods = [method(4, partner="flip") for method in (bf.mix.Mixup, bf.mix.CutMix)]
    mix = bf.mix.MixSwitch(methods, [0.2, 0.8], generator=generator)
    made = [mix(images, ids) for _ in range(400)]
    blended = [mixed for mixed in made if mixed.mask is None]
    assert 50 < len(blended) < 110
    for mixed in made:
        share = mixed.share[0] if mixed.mask is None else mixed.mask.mean()
        torch.testing.assert_close(mixed.targets()[0], torch.stack([1 - share, share * 0, share * 0, share]))


def test_methods_without_a_generator_draw_from_that_of_the_switch():
    own = torch.Generator().manual_seed(1)
    shared = torch.Generator()
    mix = bf.mix.MixSwitch([bf.mix.Mixup(4), bf.mix.CutMix(4, generator=own)], generator=shared)
    assert mix.mixes[0].generator is shared
    assert mix.mixes[1].generator is own


def test_so_do_those_of_a_switch_inside_a_switch():
    own, shared = torch.Generator(), torch.Generator()
    inner = bf.mix.MixSwitch([bf.mix.Mixup(4), bf.mix.MixSwitch([bf.mix.CutMix(4)])])
    seeded = bf.mix.MixSwitch([bf.mix.Mixup(4)], generator=own)
    bf.mix.MixSwitch([inner, seeded], generator=shared)
    assert inner.mixes[0].generator is inner.mixes[1].mixes[0].generator is shared
    assert seeded.mixes[0].generator is own


def test_a_method_with_weight_zero_is_never_taken():
    only, never = bf.mix.Mixup(4), bf.mix.CutMix(4)
    mix = bf.mix.MixSwitch([only, never], [1, 0])
    assert all(mix.draw_method() is only for _ in range(100))


@pytest.mark.parametrize(
    ("mixes", "weights", "message"),
    [
        ([], None, "at least one"),
        ([bf.mix.Mixup(4), bf.mix.CutMix(5)], None, "differ in num_classes"),
        ([bf.mix.Mixup(4)], [0.5, 0.5], "one number for each"),
        ([bf.mix.Mixup(4)], [0.0], "not all 0"),
        ([bf.mix.Mixup(4), bf.mix.CutMix(4)], [float("nan"), 1], "weights=.*finite"),
        ([bf.mix.Mixup(4), bf.mix.CutMix(4)], [float("inf"), 1], "weights=.*finite"),
        ([bf.mix.Mixup(4), bf.mix.CutMix(4)], 0.5, "weights=0.5 must be one number for each of the 2"),
        ([bf.mix.Mixup(4)], ["often"], "weights=.'often'. must be"),
        (bf.mix.Mixup(4), bf.mix.CutMix(4), "takes a list of methods"),
        ([bf.mix.Mixup], None, "one of those given is the class Mixup"),
        (["mixup", "cutmix"], None, "one of those given is of the type str"),
    ],
)
def test_a_switch_that_cannot_work_is_refused(mixes, weights, message):
    with pytest.raises(UserError, match=message):
        bf.mix.MixSwitch(mixes, weights)


def test_closing_the_switch_closes_its_methods():
    class Closed(bf.mix.Mixup):
        closed = False

        def close(self) -> None:
            self.closed = True

    member = Closed(4)
    with bf.mix.MixSwitch([bf.mix.CutMix(4), member]):
        assert not member.closed
    assert member.closed


def test_a_switch_draws_as_the_method_it_chose_and_applies_that() -> None:
    images, labels = torch.rand(6, 3, 8, 8), torch.eye(6)
    switch = bf.mix.MixSwitch([bf.mix.Mixup(6), bf.mix.CutMix(6, alpha=1000.0, partner="flip", prob=0.0)], [0, 1])
    drawn = switch.draw(images)
    assert drawn.partner.tolist() == [5, 4, 3, 2, 1, 0]
    assert drawn.share.item() == 0
    mixed = switch.apply(images, labels, drawn)
    assert mixed.mask is not None
    assert mixed.images.equal(images)
    with pytest.raises(UserError, match="its own draw"):
        switch.apply(images, labels, bf.mix.Mixup(6).draw(images))
