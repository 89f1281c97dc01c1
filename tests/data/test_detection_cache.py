"""What a data set for detectors keeps between epochs, and epochs of several passes: the batches stay what they were."""

import pytest
import torch

from batchformer.data import CocoDetection, CocoPanoptic
from batchformer.data.sets import write_miniature
from batchformer.data.sets.boxes import DetectionSamples
from batchformer.errors import UserError

SMALL = {"image_size": 32, "batch_size": 4, "eval_batch_size": 4, "limit_train": 9, "limit_val": 5, "pad_multiple": 8}
KINDS = {"coco": CocoDetection, "coco-panoptic": CocoPanoptic}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    return {name: str(write_miniature(name, tmp_path_factory.mktemp(name) / "data")) for name in KINDS}


@pytest.fixture(params=list(KINDS))
def make(request, roots):
    return lambda **options: KINDS[request.param](roots[request.param], **{**SMALL, "workers": 0, **options})


def tensors(value):
    """All numbers of a batch, arrays too, one after another."""
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in tensors(value[key])]
    if isinstance(value, list):
        return [each for item in value for each in tensors(item)]
    return [torch.as_tensor(value)]


def same(one, two):
    ours, theirs = tensors(one), tensors(two)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def epochs(loader, count=3):
    return [list(loader) for _ in range(count)]


@pytest.fixture
def opened(monkeypatch):
    """The images that have been decoded, by number, as often as they were."""
    seen, open_one = [], DetectionSamples._decode
    monkeypatch.setattr(DetectionSamples, "_decode", lambda self, index: (seen.append(index), open_one(self, index))[1])
    return seen


@pytest.mark.parametrize(("augment", "cache"), [("none", True), ("none", "device"), ("detr", True)])
def test_batches_are_the_same_and_files_are_read_once(make, opened, augment, cache):
    expected = epochs(make(augment=augment, drop_last=False).train_dataloader())
    opened.clear()
    assert same(epochs(make(augment=augment, drop_last=False, cache=cache).train_dataloader()), expected)
    assert sorted(opened) == list(range(9))


def test_evaluation_is_the_same_and_reads_once_for_all_its_loaders(make, opened):
    expected = epochs(make().val_dataloader(), 2)
    opened.clear()
    data = make(cache=True)
    assert same([list(data.val_dataloader()) for _ in range(2)], expected)
    assert sorted(opened) == list(range(5))


def test_workers_keep_their_own_and_give_the_same(roots):
    options = {**SMALL, "augment": "none"}
    expected = epochs(CocoDetection(roots["coco"], **options, workers=0).train_dataloader())
    loader = CocoDetection(roots["coco"], **options, workers=1, cache="device").train_dataloader()
    assert same(epochs(loader), expected)


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_what_a_step_does_to_a_batch_does_not_come_back(make, augment):
    expected = epochs(make(augment=augment).train_dataloader(), 2)[1]
    loader = make(augment=augment, cache=True).train_dataloader()
    for batch in loader:
        for each in tensors(batch):
            each.fill_(1)
        for label in batch["labels"]:
            label.clear()
    assert same(list(loader), expected)


def test_what_an_evaluation_does_to_a_batch_does_not_come_back(make):
    data = make(cache=True)
    expected = list(make().val_dataloader())
    for batch in data.val_dataloader():
        for each in tensors(batch):  # tensors made of arrays share their memory
            each.fill_(1)
        for label in batch["labels"]:
            for info in label["truth"].pop("segments_info", []):
                info.clear()
    assert same(list(data.val_dataloader()), expected)


@pytest.mark.parametrize("augment", ["none", "detr"])
def test_an_epoch_of_three_passes_is_three_epochs(make, augment):
    single = make(augment=augment).train_dataloader()
    three = make(augment=augment, repeat=3, cache=True).train_dataloader()
    assert len(three) == 3 * len(single) == 6
    assert same(epochs(three, 2), [[batch for one in epochs(single) for batch in one] for _ in range(2)])
    assert len(make(repeat=3).val_dataloader()) == 2


@pytest.mark.parametrize("read", [1, 2, 3, 6])
def test_it_goes_on_within_any_pass(make, read):
    first, second = make(repeat=3), make(repeat=3)
    loader = first.train_dataloader()
    iterator = iter(loader)
    for _ in range(read):
        next(iterator)
    second.load_state_dict(first.state_dict())
    expected = list(iterator) or list(loader)  # after the last batch: the next epoch
    assert same(list(second.train_dataloader()), expected)


def test_no_pass_at_all_is_refused(make):
    with pytest.raises(UserError, match=r"data\.repeat must be at least 1, got 0"):
        make(repeat=0)
