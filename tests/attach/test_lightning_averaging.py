"""Lightning's callback beside those that average weights: checkpoints hold the plain average, and training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

import batchformer as bf
from batchformer.attach.lightning import BatchFormerCallback
from batchformer.errors import UserError
from tests.training import quiet_trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu())


class Task(L.LightningModule):
    """A parameter stands after the network: an average that lacks the module, or has it alone, is out of step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()
        self.criterion = bf.TwoStreamLoss(F.cross_entropy)
        self.shift = nn.Parameter(torch.zeros(3))
        self.seen: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return self.criterion(self.model(batch[0]) + self.shift, batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("loss", F.cross_entropy(self.model(batch[0]) + self.shift, batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["state_dict"])


def module() -> BatchFormerCallback:
    return BatchFormerCallback(heads=2, dropout=0.0)


def batches() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader([(torch.randn(6, generator=generator), i % 3) for i in range(8)], batch_size=4)


def fit(
    folder: Path, epochs: int, callbacks: list[L.Callback], ckpt_path: str | None = None
) -> tuple[Task, L.Trainer, dict[str, Any]]:
    """The task after training, its trainer, and the last checkpoint."""
    trainer, task = quiet_trainer(folder, epochs, *callbacks), Task()
    trainer.fit(task, batches(), ckpt_path=ckpt_path)
    file = trainer.checkpoint_callback.best_model_path
    return task, trainer, torch.load(file, weights_only=False)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        torch.testing.assert_close(value, other[key], msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture
def ema_run(tmp_path: Path) -> tuple[Task, L.Trainer, dict[str, Any]]:
    return fit(tmp_path, 1, [module(), EMAWeightAveraging(decay=0.5)])


def test_a_checkpoint_of_an_average_loads_without_the_callback_and_holds_the_average(ema_run) -> None:
    task, trainer, checkpoint = ema_run
    loaded = Task.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # strict
    assert_same(loaded.state_dict(), task.state_dict())  # the average, which ends in the model when training ends
    assert list(checkpoint["current_model_state"]) == list(Task().state_dict())
    assert not torch.equal(checkpoint["current_model_state"]["shift"], loaded.shift)


def test_going_on_from_an_average_is_as_never_having_stopped(tmp_path: Path, ema_run) -> None:
    _, first, _ = ema_run
    half = first.checkpoint_callback.best_model_path
    resumed, _, one = fit(tmp_path / "resumed", 3, [module(), EMAWeightAveraging(decay=0.5)], ckpt_path=half)
    straight, _, other = fit(tmp_path / "straight", 3, [module(), EMAWeightAveraging(decay=0.5)])
    assert_same(resumed.state_dict(), straight.state_dict())
    for weights in ("state_dict", "batchformer", "current_model_state", "batchformer_current"):
        assert_same(one[weights], other[weights])
    own = one["batchformer"], one["batchformer_current"]
    assert any(not torch.equal(own[0][key], own[1][key]) for key in own[0])


def test_without_the_average_training_goes_on_from_the_averaged_weights(tmp_path: Path, ema_run) -> None:
    _, averaged, checkpoint = ema_run
    nothing_left_to_train = fit(tmp_path, 1, [module()], ckpt_path=averaged.checkpoint_callback.best_model_path)
    task, trainer, _ = nothing_left_to_train
    assert_same(task.state_dict(), checkpoint["state_dict"])
    assert_same(trainer.callbacks[0].attachment.state_dict(), checkpoint["batchformer"])


def test_an_average_that_comes_later_begins_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    _, first, begun = fit(tmp_path / "first", 1, [module()])
    never = EMAWeightAveraging(update_every_n_steps=0)  # the average stays where it began
    _, _, later = fit(tmp_path / "later", 2, [module(), never], ckpt_path=first.checkpoint_callback.best_model_path)
    assert_same(later["state_dict"], begun["state_dict"])
    assert_same(later["batchformer"], begun["batchformer"])
    assert_same(later["current_model_state"], fit(tmp_path / "straight", 2, [module()])[2]["state_dict"])


def test_after_fit_the_average_is_plain_too(tmp_path: Path, ema_run) -> None:
    task, trainer, _ = ema_run
    keys = list(Task().state_dict())
    assert list(task.state_dict()) == keys
    assert "on_save_checkpoint" not in vars(task)
    before = {key: value.clone() for key, value in task.state_dict().items()}
    trainer.validate(task, batches(), verbose=False)  # swaps the model with the average, and back
    assert_same(task.state_dict(), before)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert_same(Task.load_from_checkpoint(tmp_path / "end.ckpt").state_dict(), before)


class SavesItself(Task):
    """Its own hook has the last word on the weights."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"] = self.state_dict()


def test_weights_only_and_a_hook_of_ones_own_see_and_save_the_plain_model(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_weights_only=True)
    task = SavesItself()
    quiet_trainer(tmp_path, 1, *[module(), checkpoints]).fit(task, batches())
    assert task.seen == list(Task().state_dict())
    assert_same(Task.load_from_checkpoint(checkpoints.best_model_path).state_dict(), task.state_dict())


@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(), lambda: StochasticWeightAveraging(swa_lrs=0.1)], ids=["ema", "swa"]
)
def test_an_average_that_copies_the_model_before_the_module_is_there_is_refused(tmp_path: Path, average) -> None:
    callback = average()
    task, trainer = Task(), quiet_trainer(tmp_path, 1, *[callback, module()])
    with pytest.raises(UserError, match=rf"swap them, callbacks=\[BatchFormerCallback.*, {type(callback).__name__}"):
        trainer.fit(task, batches())
    assert bf.attachment_of(task.model) is None


def test_stochastic_weight_averaging_behind_the_callback_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def callbacks() -> list[L.Callback]:
        return [module(), StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)]

    _, first, _ = fit(tmp_path / "first", 2, callbacks())
    Task.load_from_checkpoint(first.checkpoint_callback.best_model_path)
    _, longer, _ = fit(tmp_path / "longer", 3, callbacks(), ckpt_path=first.checkpoint_callback.best_model_path)
    assert longer.global_step == 6
