"""Targets and rows of the two streams."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict, namedtuple
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.loss import JsdCrossEntropy

import batchformer as bf
from batchformer.errors import UserError
from batchformer.nn.streams import plain_rows, tensors_with_rows

LOGITS = torch.randn(6, 4)


def test_class_ids_soft_labels_and_lists_are_repeated() -> None:
    assert bf.repeat_targets(torch.tensor([1, 2, 3]), LOGITS).tolist() == [1, 2, 3, 1, 2, 3]
    soft = torch.rand(3, 4)
    assert torch.equal(bf.repeat_targets(soft, LOGITS), torch.cat([soft, soft]))
    assert bf.repeat_targets(["a", "b", "c"], LOGITS) == ["a", "b", "c", "a", "b", "c"]


def test_dicts_are_repeated_inside_and_what_has_no_rows_stays() -> None:
    targets = {"ids": torch.tensor([1, 2, 3]), "boxes": [1, 2, 3], "weight": torch.tensor(0.5), "name": "x"}
    repeated = bf.repeat_targets(targets, {"logits": LOGITS})
    assert repeated["ids"].tolist() == [1, 2, 3, 1, 2, 3]
    assert repeated["boxes"] == [1, 2, 3, 1, 2, 3]
    assert repeated["weight"] == 0.5
    assert repeated["name"] == "x"


def test_the_kind_of_a_dict_is_kept() -> None:
    targets = defaultdict(list, ids=torch.arange(3))
    repeated = bf.repeat_targets(targets, LOGITS)
    assert isinstance(repeated, defaultdict)
    assert repeated["ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(targets["ids"]) == 3


@pytest.mark.parametrize("targets", [np.array([1, 2, 3]), "abc", {"ids": np.array([1, 2, 3])}, 3, torch.tensor(3)])
def test_what_cannot_be_repeated_is_refused(targets: object) -> None:
    with pytest.raises(UserError, match="cannot be repeated"):
        bf.repeat_targets(targets, LOGITS)


def test_targets_for_every_row_come_back_untouched() -> None:
    for targets in (torch.arange(6), list(range(6)), {"ids": torch.arange(6)}, (torch.arange(6), torch.rand(6, 2))):
        assert bf.repeat_targets(targets, (LOGITS, None)) is targets


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7, 12])
def test_a_count_that_is_neither_rows_nor_half_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"{count} targets for 6 output rows"):
        bf.repeat_targets(torch.zeros(count, dtype=torch.long), LOGITS)


def test_plain_rows_of_nested_outputs() -> None:
    Pair = namedtuple("Pair", "main extra")
    rows = plain_rows({"a": LOGITS, "b": Pair(LOGITS, [LOGITS]), "loss": torch.tensor(1.0)})
    assert torch.equal(rows["a"], LOGITS[:3])
    assert isinstance(rows["b"], Pair)
    assert torch.equal(rows["b"].extra[0], LOGITS[:3])
    assert rows["loss"] == 1.0


def test_tensors_of_nested_outputs_are_found_in_their_order() -> None:
    a, b, c = torch.rand(6, 4), torch.rand(6), torch.rand(6, 2, 2)
    found = tensors_with_rows({"a": a, "loss": torch.tensor(1.0), "more": [(b, None), {"c": c, "name": "x"}]})
    assert [id(each) for each in found] == [id(a), id(b), id(c)]
    assert tensors_with_rows(a)[0] is a
    assert tensors_with_rows(torch.tensor(1.0)) == tensors_with_rows(None) == tensors_with_rows("abc") == []


def test_the_mean_loss_is_algorithm_1_and_the_released_one_three_times_it() -> None:
    targets = torch.tensor([0, 1, 2])
    mean = bf.TwoStreamLoss(F.cross_entropy)(LOGITS, targets)
    torch.testing.assert_close(mean, F.cross_entropy(LOGITS, torch.cat([targets, targets])))
    plain, related = F.cross_entropy(LOGITS[:3], targets), F.cross_entropy(LOGITS[3:], targets)
    released = bf.TwoStreamLoss(F.cross_entropy, scale="released")(LOGITS, targets)
    torch.testing.assert_close(released, plain + related + F.cross_entropy(LOGITS, torch.cat([targets, targets])))


@pytest.mark.parametrize("scale", ["mean", "released"])
def test_with_one_stream_the_loss_is_the_criterion(scale: str) -> None:
    targets = torch.arange(6) % 4
    loss = bf.TwoStreamLoss(F.cross_entropy, scale=scale)
    assert torch.equal(loss(LOGITS, targets), F.cross_entropy(LOGITS, targets))


def test_a_loss_that_cuts_the_rows_into_splits_is_refused() -> None:
    with pytest.raises(UserError, match=r"JsdCrossEntropy.*attachment\.related\(logits\)"):
        bf.TwoStreamLoss(JsdCrossEntropy())


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_the_attributes_of_the_criterion_are_read_and_set_through_the_loss(copied: Callable) -> None:
    class Scaled(torch.nn.CrossEntropyLoss):
        scale = 30.0  # as margin losses have one

    for criterion in (torch.nn.CrossEntropyLoss(label_smoothing=0.1), Scaled):
        made = bf.TwoStreamLoss(criterion if isinstance(criterion, torch.nn.Module) else criterion())
        assert (made.scale, made.reduction) == ("mean", "mean")
    loss = copied(bf.TwoStreamLoss(torch.nn.CrossEntropyLoss(label_smoothing=0.1)))
    assert (type(loss), loss.label_smoothing) == (bf.TwoStreamLoss, 0.1)
    loss.reduction = "sum"
    loss.note = "own"
    assert (loss.criterion.reduction, hasattr(loss.criterion, "note")) == ("sum", False)
    assert not hasattr(loss, "activation")
    with pytest.raises(AttributeError, match="TwoStreamLoss"):
        bf.TwoStreamLoss(F.cross_entropy).decodes  # noqa: B018


def test_fastais_mixup_gets_a_loss_for_every_image() -> None:
    """What `MixUp.lf` of fastai does with `learn.loss_func`, whose `reduction` it sets meanwhile (`NoneReduce`)."""
    loss, one, two, share = bf.TwoStreamLoss(torch.nn.CrossEntropyLoss()), *torch.tensor([[0, 1, 2], [2, 1, 1]]), 0.3
    before, loss.reduction = loss.reduction, "none"
    mixed = torch.lerp(loss(LOGITS, two), loss(LOGITS, one), torch.full((3,), share))
    loss.reduction = before
    torch.testing.assert_close(mixed.mean(), share * loss(LOGITS, one) + (1 - share) * loss(LOGITS, two))


@pytest.mark.parametrize("criterion", [torch.nn.CrossEntropyLoss, "cross_entropy", None])
def test_a_criterion_that_cannot_be_called_is_refused_with_one_that_can(criterion: object) -> None:
    with pytest.raises(UserError, match=r"TwoStreamLoss\(nn\.CrossEntropyLoss\(\)\)"):
        bf.TwoStreamLoss(criterion)  # type: ignore[arg-type]
