"""Sampling by class: shares, turns inside a class, a pure function of (seed, epoch), and orders that are learnt."""

from functools import partial

import numpy as np
import pytest
import torch

from batchformer.data import DigitsLT
from batchformer.data.loading.device_loader import DeviceLoader
from batchformer.data.loading.order import EpochShare, class_order

LABELS = np.repeat(np.arange(4), [60, 25, 12, 3])[np.random.default_rng(0).permutation(100)]
COUNTS = np.bincount(LABELS)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_classes_come_as_often_as_a_power_of_their_images(power):
    order = class_order(0, labels=LABELS, weights=COUNTS**power, seed=1, length=40_000)
    shares = np.bincount(LABELS[order % 100]) / 40_000
    assert shares == pytest.approx(COUNTS**power / (COUNTS**power).sum(), abs=0.01)


def test_images_of_a_class_come_in_turns_each_time_as_another_repeat():
    order = class_order(3, labels=LABELS, weights=np.ones(4), seed=1)
    assert len(order) == 100
    for label, count in enumerate(COUNTS):
        members, repeats = (part[LABELS[order % 100] == label] for part in (order % 100, order // 100))
        for place, (member, repeat) in enumerate(zip(members, repeats, strict=True)):
            assert repeat == place // count
            assert member == members[place % count]
        assert len(set(members[:count])) == min(count, len(members))


def test_the_order_is_a_function_of_seed_epoch_and_purpose():
    drawn = partial(class_order, labels=LABELS, weights=np.ones(4))
    assert np.array_equal(drawn(2, seed=5), drawn(2, seed=5))
    for other in (drawn(3, seed=5), drawn(2, seed=6), drawn(2, seed=5, purpose="meta")):
        assert not np.array_equal(drawn(2, seed=5), other)


def test_only_some_images_and_classes_without_any():
    among = np.flatnonzero(LABELS != 1)[:50]
    order = class_order(0, labels=LABELS, weights=np.ones(6), seed=0, among=among, length=500)
    assert set(order % 100) <= set(among)
    assert set(LABELS[order % 100]) == {0, 2, 3}


def test_two_processes_share_what_one_would_draw():
    sampler = partial(class_order, labels=LABELS, weights=np.ones(4), seed=0)
    whole, *parts = (EpochShare(100, 0, r, w, True, True, 1, sampler)(4) for r, w in ((0, 1), (0, 2), (1, 2)))
    assert np.array_equal(np.stack(parts, 1).reshape(-1), whole)


@pytest.mark.parametrize("learnt", [True, False])
def test_an_order_that_is_learnt_is_not_asked_for_ahead(learnt):
    asked = []

    def sampler(epoch):
        asked.append(epoch)
        return class_order(epoch, labels=LABELS, weights=np.ones(4), seed=0)

    sampler.learnt = learnt
    images = torch.zeros(100, 3, 8, 8, dtype=torch.uint8)
    loader = DeviceLoader(images, torch.from_numpy(LABELS), batch_size=10, sampler=sampler, ahead=True)
    asked.clear()
    list(loader)
    assert (1 in asked) != learnt


def test_a_further_loader_has_an_order_of_its_own_and_features_take_the_place_of_images():
    data = DigitsLT(batch_size=16)
    data.setup()
    order = partial(class_order, labels=data.train_labels, weights=np.ones(10), seed=0)
    batch = next(iter(data.loader_in_order("train", sampler=order, batch_size=200)))
    assert torch.equal(batch["labels"], torch.from_numpy(data.train_labels[order(0)[:200] % data.train_images]))
    assert len(next(iter(data.training_loader()))["labels"]) == 16
    features = torch.arange(data.train_images)[:, None].float()
    for given, plain in zip(data.feature_loader(features), data.training_loader(), strict=True):
        assert torch.equal(given["labels"], plain["labels"])
        assert torch.equal(torch.from_numpy(data.train_labels)[given["features"][:, 0].long()], plain["labels"])
