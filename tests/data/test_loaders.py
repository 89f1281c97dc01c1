"""Order, augmentation and position of both loaders: functions of (seed, epoch, index) and of nothing else."""

import numpy as np
import pytest
import torch

from batchformer.data import DeviceLoader, DigitsLT, HostLoader
from batchformer.data.augment import batched_augmentation
from batchformer.data.augment.host import array_transform
from batchformer.data.loading.epoch_loader import images_and_labels
from batchformer.data.loading.order import epoch_order, evaluation_share, training_share
from batchformer.data.loading.samples import ArraySamples
from batchformer.errors import UserError

N, SIZE = 53, 16
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
IMAGES = torch.randint(0, 256, (N, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(N)  # a label of its own for each sample: batches tell which samples they hold


def device_loader(augment="autoaugment-cutout", batch_size=8, **options):
    return DeviceLoader(
        IMAGES, LABELS, batch_size=batch_size, mean=MEAN, std=STD, augmentation=batched_augmentation(augment), **options
    )


def host_loader(augment="autoaugment-cutout", batch_size=8, seed=0, **options):
    samples = ArraySamples(IMAGES, LABELS, array_transform(augment, SIZE, SIZE, MEAN, STD), seed)
    return HostLoader(samples, batch_size=batch_size, seed=seed, **options)


def ahead_loader(**options):
    """As on CUDA: chunks are made before they are asked for; several to an epoch."""
    return device_loader(**{"chunk_bytes": 3 * 4 * 3 * SIZE * SIZE * 8, "ahead": True, **options})


BOTH = pytest.mark.parametrize("make", [device_loader, ahead_loader, host_loader])


def read(loader):
    """{sample: its image} of what is left of the epoch, and the order."""
    batches = list(loader)
    order = torch.cat([batch["labels"] for batch in batches]).tolist()
    return order, dict(zip(order, torch.cat([batch["images"] for batch in batches]), strict=True))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@BOTH
def test_the_same_seed_and_epoch_give_the_same_batches(make):
    one, two = make(seed=4), make(seed=4)
    one.set_epoch(3)
    two.set_epoch(3)
    (order, images), (order_two, images_two) = read(one), read(two)
    assert order == order_two
    assert same(images, images_two)
    two.set_epoch(4)
    order_next, images_next = read(two)
    assert order_next != order
    shared = images.keys() & images_next.keys()
    assert sum(torch.equal(images[k], images_next[k]) for k in shared) < len(shared) / 4


@BOTH
def test_augmentation_does_not_depend_on_batch_size_or_place(make):
    _, small = read(make(batch_size=4, drop_last=False))
    _, large = read(make(batch_size=N, drop_last=False))
    assert same(small, large)


def test_augmentation_does_not_depend_on_the_chunk():
    whole, pieces = read(device_loader()), read(device_loader(chunk_bytes=1))
    assert whole[0] == pieces[0]
    assert same(whole[1], pieces[1])


def test_chunks_made_ahead_are_the_same_and_made_once(monkeypatch):
    made = []
    chunk = DeviceLoader._make_chunk

    def counted(self, start):
        made.append(tuple(start))
        return chunk(self, start)

    monkeypatch.setattr(DeviceLoader, "_make_chunk", counted)
    loader = ahead_loader()
    batches = iter(loader)
    next(batches)
    assert made == [(0, 0)]
    next(batches)
    assert made == [(0, 0), (0, 3)], "when half of a chunk is handed out"
    list(batches)
    assert made == [(0, 0), (0, 3), (1, 0)], "of the next epoch, too"
    order, images = read(loader)
    assert made[3:] == [(1, 3), (2, 0)]
    plain = device_loader()
    plain.set_epoch(1)
    order_two, images_two = read(plain)
    assert order == order_two
    assert same(images, images_two)
    loader.set_epoch(7)  # not what was expected
    plain.set_epoch(7)
    assert read(loader)[0] == read(plain)[0]


@pytest.mark.parametrize("options", [{"training": False}, {"chunk_bytes": 1}], ids=["evaluation", "a batch at a time"])
def test_nothing_is_made_ahead_where_it_would_only_take_memory(options):
    loader = ahead_loader(**options)
    list(loader)
    assert loader._prepared is None


def test_augmentation_does_not_depend_on_workers():
    alone, helped = host_loader(), host_loader(workers=2)
    for epoch in range(2):  # persistent workers must learn of the new epoch
        alone.set_epoch(epoch)
        helped.set_epoch(epoch)
        (order, images), (order_two, images_two) = read(alone), read(helped)
        assert order == order_two
        assert same(images, images_two)


@BOTH
def test_an_epoch_without_being_told_follows_the_last(make):
    loader, told = make(), make()
    first, second = read(loader)[0], read(loader)[0]
    told.set_epoch(1)
    assert second == read(told)[0] != first


@BOTH
def test_start_skips_batches_once(make):
    loader = make()
    full, images = read(loader)
    loader.set_epoch(0)
    loader.set_start(2)
    assert len(loader) == N // 8
    order, later = read(loader)
    assert order == full[16:]
    assert same(later, {k: images[k] for k in order})
    loader.set_epoch(0)
    assert read(loader)[0] == full


@BOTH
def test_state_restores_the_middle_of_an_epoch(make):
    loader, fresh = make(), make()
    loader.set_epoch(5)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert loader.state_dict() == {"epoch": 5, "batch": 3}
    fresh.load_state_dict(loader.state_dict())
    rest = [batch["labels"].tolist() for batch in iterator]
    assert [batch["labels"].tolist() for batch in fresh] == rest
    assert fresh.state_dict() == {"epoch": 5, "batch": 6}
    assert read(fresh)[0] == read(loader)[0], "and the next epoch is whole"


@BOTH
def test_state_at_the_end_of_an_epoch_leads_to_the_next(make):
    loader, fresh = make(), make()
    read(loader)
    fresh.load_state_dict(loader.state_dict())
    assert read(fresh)[0] == read(loader)[0]


@BOTH
def test_last_partial_batch(make):
    assert [len(batch["labels"]) for batch in make()] == [8] * 6
    assert [len(batch["labels"]) for batch in make(drop_last=False)] == [8] * 6 + [5]


@BOTH
def test_evaluation_is_in_order_and_unchanged(make):
    loader = make(augment="none", training=False) if make is host_loader else make(training=False)
    batches = list(loader)
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), LABELS)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(torch.cat([batch["images"] for batch in batches]), (IMAGES / 255 - mean) / std)


@BOTH
def test_processes_together_see_what_one_would(make):
    single = [batch["labels"].tolist() for batch in make(batch_size=8)]
    shares = [[batch["labels"].tolist() for batch in make(batch_size=4, rank=r, world=2)] for r in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(batch) for batch in single]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares(world):
    order = epoch_order(N, 0, 0)
    cut = [training_share(order, r, world, drop_last=True) for r in range(world)]
    filled = [training_share(order, r, world, drop_last=False) for r in range(world)]
    judged = np.concatenate([evaluation_share(N, r, world) for r in range(world)])
    assert {len(share) for share in cut} == {N // world}
    assert len(np.unique(np.concatenate(cut))) == N // world * world
    assert {len(share) for share in filled} == {-(-N // world)}
    assert set(np.concatenate(filled)) == set(range(N))
    assert sorted(judged) == list(range(N))


@BOTH
def test_channels_last_changes_the_layout_only(make):
    images, strided = (next(iter(make(channels_last=flag)))["images"] for flag in (True, False))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, strided)


@BOTH
def test_a_set_smaller_than_a_batch_is_refused(make):
    with pytest.raises(UserError, match=r"53 images.*batch of 64.*drop_last"):
        make(batch_size=64)


@BOTH
def test_reading_leaves_the_global_generators_alone(make):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    read(make())
    assert torch.equal(torch.rand(3), expected)


def test_both_loaders_take_the_same_order():
    assert read(device_loader())[0] == read(host_loader())[0]


def test_digits_are_the_same_for_everybody():
    data, again = DigitsLT(), DigitsLT(seed=5)
    data.setup()
    again.setup()
    assert data.fingerprint == again.fingerprint
    assert data.class_counts == sorted(data.class_counts, reverse=True)
    assert data.class_counts[0] / data.class_counts[-1] == pytest.approx(20, rel=0.1)
    images, labels = images_and_labels(next(iter(data.val_dataloader())))
    assert len(labels) == data.test_images
    assert images.shape[1:] == (3, 8, 8)
    assert abs(images.mean()) < 0.05
    assert abs(images.std() - 1) < 0.05
    assert labels.unique().tolist() == list(range(10))


def test_training_and_test_digits_do_not_overlap():
    data = DigitsLT(imbalance=1)
    data.setup()
    train, test = ({image.tobytes() for image in data._splits[part].images} for part in ("train", "val"))
    assert len(train & test) <= 2  # two digits of 64 coarse pixels may be equal by chance
    assert data.train_images + data.test_images == 1797
