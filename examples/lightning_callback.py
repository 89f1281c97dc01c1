"""BatchFormer in a LightningModule you already have: one callback, and the loss over both streams.

    python examples/lightning_callback.py

Needs lightning and timm (the extra `train` of this package); a few seconds on a CPU.
"""

from __future__ import annotations

import lightning as L
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import batchformer as bf
from batchformer.attach.lightning import BatchFormerCallback

CLASSES = 5


class Classifier(L.LightningModule):
    """An ordinary task; new in it is only TwoStreamLoss, which without the callback is the criterion itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model("resnet10t", num_classes=CLASSES)
        self.criterion = bf.TwoStreamLoss(nn.CrossEntropyLoss())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        loss = self.criterion(self.model(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def make_loader(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    images = torch.randn(count, 3, 32, 32, generator=generator) + torch.linspace(-1, 1, CLASSES)[labels].view(
        -1, 1, 1, 1
    )
    return DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=seed == 0)


def main() -> None:
    L.seed_everything(0, verbose=False)
    task = Classifier()
    keys = list(task.state_dict())
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[BatchFormerCallback(model="model", heads=4)],  # in at the start of fit, out at its end
    )
    trainer.fit(task, make_loader(100, seed=0), make_loader(50, seed=1))
    assert list(task.state_dict()) == keys
    print(
        f"accuracy {trainer.callback_metrics['accuracy']:.0%}; the task has the {len(keys)} tensors it had before fit"
    )


if __name__ == "__main__":
    main()
