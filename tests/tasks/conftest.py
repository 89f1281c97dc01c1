"""A data module small enough to train on in a second, and a quiet trainer."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from batchformer.data.info import DataInfo

COUNTS = [150, 60, 20, 5]


def info(counts: list[int], classes: int | None = None) -> DataInfo:
    """Declared by data with so many training images of each class."""
    return DataInfo(classes=[str(label) for label in range(classes or len(counts))], class_counts=counts)


class TinyData(L.LightningDataModule):
    """Sixteen images of four classes, always in the same order."""

    num_classes = 4
    class_counts = COUNTS

    def __init__(self, batch_size: int = 8, spoil_image: int | None = None, size: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randn(16, 3, size, size, generator=generator)
        self.labels = torch.arange(16) % 4
        self.batch_size = batch_size
        self.spoil_image = spoil_image

    def train_dataloader(self) -> DataLoader:
        images = self.images.clone()
        if self.spoil_image is not None:
            images[self.spoil_image] = float("inf")
        return DataLoader(TensorDataset(images, self.labels), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.images, self.labels), batch_size=6)

    test_dataloader = predict_dataloader = val_dataloader


def make_trainer(**arguments) -> L.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**quiet, **arguments})


@pytest.fixture
def data() -> TinyData:
    return TinyData()


@pytest.fixture(autouse=True)
def one_thread():
    """Sums in one order: the same bits in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
