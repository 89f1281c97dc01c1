"""Worker processes end by themselves, at once: torch waits five seconds for each that was not told, and kills it."""

import copy
import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from batchformer.data import DigitsLT, HostLoader
from batchformer.data.augment.host import array_transform
from batchformer.data.loading.samples import ArraySamples


def loader(**options: Any) -> HostLoader:
    images = torch.zeros(16, 3, 8, 8, dtype=torch.uint8)
    transform = array_transform("none", 8, 8, (0.5,) * 3, (0.5,) * 3)
    samples = ArraySamples(images, torch.arange(16) % 2, transform, 0)
    return HostLoader(samples, batch_size=4, workers=2, **options)


@contextmanager
def only_counting() -> Iterator[None]:
    """Without the collector of cycles, which might come in between: what is left are counts of references."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_those_of_a_loader_that_is_forgotten() -> None:
    with only_counting():
        batches = loader()
        list(batches)
        workers = batches._loader._iterator._workers
        del batches
        assert [worker.exitcode for worker in workers] == [0, 0]


class Watch(Callback):
    def __init__(self) -> None:
        self.workers: list[Any] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for each in (trainer.train_dataloader, trainer.val_dataloaders):
            self.workers += each._loader._iterator._workers


class Tiny(lightning.LightningModule):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.head, self.fails = nn.Linear(3 * 8 * 8, 2), fails

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(batch["images"].flatten(1)), batch["labels"])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        pass

    def on_train_end(self) -> None:
        if self.fails:
            raise RuntimeError("on purpose")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("fails", [False, True])
def test_those_of_a_training(fails: bool) -> None:
    """The trainer, its loops and its data hold one another: what ends the workers is Lightning, at the end."""
    watch = Watch()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    given = (loader(epoch_source=lambda: trainer.current_epoch), loader(training=False))
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.fit(Tiny(fails), *given)
    else:
        trainer.fit(Tiny(fails), *given)
    assert [worker.exitcode for worker in watch.workers] == [0, 0, 0, 0]


def test_those_of_a_look_at_one_batch() -> None:
    """`next(iter(data.train_dataloader()))`, as in a notebook: the data module keeps nothing that reads."""
    data = DigitsLT(workers=2, on_device=False, batch_size=8)
    with only_counting():
        batches = data.train_dataloader()
        next(iter(batches))
        workers = batches._loader._iterator._workers
        assert data.state_dict()["train"] == {"epoch": 0, "batch": 1}
        assert "train" not in copy.deepcopy(data).state_dict()
        pickle.dumps(data)
        del batches
        assert [worker.exitcode for worker in workers] == [0, 0]
    assert "train" not in data.state_dict()
