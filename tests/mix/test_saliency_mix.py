"""SaliencyMix: where the box lies, what it does to images and labels."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchformer.errors import UserError
from batchformer.mix.saliency_mix import SaliencyMix, fine_grained_saliency, most_salient


def spotted(places: list[tuple[int, int]], height: int = 30, width: int = 44) -> torch.Tensor:
    """A grey image for each place, with one faint spot there."""
    images = torch.full((len(places), 3, height, width), 100 / 255)
    for image, (row, column) in zip(images, places, strict=True):
        image[:, row - 1 : row + 2, column - 1 : column + 2] = 115 / 255
    return images


AS_THEY_ARE = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def centre(mask: torch.Tensor) -> tuple[int, int]:
    rows, columns = mask[0].nonzero(as_tuple=True)
    return int(rows.min() + rows.max() + 1) // 2, int(columns.min() + columns.max() + 1) // 2


def small_boxes(mix: SaliencyMix, images: torch.Tensor):
    """Mixed by boxes of a twentieth of the image, which no border clips."""
    draw = mix.draw(images)
    draw = type(draw)(draw.partner, torch.full_like(draw.share, 0.05), draw.centre)
    return mix.apply(images, torch.eye(len(images)), draw)


def test_each_box_is_centred_at_the_peak_of_its_own_partner():
    places = [(8, 9), (20, 30), (10, 34), (21, 12), (15, 22)]
    mixed = small_boxes(SaliencyMix(5, generator=generator(), **AS_THEY_ARE), spotted(places))
    for row in range(5):
        assert centre(mixed.mask[row]) == places[mixed.partner[row]]


def test_one_box_for_all_is_that_of_the_first_partner():
    places = [(8, 9), (20, 30), (10, 34), (21, 12)]
    mixed = small_boxes(SaliencyMix(4, box="first", generator=generator(), **AS_THEY_ARE), spotted(places))
    assert mixed.mask.shape[0] == 1
    assert centre(mixed.mask[0]) == places[mixed.partner[0]]


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 5),
    height=st.integers(4, 24),
    width=st.integers(4, 24),
    seed=st.integers(0, 10_000),
    box=st.sampled_from(["own", "first"]),
    per_sample=st.booleans(),
    prob=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_pixels_labels_and_shares_belong_together(batch, height, width, seed, box, per_sample, prob):
    images = torch.rand(batch, 3, height, width, generator=generator(seed))
    mix = SaliencyMix(7, box=box, per_sample=per_sample, prob=prob, label_smoothing=0.1, generator=generator(seed))
    mixed = mix(images, torch.randint(7, (batch,), generator=generator(seed)))
    other = mixed.mask.bool().expand_as(images)
    assert mixed.images[other].equal(images[mixed.partner][other])
    assert mixed.images[~other].equal(images[~other])
    share = mixed.mask.mean((1, 2, 3)).expand(batch)
    torch.testing.assert_close(mixed.share, share)
    torch.testing.assert_close(mixed.targets(), torch.lerp(mixed.labels, mixed.labels[mixed.partner], share[:, None]))
    torch.testing.assert_close(mixed.targets().sum(1), torch.ones(batch))
    if prob == 0:
        assert mixed.images.equal(images)


def test_the_same_seed_gives_the_same_batch():
    images, ids = torch.rand(6, 3, 20, 24), torch.arange(6)
    one, two = (SaliencyMix(6, per_sample=True, generator=generator(3))(images, ids) for _ in range(2))
    assert one.images.equal(two.images)
    assert one.targets().equal(two.targets())
    assert not SaliencyMix(6, per_sample=True, generator=generator(4))(images, ids).images.equal(one.images)


def test_normalised_images_get_the_box_of_the_picture():
    pictures = torch.rand(4, 3, 40, 40, generator=generator()) * torch.tensor([0.3, 1.0, 0.5])[:, None, None]
    mean, std = (0.1, 0.5, 0.2), (0.05, 0.9, 0.3)
    normalised = (pictures - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    mixed = small_boxes(SaliencyMix(4, mean=mean, std=std, generator=generator()), normalised)
    peaks = most_salient(fine_grained_saliency(pictures))[mixed.partner]
    masks = small_boxes(SaliencyMix(4, generator=generator(), **AS_THEY_ARE), pictures).mask
    assert mixed.mask.equal(masks)
    assert all(mixed.mask[row, 0, y, x] == 1 for row, (y, x) in enumerate(peaks.tolist()))


def test_one_mean_and_std_for_all_channels():
    images, ids = torch.rand(4, 3, 16, 16, generator=generator()), torch.arange(4)
    one, three = (
        SaliencyMix(4, generator=generator(), mean=mean, std=std)((images - 0.5) / 0.2, ids)
        for mean, std in ((0.5, 0.2), ([0.5] * 3, [0.2] * 3))
    )
    assert one.images.equal(three.images)


def test_copies_and_pickles():
    mix = SaliencyMix(3, box="first", mean=(0.5,), std=(0.2,))
    for twin in (copy.deepcopy(mix), pickle.loads(pickle.dumps(mix))):
        assert (twin.box, twin.mean, twin.std) == ("first", (0.5,), (0.2,))


def test_bad_input_is_refused_with_a_way_out():
    with pytest.raises(UserError, match="box='other'"):
        SaliencyMix(3, box="other")
    with pytest.raises(UserError, match="belong together"):
        SaliencyMix(3, mean=(0.5,))
    for mean, std, said in (("grey", 1, "mean='grey'"), (0.5, 0, "std=0"), (0.5, (1, 1, None), "std=.1, 1, None.")):
        with pytest.raises(UserError, match=f"SaliencyMix: {said} must be a number for each channel or one for all"):
            SaliencyMix(3, mean=mean, std=std)
    with pytest.raises(UserError, match="drop_last"):
        SaliencyMix(3)(torch.rand(1, 3, 8, 8), torch.zeros(1, dtype=torch.long))
    with pytest.raises(UserError, match="5 channels"):
        SaliencyMix(3)(torch.rand(2, 5, 8, 8), torch.zeros(2, dtype=torch.long))


@pytest.mark.gpu
@pytest.mark.parametrize("box", ["own", "first"])
def test_on_the_gpu_nothing_waits_and_the_batch_is_that_of_the_cpu(box):
    images, ids = torch.rand(5, 3, 48, 40), torch.arange(5)
    options = {"box": box, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    here = SaliencyMix(5, generator=generator(1), **options)(images, ids)
    there_images, there_ids = images.cuda(), ids.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = SaliencyMix(5, generator=generator(1), **options)(there_images, there_ids)
        targets = there.targets()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.images.cpu().equal(here.images)
    torch.testing.assert_close(targets.cpu(), here.targets())
