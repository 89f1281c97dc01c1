"""Top-1 and top-5 against counting by hand."""

import pytest
import torch

from batchformer.metrics import TopAccuracy


def test_top_one_and_top_five_count_images():
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 8), torch.randint(8, (40,))
    metric = TopAccuracy([500] * 8)
    for rows in (slice(0, 25), slice(25, 40)):
        metric.update(logits[rows], labels[rows])
    values = metric.compute()
    ranks = [sorted(range(8), key=lambda c, row=row: -row[c]).index(label) for row, label in zip(logits, labels)]  # noqa: B905
    assert values["top1"].item() == values["all"].item() == pytest.approx(100 * sum(r < 1 for r in ranks) / 40)
    assert values["top5"].item() == pytest.approx(100 * sum(r < 5 for r in ranks) / 40)
    assert set(values) == {*metric.names, "per_class"} == {"top1", "top5", "all", "per_class"}
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
