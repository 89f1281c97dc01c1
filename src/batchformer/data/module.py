"""What all data sets share: keywords, where a loader runs, how a run is resumed."""

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.epochs import EpochLoader
from batchformer.errors import UserError

_MOST_WORKERS = 256  # more only where there are as many cores


class DataModule(L.LightningDataModule):
    """A training set and a set to evaluate on.

    The order of an epoch depends on (seed, epoch), a sample's augmentation on (seed, epoch, index, repeat): neither on
    the number of workers nor on where a run was resumed. `batch_size` is that of one process; each takes its share of
    the order, so the Trainer needs no sampler of its own (`use_distributed_sampler=False`).
    """

    class_names: list[str]
    train_images: int
    test_images: int
    fingerprint: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        seed: int = 0,
        workers: int = 0,
        drop_last: bool = True,
        eval_batch_size: int = 512,
        channels_last: bool = False,
        augment_repeats: int = 1,
    ) -> None:
        super().__init__()
        if batch_size < 1 or eval_batch_size < 1:
            raise UserError(
                f"batch_size and eval_batch_size must be at least 1, got {batch_size} and {eval_batch_size}."
            )
        if workers < 0:
            raise UserError(f"workers must be 0 or more, got {workers}.")
        most = max(_MOST_WORKERS, os.cpu_count() or 1)
        if workers > most:  # every one is a process with its own copy of Python and torch
            raise UserError(f"workers must be {most} or fewer on this machine, got {workers}: each is a process.")
        if augment_repeats < 1:
            raise UserError(f"data.augment_repeats must be 1 (each image once) or more, got {augment_repeats}.")
        self.root = root
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.workers = workers
        self.drop_last = drop_last
        self.channels_last = channels_last
        self.augment_repeats = augment_repeats
        self._ready = False
        # Held weakly, to be asked how far it has been read: it is gone, and its workers with it, when nobody reads it.
        self._train_loader: weakref.ref[EpochLoader] | None = None
        self._restored: dict[str, Any] | None = None

    # for subclasses

    @abstractmethod
    def _read(self) -> None:
        """Read the data and fill in what is documented as known after `setup`; raise UserError for what is wrong."""

    @abstractmethod
    def _make_loader(self, training: bool) -> EpochLoader:
        """A loader over the training set (shuffled, augmented) or the test set (in file order)."""

    @property
    @abstractmethod
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        """From a user's image to the normalised (3, H, W) tensor a trained model expects."""

    # for users and Lightning

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def setup(self, stage: str | None = None) -> None:
        """Read the data once; calling it again costs nothing."""
        if not self._ready:
            self._read()
            self._ready = True
        self._check_restored()

    def train_dataloader(self) -> EpochLoader:
        self.setup()
        loader = self._make_loader(training=True)
        if self._restored is not None and "train" in self._restored:
            loader.load_state_dict(self._restored.pop("train"))
        self._train_loader = weakref.ref(loader)
        return loader

    def val_dataloader(self) -> EpochLoader:
        """The test split of the official layout: the protocol reports its last epoch and selects nothing on it."""
        self.setup()
        return self._make_loader(training=False)

    def test_dataloader(self) -> EpochLoader:
        return self.val_dataloader()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The data set in numbers."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must know to go on: which data, which seed, and how far the epoch has been read."""
        state: dict[str, Any] = {"seed": self.seed, "fingerprint": getattr(self, "fingerprint", None)}
        if (loader := self._loader_in_use()) is not None:
            state["train"] = loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lightning gives the loader its own state too; this one serves those who drive the loader themselves."""
        self._restored = dict(state)
        if self._ready:
            self._check_restored()
        if (loader := self._loader_in_use()) is not None and "train" in self._restored:
            loader.load_state_dict(self._restored.pop("train"))

    def _loader_in_use(self) -> EpochLoader | None:
        return None if self._train_loader is None else self._train_loader()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what travels to another process, reads with loaders of its own."""
        return {**self.__dict__, "_train_loader": None}

    def _check_restored(self) -> None:
        """A run goes on only with the data and the order it was started with; testing on other data is fine."""
        state = self._restored
        trainer = self.trainer
        if state is None or (trainer is not None and not trainer.training and not trainer.sanity_checking):
            return
        if state.get("fingerprint") not in (None, self.fingerprint):
            raise UserError(
                "the training images are not those the checkpoint was made with (their fingerprints differ): "
                "resume with the data of the first start, or start a new run."
            )
        if state.get("seed", self.seed) != self.seed:
            raise UserError(
                f"the checkpoint was made with data.seed {state['seed']}, not {self.seed}: resume with that one."
            )

    # for loaders

    def _host_loader(self, samples: Any, training: bool, passes: int = 1) -> EpochLoader:
        """Samples that are read and augmented one by one on the host, in `workers` processes."""
        from batchformer.data.host_loader import HostLoader

        rank, world = self._rank_and_world()
        return HostLoader(
            samples,
            batch_size=self.batch_size if training else self.eval_batch_size,
            training=training,
            seed=self.seed,
            drop_last=self.drop_last,
            rank=rank,
            world=world,
            workers=self.workers,
            pin_memory=self._device().type == "cuda" and samples.device.type == "cpu",
            epoch_source=self._current_epoch if training else None,
            channels_last=self.channels_last,
            repeats=self.augment_repeats if training else 1,
            passes=passes,
        )

    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _current_epoch(self) -> int | None:
        return self.trainer.current_epoch if self.trainer is not None else None
