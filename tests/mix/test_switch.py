"""The switch between methods."""

from __future__ import annotations

import pytest
import torch

import batchformer as bf
from batchformer.errors import UserError


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
