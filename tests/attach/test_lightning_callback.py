"""Lightning's callback attaches for `fit`, leaves the plain model, and its checkpoints hold the plain model."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import batchformer as bf
from batchformer.attach.lightning import BatchFormerCallback
from batchformer.errors import UserError
from tests.training import quiet_trainer

from .small_models import small


class Task(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small()
        self.rows: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        logits = self.model(batch[0])
        self.rows.append(len(logits))
        return bf.TwoStreamLoss(F.cross_entropy)(logits, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def images() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader([(torch.randn(6, generator=generator), i % 3) for i in range(8)], batch_size=4)


def attaching(folder: Path, epochs: int) -> L.Trainer:
    return quiet_trainer(folder, epochs, BatchFormerCallback(heads=2))


def test_checkpoints_of_the_callback_hold_the_plain_model_and_go_on_with_the_module(tmp_path: Path) -> None:
    task, trainer = Task(), attaching(tmp_path, 1)
    trainer.fit(task, images())
    file = trainer.checkpoint_callback.best_model_path
    trained = trainer.callbacks[0].attachment.state_dict()
    loaded = Task.load_from_checkpoint(file)  # strict, without the callback
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in task.state_dict().items())
    again = attaching(tmp_path, 1)  # nothing left to train: what is there was loaded
    again.fit(Task(), images(), ckpt_path=file)
    restored = again.callbacks[0].attachment.state_dict()
    assert all(torch.equal(restored[key], value) for key, value in trained.items())
    longer = attaching(tmp_path, 2)
    longer.fit(Task(), images(), ckpt_path=file)
    assert longer.global_step == 4


def test_a_network_under_another_name_is_asked_for(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, 1, BatchFormerCallback(model="network", heads=2))
    with pytest.raises(UserError, match=r"no submodule 'network'.*BatchFormerCallback\(model=\.\.\.\)"):
        trainer.fit(Task(), images())


def test_the_callback_attaches_for_fit_and_leaves_the_plain_model() -> None:
    task = Task()
    keys = list(task.state_dict())
    data = images()
    callback = BatchFormerCallback(heads=2)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(task, data)
    assert task.rows == [8, 8]
    assert "on_save_checkpoint" not in vars(task)
    assert list(task.state_dict()) == keys
    assert callback.attachment is not None
    trained = sum(p.grad is not None for p in callback.attachment.parameters())
    assert trained == len(list(callback.attachment.parameters()))


def test_an_error_in_training_leaves_the_plain_model_too(tmp_path: Path) -> None:
    class Failing(Task):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            super().training_step(batch, index)
            raise RuntimeError("failed")

    task = Failing()
    keys = list(task.state_dict())
    with pytest.raises(RuntimeError, match="failed"):
        attaching(tmp_path, 1).fit(task, images())
    assert task.rows == [8]
    assert list(task.state_dict()) == keys
    assert bf.attachment_of(task) is None
    assert "on_save_checkpoint" not in vars(task)
