"""Top-1, top-5, All, Many, Medium and Few, counted by hand."""

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from batchformer.errors import UserError
from batchformer.metrics import ShotAccuracy, TopAccuracy, shot_of


def logits_for(predictions: list[int], classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(predictions), classes).float()


@pytest.mark.parametrize(
    ("images", "shot"), [(101, "many"), (100, "medium"), (20, "medium"), (19, "few"), (1, "few"), (5000, "many")]
)
def test_borders_between_splits(images, shot):
    assert shot_of(images) == shot


@pytest.mark.parametrize(("imbalance", "sizes"), [(100, (35, 35, 30)), (200, (30, 31, 39))])
def test_cifar100_splits_have_the_published_sizes(imbalance, sizes):
    counts = [int(500 * imbalance ** (-c / 99)) for c in range(100)]
    shots = ShotAccuracy(counts).shots
    assert tuple(shots.count(shot) for shot in ("many", "medium", "few")) == sizes


def test_all_counts_images_and_the_splits_average_classes():
    metric = ShotAccuracy([300, 200, 50, 5])
    # class 0: 3 of 4 right, class 1: 0 of 1, class 2: 1 of 2, class 3: 1 of 1
    truth = [0, 0, 0, 0, 1, 2, 2, 3]
    said = [0, 0, 0, 1, 0, 2, 3, 3]
    for start in (0, 3):  # in two batches
        stop = 3 if start == 0 else 8
        metric.update(logits_for(said[start:stop], 4), torch.tensor(truth[start:stop]))
    values = metric.compute()
    assert values["per_class"].tolist() == [75.0, 0.0, 50.0, 100.0]
    assert values["accuracy"].item() == 100 * 5 / 8
    assert values["many"].item() == 37.5  # not 60, the share of images
    assert values["medium"].item() == 50.0
    assert values["few"].item() == 100.0


def test_a_class_without_test_images_is_nan_and_does_not_count():
    metric = ShotAccuracy([300, 200, 5])
    metric.update(logits_for([0, 2], 3), torch.tensor([0, 0]))
    values = metric.compute()
    assert math.isnan(values["per_class"][1])
    assert values["many"].item() == 50.0
    assert math.isnan(values["few"])
    assert math.isnan(values["medium"])


def test_reset_forgets():
    metric = ShotAccuracy([300, 5])
    metric.update(logits_for([0], 2), torch.tensor([1]))
    metric.reset()
    metric.update(logits_for([1], 2), torch.tensor([1]))
    assert metric.compute()["accuracy"].item() == 100.0


def test_needs_class_counts():
    with pytest.raises(UserError, match="class_counts"):
        ShotAccuracy([])


def _one_process(rank: int, world: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    metric = ShotAccuracy([300, 50, 5])
    truth, said = ([0, 1, 2], [0, 1, 0]) if rank == 0 else ([0], [1])
    metric.update(logits_for(said, 3), torch.tensor(truth))
    values = metric.compute()
    if rank == 1:
        torch.save(dict(values), out)
    dist.destroy_process_group()


def test_two_processes_with_uneven_shares_agree_with_one(tmp_path):
    out = os.fspath(tmp_path / "values.pt")
    # forked: a spawned process imports torch anew, which takes longer than all other tests of this room
    mp.start_processes(_one_process, (2, os.fspath(tmp_path / "store"), out), nprocs=2, start_method="fork")
    together = torch.load(out)
    assert together["accuracy"].item() == 50.0
    assert together["per_class"].tolist() == [50.0, 100.0, 0.0]
    assert together["many"].item() == 50.0


def test_top_one_and_top_five_count_images():
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 8), torch.randint(8, (40,))
    metric = TopAccuracy([500] * 8)
    for rows in (slice(0, 25), slice(25, 40)):
        metric.update(logits[rows], labels[rows])
    values = metric.compute()
    ranks = [sorted(range(8), key=lambda c, row=row: -row[c]).index(label) for row, label in zip(logits, labels)]  # noqa: B905
    assert values["top1"].item() == pytest.approx(100 * sum(r < 1 for r in ranks) / 40)
    assert values["top5"].item() == pytest.approx(100 * sum(r < 5 for r in ranks) / 40)
    assert set(values) == {*metric.names, "per_class"} == {"top1", "top5", "per_class"}
    metric.reset()
    metric.update(logits, labels)
    assert metric.compute()["top5"] == values["top5"]


def test_splits_come_with_unequal_classes():
    metric = TopAccuracy([500, 50, 5])
    metric.update(torch.eye(3), torch.tensor([0, 1, 0]))
    values = metric.compute()
    assert [values[name].item() for name in ("many", "medium")] == [50.0, 100.0]
    assert values["few"].isnan()
    assert values["top5"] == 100
