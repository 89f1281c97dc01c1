"""Every option reaches what it decides, and every pixel and cell is where it belongs."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from batchformer.mix import (
    AttentiveCutMix,
    CutMix,
    MixSwitch,
    Mixup,
    PuzzleMix,
    SaliencyMix,
    TransMix,
    feature_map,
    fine_grained_saliency,
)
from batchformer.mix.base import soft_labels
from batchformer.mix.graph_cut import cut_grid, least_energy
from batchformer.mix.normalisation import unit_range
from batchformer.mix.puzzle_energy import cell_saliency, puzzle_energy, transport_plan
from batchformer.mix.saliency_mix import most_salient


class Means(nn.Module):
    def forward(self, images):
        return nn.functional.adaptive_avg_pool2d(images, (4, 4))


class Logits(nn.Module):
    def forward(self, images):
        return images.square().mean((2, 3))


def transformer():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, num_heads=3, depth=1, num_classes=3)


MAKE = {
    "mixup": lambda **options: Mixup(3, **options),
    "cutmix": lambda **options: CutMix(3, **options),
    "attentive": lambda **options: AttentiveCutMix(Means(), 3, size=None, **options),
    "saliency": lambda **options: SaliencyMix(3, **options),
    "puzzle": lambda **options: PuzzleMix(Logits(), 3, **options),
    "transmix": lambda **options: TransMix(transformer(), 3, **options),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_hands_its_options_on(make):
    images, ids = torch.rand(6, 3, 32, 32), torch.arange(6) % 3
    generator = torch.Generator().manual_seed(0)
    mix = make(alpha=0.3, prob=0.4, label_smoothing=0.3, per_sample=True, partner="flip", generator=generator)
    drawn = mix.draw(images)
    plain = Mixup(3, alpha=0.3, prob=0.4, per_sample=True, partner="flip", generator=torch.Generator().manual_seed(0))
    expected = plain.draw(images)
    assert drawn.partner.equal(expected.partner)
    assert drawn.share.equal(expected.share)
    assert drawn.centre.equal(expected.centre)
    mixed = mix(images, ids)
    assert mixed.labels.equal(soft_labels(ids, 3, 0.3))


def test_where_the_box_lies_does_not_tell_whether_there_is_one():
    mix = CutMix(2, prob=0.2, per_sample=True, generator=torch.Generator().manual_seed(0))
    drawn = mix.draw(torch.rand(4000, 1, 2, 2))
    taken = drawn.centre[drawn.share > 0]
    assert len(taken) > 600
    assert (taken.amin(0) < 0.05).all()
    assert (taken.amax(0) > 0.95).all()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_what_lies_beyond_the_picture_is_clamped_and_a_stretched_picture_keeps_its_colours():
    images = torch.randn(2, 3, 5, 5, generator=generator()) * 3
    seen = unit_range(images, 0.5, 0.5)
    assert seen.min() == 0
    assert seen.max() == 1
    colours = torch.tensor([0.2, 0.5, 0.9])[None, :, None, None].expand(1, 3, 4, 4)
    torch.testing.assert_close(unit_range(colours)[0, :, 0, 0], torch.tensor([0, 3 / 7, 1.0]))


def test_a_pixel_belongs_to_the_cell_that_its_corner_lies_in():
    images, ids = torch.rand(2, 3, 10, 11, generator=generator()), torch.arange(2)

    class Map(nn.Module):
        def forward(self, images):
            heat = torch.zeros(len(images), 1, 4, 3)
            heat[:, :, 1, 1] = 1
            return heat

    mixed = AttentiveCutMix(Map(), 2, k=1, size=None, partner="flip")(images, ids)
    expected = [[float(i * 4 // 10 == 1 and j * 3 // 11 == 1) for j in range(11)] for i in range(10)]
    assert mixed.mask[0, 0].equal(torch.tensor(expected))


def test_the_centre_is_the_most_salient_pixel_wherever_it_lies():
    side = 61
    images = torch.zeros(side, 3, side, side)
    for place in range(side):
        images[place, :, place, place] = 1
    mix = SaliencyMix(side, partner="flip", mean=0.0, std=1.0)
    drawn = mix.draw(images)
    one_pixel = type(drawn)(drawn.partner, torch.full((1,), (1.5 / side) ** 2), drawn.centre)
    mixed = mix.apply(images, torch.eye(side), one_pixel)
    peaks = most_salient(fine_grained_saliency(images)).flip(0).tolist()
    assert mixed.mask.flatten(1).argmax(1).tolist() == [row * side + column for row, column in peaks]


class Squares(nn.Module):
    def forward(self, images):
        return torch.stack([images.square().sum((1, 2, 3)), images.new_zeros(len(images))], dim=1) / 100


OPTIONS = [
    {"beta": 0.0},
    {"gamma": 3.0},
    {"eta": 3.0},
    {"neighbourhood": 1, "gamma": 3.0},
    {"labels": 2},
    {"mean": 0.4, "std": 0.05, "gamma": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_every_option_of_the_energy_decides_over_the_mask(options):
    cells = torch.rand(16, 3, 16, 16, generator=generator()) ** 2  # finer than the mask, so that seams differ
    images, ids = cells.repeat_interleave(2, 2).repeat_interleave(2, 3), torch.zeros(16, dtype=torch.long)
    options = {"transport": False, "per_sample": True, "blocks": 4, **options}
    mix, twin = (PuzzleMix(Squares(), 2, generator=generator(), **options) for _ in range(2))
    drawn = twin.draw(images)
    mixed = mix(images, ids)
    saliency = mix.saliency(images, torch.eye(2)[ids])
    terms = ("beta", "gamma", "eta", "neighbourhood", "labels")
    energy = {name: value for name, value in options.items() if name in terms}

    def mask(mean=None, std=None, **energy):
        pictures = unit_range(images, mean, std)
        labels = least_energy(puzzle_energy(saliency, pictures, drawn.partner, drawn.share, blocks=4, **energy))
        return labels.float() / (energy.get("labels", 3) - 1)

    name = list(options)[3]
    expected = mask(options.get("mean"), options.get("std"), **energy)
    without = mask(**{key: value for key, value in energy.items() if key != name})
    assert mixed.mask[:, 0, ::8, ::8].equal(expected)
    assert not expected.equal(without)  # the option matters here


def test_the_number_of_blocks_comes_from_the_generator():
    images = torch.rand(2, 3, 16, 16)
    mix, twin = (PuzzleMix(Squares(), 2, generator=generator(7)) for _ in range(2))
    assert [mix.draw(images).blocks for _ in range(12)] == [twin.draw(images).blocks for _ in range(12)]


def test_small_gradients_in_half_precision_are_salient():
    class Faint(nn.Module):
        def forward(self, images):
            return images.mean((2, 3)) * 0.002

    images = torch.rand(2, 3, 4, 4, generator=generator()).half()
    assert PuzzleMix(Faint(), 3).saliency(images, torch.eye(3)[:2]).gt(0).all()


def test_blocks_to_move_must_divide_both_sides_of_a_cell():
    mix = PuzzleMix(Squares(), 2, transport_size=4)
    assert mix._transport_grid(32, 24, 4) == (4, 4)
    assert mix._transport_grid(24, 32, 4) == (4, 4)
    assert mix._transport_grid(32, 48, 4) == (8, 12)


def test_a_cell_that_shows_both_images_counts_as_shown_for_both():
    images = torch.zeros(2, 3, 4, 4)
    images[:, :, 2:, 2:] = 1
    mix = PuzzleMix(Squares(), 2, blocks=2, transport_eps=0.01, partner="flip")
    drawn, saliency = mix.draw(images), images[:, 0]
    own, _ = mix._moved(images, images, torch.tensor([[[0.5, 1], [1, 1]]] * 2), saliency, drawn)
    _, other = mix._moved(images, images, torch.tensor([[[0.5, 0], [0, 0]]] * 2), saliency, drawn)
    assert own[:, :, :2, :2].eq(1).all()
    assert other[:, :, :2, :2].eq(1).all()


def test_a_switch_applies_what_it_chooses(monkeypatch):
    images = torch.rand(4, 3, 8, 8)
    switch = MixSwitch([Mixup(4), CutMix(4)], [0, 1])
    assert switch.apply(images, torch.eye(4), switch.draw(images)).mask is not None
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.ones((), dtype=torch.float64))
    never = MixSwitch([Mixup(4), CutMix(4), SaliencyMix(4)], [1, 1, 0])
    assert isinstance(never.draw_method(), CutMix)  # what rounding leaves over goes to none of weight 0


def test_a_way_may_be_as_long_as_the_grid_has_cells():
    side = 7  # rows joined at alternate ends: one winding way through all cells
    right = torch.full((1, side, side - 1), 100, dtype=torch.int32)
    down = torch.zeros(1, side - 1, side, dtype=torch.int32)
    down[0, 0::2, -1] = down[0, 1::2, 0] = 100
    gain = torch.zeros(1, side, side, dtype=torch.int32)
    gain[0, 0, 0], gain[0, -1, -1] = 10, -20
    assert not cut_grid(gain, right, down).any()


def test_a_large_gamma_is_no_trouble():
    images = torch.rand(8, 3, 16, 16, generator=generator())
    mixed = PuzzleMix(Squares(), 2, blocks=4, gamma=200.0, generator=generator())(images, torch.zeros(8).long())
    assert mixed.images.isfinite().all()


def test_pixels_whose_gradient_is_no_number_do_not_count():
    saliency = torch.ones(1, 4, 4)
    saliency[0, 0, 0], saliency[0, 3, 3] = torch.nan, torch.inf
    assert cell_saliency(saliency, 2, 2)[0].tolist() == [[0, 0.5], [0.5, 0]]


@pytest.mark.parametrize("channels", [1, 3])
def test_floats_between_two_levels_count_as_the_nearest(channels):
    images = torch.rand(4, channels, 20, 20, generator=generator())
    assert fine_grained_saliency(images).equal(fine_grained_saliency((images * 255).round().byte()))


def test_a_transposed_grid_is_transported_alike():
    saliency = torch.rand(16, 2, 6, generator=generator()).div(6)
    shown = torch.rand(16, 2, 6, generator=generator(1)) < 0.5
    wide = transport_plan(saliency, shown).view(16, 2, 6)
    high = transport_plan(saliency.mT.contiguous(), shown.mT.contiguous()).view(16, 6, 2)
    back = (high % 2 * 6 + high // 2).mT  # cell r * 2 + c of the high grid is cell c * 6 + r of the wide one
    assert (back == wide)[shown].float().mean() > 0.95  # of equal prices the first cell, which is another one


def test_a_timm_model_with_channels_last_gives_them_first():
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=64,
        window_size=2,
        embed_dim=8,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 1, 1),
    )
    assert feature_map(model)(torch.rand(2, 3, 64, 64)).shape == (2, 64, 2, 2)
