"""What a checkpoint holds, and that a run resumed from one ends with the same bits."""

import lightning as L
import pytest
import torch

from batchformer.errors import UserError
from batchformer.tasks import LongTailed, LossOptions, OptimizerOptions

from ..tasks.conftest import COUNTS, TinyData, info, make_trainer
from ..tasks.whole_step import WholeStep


def train(task: LongTailed, epochs: int, resume: str | None = None, callbacks=(), steps: int = -1) -> L.Trainer:
    trainer = make_trainer(max_epochs=epochs, max_steps=steps, callbacks=list(callbacks))
    trainer.fit(task, datamodule=TinyData(), ckpt_path=resume)
    return trainer


class SaveAt(L.Callback):
    """A checkpoint after the last batch but before the end of an epoch."""

    def __init__(self, epoch: int, path: str) -> None:
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer, task) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("first", [LongTailed, WholeStep])
@pytest.mark.parametrize("second", [LongTailed, WholeStep])
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path, first, second):
    path = str(tmp_path / "middle.ckpt")
    whole = first("resnet20", loss=LossOptions("ldam", reweight_epoch=2))
    unbroken = train(whole, 3, callbacks=[SaveAt(1, path)])
    resumed = second("resnet20", loss=LossOptions("ldam", reweight_epoch=2))
    trainer = train(resumed, 3, resume=path)
    assert trainer.global_step == unbroken.global_step == 6
    for name, value in whole.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], value), name


@pytest.mark.parametrize("kind", [LongTailed, WholeStep])
def test_a_checkpoint_loads_safely_and_restores_the_task_without_data(tmp_path, kind):
    path = str(tmp_path / "last.ckpt")
    task = kind("resnet20", optimizer=OptimizerOptions(lr=0.05), seed=7)
    train(task, 1, callbacks=[SaveAt(0, path)])
    saved = torch.load(path, weights_only=True)
    assert saved["task"]["data"]["class_counts"] == COUNTS
    assert len(saved["optimizer_states"][0]["state"]) == len(list(task.net.parameters()))
    restored = LongTailed.load_from_checkpoint(path, weights_only=True, map_location="cpu")
    assert restored.optimizer_options == OptimizerOptions(lr=0.05)
    assert (restored.seed, restored.class_counts) == (7, COUNTS)
    images = TinyData().images
    assert torch.equal(restored.eval()(images), task.eval()(images))


def test_the_state_holds_the_network_and_nothing_else(tmp_path):
    task = LongTailed("resnet20", loss=LossOptions("ldam"))
    task.construct(info(COUNTS))
    assert {name.split(".")[0] for name in task.state_dict()} == {"net"}


def test_testing_a_checkpoint_splits_by_the_counts_it_was_trained_with(tmp_path):
    path = str(tmp_path / "last.ckpt")
    task = LongTailed("resnet20")
    train(task, 1, callbacks=[SaveAt(0, path)])
    data = TinyData()
    data.class_counts = [500] * 4
    tested = LongTailed("resnet20")
    make_trainer().test(tested, datamodule=data, ckpt_path=path, verbose=False)
    assert tested.class_counts == COUNTS
    assert tested.metrics["val"].shots == ["many", "medium", "medium", "few"]
    assert tested.per_class == task.per_class


def test_a_foreign_checkpoint_is_refused():
    with pytest.raises(UserError, match="LongTailed"):
        LongTailed().on_load_checkpoint({"state_dict": {}})


@pytest.mark.parametrize("kind", [LongTailed, WholeStep])
def test_max_steps_stops_in_the_middle_of_an_epoch(kind):
    assert train(kind("resnet20"), 5, steps=3).global_step == 3
