"""Repeated augmentation: each image several times in a batch, each time another one; order, shares and resuming."""

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from batchformer.data import DeviceLoader, HostLoader
from batchformer.data.augment import batched_augmentation
from batchformer.data.augment.host import array_transform
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.loading.order import epoch_order, training_share
from batchformer.data.loading.samples import ArraySamples

N, SIZE, REPEATS = 50, 12, 3
MEAN = STD = (0.5, 0.5, 0.5)
IMAGES = torch.randint(0, 256, (N, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(N)


def device_loader(batch_size=12, repeats=REPEATS, **options):
    augmentation = batched_augmentation("randaugment", SIZE, 16, 0.5)
    return DeviceLoader(
        IMAGES,
        LABELS,
        batch_size=batch_size,
        mean=MEAN,
        std=STD,
        augmentation=augmentation,
        repeats=repeats,
        **options,
    )


def host_loader(batch_size=12, repeats=REPEATS, seed=0, **options):
    samples = ArraySamples(IMAGES, LABELS, array_transform("randaugment", SIZE, 16, MEAN, STD, 0.5), seed)
    return HostLoader(samples, batch_size=batch_size, seed=seed, repeats=repeats, **options)


BOTH = pytest.mark.parametrize("make", [device_loader, host_loader])


def test_the_order_repeats_each_image_in_succession_and_keeps_its_length():
    slots = epoch_order(N, seed=1, epoch=2, repeats=REPEATS)
    assert len(slots) == N
    assert len(np.unique(slots)) == N, "no augmentation of an image twice"
    index, repeat = slots % N, slots // N
    assert repeat.tolist() == [k % REPEATS for k in range(N)]
    distinct = index[::REPEATS]
    assert index.tolist() == np.repeat(distinct, REPEATS)[:N].tolist()
    assert len(np.unique(distinct)) == len(distinct) == -(-N // REPEATS)
    assert distinct.tolist() == epoch_order(N, 1, 2)[: len(distinct)].tolist()
    assert not np.array_equal(slots, epoch_order(N, 1, 3, REPEATS))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_share_the_order_as_timms_sampler_does(world, monkeypatch):
    """timm rounds the epoch down to a multiple of `selected_round`; turned off, only the permutation is another."""
    count = 96
    ours = [training_share(epoch_order(count, 0, 0, 3), r, world, drop_last=True) % count for r in range(world)]
    order = torch.from_numpy(epoch_order(count, 0, 0))
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    for rank in range(world):
        sampler = RepeatAugSampler(range(count), world, rank, num_repeats=3, selected_round=0)
        assert list(sampler) == ours[rank].tolist()


@BOTH
def test_an_image_is_augmented_anew_each_time(make):
    batches = list(make())
    assert sum(len(batch["labels"]) for batch in batches) == N // 12 * 12
    images, labels = images_and_labels(batches[0])
    assert labels.view(-1, REPEATS).unique(dim=1).shape == (4, 1)
    for first in range(0, 12, REPEATS):
        one, two, three = images[first : first + REPEATS]
        assert not torch.equal(one, two)
        assert not torch.equal(two, three)
        assert not torch.equal(one, three)


@BOTH
def test_the_first_time_is_the_image_without_repeats(make):
    """Row 0 of the random numbers is the one a run without repeated augmentation uses."""
    batches = list(make(repeats=1, drop_last=False))
    order = torch.cat([batch["labels"] for batch in batches]).tolist()
    plain = dict(zip(order, torch.cat([batch["images"] for batch in batches]), strict=True))
    images, labels = images_and_labels(next(iter(make())))
    for image, label in zip(images[::REPEATS], labels[::REPEATS], strict=True):
        assert torch.equal(image, plain[int(label)])


@BOTH
def test_processes_together_see_what_one_would(make):
    shares = [make(batch_size=6, rank=rank, world=2) for rank in range(2)]
    for single, even, odd in zip(make(batch_size=12), *shares, strict=True):
        for name in ("images", "labels"):
            assert torch.equal(single[name][0::2], even[name])
            assert torch.equal(single[name][1::2], odd[name])


@BOTH
def test_resumed_in_the_middle_of_an_epoch_it_goes_on(make):
    loader, fresh = make(), make()
    loader.set_epoch(4)
    iterator = iter(loader)
    next(iterator)
    fresh.load_state_dict(loader.state_dict())
    rest, resumed = list(iterator), list(fresh)
    assert len(rest) == len(resumed) == 3
    assert all(torch.equal(a[name], b[name]) for a, b in zip(rest, resumed, strict=True) for name in a)


def test_workers_change_nothing():
    for alone, helped in zip(host_loader(), host_loader(workers=2), strict=True):
        assert all(torch.equal(alone[name], helped[name]) for name in ("images", "labels"))


def test_timms_draws_leave_the_global_generators_alone():
    np.random.seed(3)
    expected = np.random.random(3)
    np.random.seed(3)
    list(host_loader())
    assert np.array_equal(np.random.random(3), expected)


@BOTH
def test_evaluation_reads_each_image_once(make):
    assert torch.equal(torch.cat([batch["labels"] for batch in make(training=False)]), LABELS)
