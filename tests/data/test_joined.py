"""Several sets read together, evaluation sets by name, targets, what data declare, and a task's own sampler."""

import lightning as L
import numpy as np
import pytest
import torch

from batchformer.data import CocoPanoptic, DataInfo, DeviceLoader, DigitsLT, HostLoader, JoinedLoader
from batchformer.data.loading.epoch_loader import samples_in
from batchformer.data.loading.samples import LabelledSamples
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from tests.training import quiet_trainer


def device_loader(count, batch_size=4, seed=0, **options):
    return DeviceLoader(None, torch.arange(count), batch_size=batch_size, seed=seed, **options)


def host_loader(count, batch_size=4, seed=0, **options):
    return HostLoader(LabelledSamples(torch.arange(count)), batch_size=batch_size, seed=seed, **options)


BOTH = pytest.mark.parametrize("make", [device_loader, host_loader])


def joined(make, **options):
    """Epochs of 3, 5 and 2 batches."""
    return JoinedLoader({"source": make(12), "target": make(20, seed=1), "memory": make(9, seed=2)}, **options)


def labels(batches):
    return [{name: part["labels"].tolist() for name, part in batch.items()} for batch in batches]


@BOTH
def test_the_first_set_defines_the_epoch_and_the_others_go_round(make):
    loader = joined(make)
    assert len(loader) == 3
    read = [batch for _ in range(4) for batch in labels(loader)]
    assert len(read) == 12
    for name, count, seed in (("source", 12, 0), ("target", 20, 1), ("memory", 9, 2)):
        alone = make(count, seed=seed)
        expected = [batch["labels"].tolist() for _ in range(6) for batch in alone]
        assert [batch[name] for batch in read] == expected[:12]


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_resumed_at_any_step_it_reads_what_an_uninterrupted_run_reads(make, steps):
    whole = [batch for loader in [joined(make)] for _ in range(4) for batch in labels(loader)]
    first, second = joined(make), joined(make)
    done = 0
    while done < steps:
        for _ in first:
            done += 1
            if done == steps:
                state = first.state_dict()
                break
    second.load_state_dict(state)
    assert [batch for _ in range(3) for batch in labels(second)][:5] == whole[steps : steps + 5]


def test_an_epoch_that_a_trainer_names_is_a_pure_function_of_its_number():
    expected = [labels(loader) for loader in [joined(device_loader)] for _ in range(6)][5]
    told = joined(device_loader, epoch_source=lambda: 5)
    assert labels(told) == labels(told) == expected


def test_workers_change_nothing_and_end_together():
    alone, helped = joined(host_loader), joined(lambda *args, **options: host_loader(*args, workers=1, **options))
    for _ in range(2):
        assert labels(alone) == labels(helped)
    workers = [worker for loader in helped.loaders.values() for worker in loader._iterator._workers]
    assert len(workers) == 3
    helped._iterator = None  # what Lightning does after a training
    assert all(not worker.is_alive() for worker in workers)
    helped.set_epoch(0)
    assert len(labels(helped)) == 3
    helped.end_workers()


def test_a_set_without_a_batch_and_no_set_at_all_are_refused():
    with pytest.raises(UserError, match="'empty' does not fill one batch"):
        JoinedLoader({"source": device_loader(8), "empty": device_loader(0, drop_last=False)})
    with pytest.raises(ValueError, match="one loader at least"):
        JoinedLoader({})


class TwoSets(DigitsLT):
    """Labelled digits and, beside them, the test digits as they are; evaluated on both sets and on one target."""

    evaluation_sets = ("source", "target")
    targets = ("small", "large")

    def __init__(self, target="small", **options):
        super().__init__(batch_size=16, **options)
        self.choose_target(target)

    def read_splits(self):
        splits, names = super().read_splits()
        return {"train": splits["train"], "source": splits["train"], "target": splits["val"]}, names

    def training_loader(self):
        loaders = {name: self.make_loader(name, training=True) for name in ("train", "target")}
        return JoinedLoader(loaders, epoch_source=self._current_epoch)


class Task(L.LightningModule):
    """Remembers what it is given."""

    def __init__(self, own_order=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.own_order = own_order
        self.seen, self.evaluated = [], []

    def sampler(self, data):
        return None if self.own_order is None else self.own_order(data)

    def training_step(self, batch, batch_idx):
        parts = batch.values() if "labels" not in batch else [batch]
        self.seen.append([(part["labels"].tolist(), part["images"].abs().sum().item()) for part in parts])
        self.counted = samples_in(batch)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append((dataloader_idx, len(batch["labels"])))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Saver(L.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def train(folder, data, task, *callbacks, ckpt_path=None, epochs=3):
    options = {"enable_checkpointing": False, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    quiet_trainer(folder, epochs, *callbacks, **options).fit(task, data, ckpt_path=ckpt_path)
    return task


def test_a_data_module_trains_on_two_sets_and_resumes_in_the_middle_of_an_epoch(tmp_path):
    whole = train(tmp_path, TwoSets(), Task(), Saver(tmp_path / "here.ckpt", step=31))
    steps = len(TwoSets().train_dataloader())
    assert len(whole.seen) == 3 * steps
    assert 31 % steps
    assert {len(parts) for parts in whole.seen} == {2}
    assert whole.counted == 16
    resumed = train(tmp_path, TwoSets(), Task(), ckpt_path=tmp_path / "here.ckpt")
    assert resumed.seen == whole.seen[31:]


def test_evaluation_sets_have_names_and_loaders_in_their_order(tmp_path):
    data = TwoSets()
    first, second = data.val_dataloader()
    assert sum(len(batch["labels"]) for batch in first) == data.train_images
    assert sum(len(batch["labels"]) for batch in second) == data.test_images - data.train_images
    assert data.info.evaluation_sets == ["source", "target"]
    task = train(tmp_path, data, Task(), epochs=1)
    assert {number for number, _ in task.evaluated} == {0, 1}
    assert DigitsLT.evaluation_sets == ("val",)
    assert not isinstance(DigitsLT().val_dataloader(), list)


def test_a_target_is_one_of_those_there_are():
    assert (TwoSets("large").info.target, TwoSets().targets) == ("large", ("small", "large"))
    with pytest.raises(UserError, match=r"data\.target: there is no 'huge'; choose one of small, large"):
        TwoSets("huge")
    assert (DigitsLT().targets, DigitsLT().target) == ((), None)


def test_data_declare_what_they_know():
    data = DigitsLT(imbalance=10)
    info = data.info
    assert isinstance(info, DataInfo)
    assert info.classes == data.class_names == [str(k) for k in range(10)]
    assert info["class_counts"] == data.class_counts
    assert (info.image_size, info.mean, info.fingerprint) == (8, list(data.mean), data.fingerprint)
    assert type(info.as_dict()) is dict
    with pytest.raises(AttributeError, match="declare no 'domains'; they declare classes, class_counts"):
        _ = info.domains


def test_detection_declares_its_categories(tmp_path):
    root = str(write_miniature("coco-panoptic", tmp_path / "data"))
    info = CocoPanoptic(root, workers=0).info
    assert info.category_ids == [1, 3, 17, 44, 90, 187, 193]
    assert info.is_thing == [True] * 5 + [False] * 2


def test_sets_read_together_have_orders_of_their_own():
    class Twice(TwoSets):
        def read_splits(self):
            splits, names = super().read_splits()
            return splits | {"target": splits["train"]}, names

    data = Twice(index=True)
    batch = next(iter(data.train_dataloader()))
    assert (
        batch["train"]["index"].tolist()
        == next(iter(DigitsLT(batch_size=16, index=True).train_dataloader()))["index"].tolist()
    )
    assert batch["train"]["index"].tolist() != batch["target"]["index"].tolist()


# a task's own sampler


def rare_first(data):
    """Of every class as many, the rarest first; a second time with other augmentations."""
    labels = data._splits["train"].labels
    few = np.concatenate([np.flatnonzero(labels == c)[:6] for c in reversed(range(10))])
    return lambda epoch: np.roll(np.concatenate([few, few + len(labels)]), epoch)


@pytest.mark.parametrize("on_device", ["auto", False])
def test_the_order_of_a_task_is_the_one_that_is_trained(tmp_path, on_device):
    data = DigitsLT(batch_size=10, on_device=on_device)
    task = train(tmp_path, data, Task(rare_first), epochs=2)
    assert len(task.seen) == 24
    order = rare_first(data)
    trained = [label for parts in task.seen for labels, _ in parts for label in labels]
    labels = data._splits["train"].labels
    assert trained == [*labels[order(0) % len(labels)], *labels[order(1) % len(labels)]]
    amounts = [amount for parts in task.seen[:12] for _, amount in parts]
    assert amounts[0] != amounts[6], "the second time each image is augmented anew"
    plain = train(tmp_path, DigitsLT(batch_size=10, on_device=on_device), Task(), epochs=1)
    assert plain.seen[0][0][0] != task.seen[0][0][0]


@BOTH
def test_processes_share_the_order_of_a_task(make):
    slots = np.array([5, 4, 5, 3, 0, 1, 2, 2, 9, 8])
    shares = [
        [batch["labels"].tolist() for batch in make(10, batch_size=2, rank=rank, world=2, sampler=lambda epoch: slots)]
        for rank in range(2)
    ]
    assert shares == [[[5, 5], [0, 2]], [[4, 3], [1, 2]]]


@BOTH
def test_an_order_that_is_none_is_refused(make):
    with pytest.raises(ValueError, match="whole numbers from 0"):
        make(10, sampler=lambda epoch: np.array([0.5] * 10))
    loader = make(10, sampler=lambda epoch: np.arange(10 - epoch))
    list(loader)
    with pytest.raises(ValueError, match="9 slots in epoch 1 and 10 in epoch 0"):
        list(loader)
    with pytest.raises(UserError, match="has 3 images, fewer than one batch of 4"):
        make(10, sampler=lambda epoch: np.arange(3))
