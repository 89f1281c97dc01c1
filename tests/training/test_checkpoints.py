"""What a checkpoint holds, and that a run resumed from one ends with the same bits."""

import lightning as L
import pytest
import torch

from batchformer.data import DigitsLT
from batchformer.errors import NonFiniteLoss, UserError
from batchformer.models import resnet20
from batchformer.runs.checkpoints import AtomicCheckpointIO, LastCheckpoint
from batchformer.tasks import LongTailed, LossOptions, OptimizerOptions
from batchformer.training.meter import Meter
from batchformer.training.weights import load_weights

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


class Stop(L.Callback):
    """An error inside an epoch, before a batch."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx) -> None:
        if batch_idx == 8:
            raise RuntimeError("stopped")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_checkpoints_of_steps_do_not_fall_between_the_batches_of_an_accumulated_step(tmp_path):
    """Gradients are in no checkpoint: one after the seventh batch would lack those of that batch."""

    def fit(*callbacks, resume=None):
        last = LastCheckpoint(tmp_path / "last.ckpt", every_steps=1)
        trainer = make_trainer(
            max_epochs=1, accumulate_grad_batches=3, limit_train_batches=12, limit_val_batches=0,
            enable_checkpointing=True, callbacks=[last, *callbacks], plugins=[AtomicCheckpointIO()],
        )  # fmt: skip
        task = LongTailed("resnet20", backbone_args={"widths": [4, 8]}, method="baseline")
        trainer.fit(task, datamodule=DigitsLT(batch_size=16), ckpt_path=resume)
        assert trainer.global_step == 4
        return task.net.state_dict()

    with pytest.raises(RuntimeError, match="stopped"):
        fit(Stop())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == 6
    resumed = fit(resume=tmp_path / "last.ckpt")
    for name, value in fit().items():
        assert torch.equal(resumed[name], value), name


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


@pytest.mark.parametrize(("shape", "told"), [(None, "it has no conv1.weight"), ((4, 3, 1, 1), r"shape \(4, 3, 1, 1\)")])
def test_weights_that_lack_one_tensor_or_have_one_of_another_shape_are_refused(tmp_path, shape, told):
    net, file = resnet20(widths=(4, 8)), tmp_path / "weights.pth"
    weights = {key: value + 1 for key, value in net.state_dict().items()}
    torch.save(weights | {"more": torch.zeros(1)}, file)
    load_weights(net, "network", str(file), attached=False)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in weights.items())
    del weights["conv1.weight"]
    torch.save(weights if shape is None else weights | {"conv1.weight": torch.zeros(shape)}, file)
    with pytest.raises(UserError, match=f"does not fit the network: .*{told}.*1 of"):
        load_weights(net, "network", str(file), attached=False)


def test_a_task_that_expects_a_checkpoint_asks_for_no_other_weights(tmp_path):
    """They may be gone by the time a run is tested."""
    tasks = [LongTailed("resnet20", backbone_args={"widths": [4, 8]}, method="baseline") for _ in range(2)]
    for task in tasks:
        task.init_from = {"network": str(tmp_path / "gone.pth")}
    with pytest.raises(UserError, match=r"there is no file .*gone\.pth"):
        tasks[0].construct(info(COUNTS))
    tasks[1].expect_checkpoint()
    tasks[1].construct(info(COUNTS))
    assert tasks[1].built


def test_the_means_of_an_epoch_that_version_0_1_had_begun_go_on():
    meter = Meter(torch.device("cpu"))
    of_0_1 = {"loss": 6.0, "rows": 4, "right": 3, "plain_loss": 2.0, "plain_rows": 4, "batch": 2, "first_step": 10}
    meter.load_state_dict(of_0_1)
    assert meter.values() == {"loss": 1.5, "acc": 75.0, "loss_plain": 0.5}
    meter.update({"loss": torch.tensor(0.5), "acc": torch.full((4,), 25.0)}, samples=4)
    assert meter.values() == {"loss": 1.0, "acc": 50.0, "loss_plain": 0.5}
    meter.update({"loss": torch.tensor(float("nan"))}, samples=4)
    with pytest.raises(NonFiniteLoss, match="not finite since step 13"):
        meter.raise_if_not_finite(epoch=1)


def test_a_foreign_checkpoint_is_refused():
    with pytest.raises(UserError, match="LongTailed"):
        LongTailed().on_load_checkpoint({"state_dict": {}})


@pytest.mark.parametrize("kind", [LongTailed, WholeStep])
def test_max_steps_stops_in_the_middle_of_an_epoch(kind):
    assert train(kind("resnet20"), 5, steps=3).global_step == 3
