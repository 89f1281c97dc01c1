"""Base class of all data sets: options, metadata, choice of loader, checkpointing."""

import os
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.augment.options import check_at_least, check_fraction
from batchformer.data.info import HOLDOUT, DataInfo
from batchformer.data.loading.epoch_loader import EpochLoader, JoinedLoader
from batchformer.data.loading.order import derived_key
from batchformer.errors import UserError, did_you_mean
from batchformer.metrics.measures import count_shots

_MOST_WORKERS = 256  # more only where there are as many cores
_DECLARED = ("class_counts", "image_size", "mean", "std", "train_images", "test_images", "fingerprint")


class ImageFile(NamedTuple):
    """A file of an image for `batchformer data --check`: its path in the root, its label, and its annotated size."""

    path: str
    label: int | None = None
    size: tuple[int, int] | None = None  # height, width


class DataModule(L.LightningDataModule):
    """A training set and one or several sets to evaluate on.

    The order of an epoch depends on (seed, epoch), a sample's augmentation on (seed, epoch, index, repeat, view):
    neither on the number of workers nor on where a run was resumed. `batch_size` is that of one process; each takes its
    share of the order, so the Trainer needs no sampler of its own (`use_distributed_sampler=False`). A task with a
    method `sampler(data)` gives the order itself: a function from the epoch to the slots (see `loading.order`) of all
    processes together, or None for the order of the data. One with a method `training_loader(data)` gives the loader
    itself, or several by name that are read together, or None for the loader of the data.

    Args:
        root: the folder of the data set.
        batch_size: training samples in a batch of one process.
        seed: of order and augmentation.
        workers: processes that read and augment, where that is done on the host.
        drop_last: leave out the last training batch of an epoch where it is not full.
        eval_batch_size: samples in a batch when evaluating.
        channels_last: images in channels-last layout.
        augment_repeats: DeiT's repeated augmentation: above 1, each image comes that often in succession in the order,
            with a new augmentation each time; the epoch keeps its length, so it reads only that part of the images.
        views: above 1, training batches hold `views`, that many tensors, each augmented by itself, in place of
            `images`; or a list with the augmentation of each view. null: as many as the task trains on.
        index: batches also hold `index`, the number of each sample in its set.
    """

    #: names of the sets results are reported on, the first one being that of the primary measure
    evaluation_sets: tuple[str, ...] = ("val",)
    #: name of the evaluation set that is a part of the training data, held out: what may choose a checkpoint
    holdout_set: str | None = None
    #: names of the possible held-out test targets (domains ...), and the one chosen
    targets: tuple[str, ...] = ()
    target: str | None = None

    #: the attributes that `describe` reports, None where the data have none (features have no size)
    _counted: tuple[str, ...] = ("train_images", "test_images", "image_size")

    class_names: list[str]
    class_counts: list[int]
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
        views: int | list[str] | None = None,
        index: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(1, augment_repeats=augment_repeats)
        if views is not None:
            check_at_least(1, views=views if isinstance(views, int) else len(views))
        check_at_least(0, workers=workers)
        most = max(_MOST_WORKERS, os.cpu_count() or 1)
        if workers > most:  # every one is a process with its own copy of Python and torch
            raise UserError(f"workers must be {most} or fewer on this machine, got {workers}: each is a process.")
        self.root, self.seed, self.workers = root, seed, workers
        self.batch_size, self.eval_batch_size, self.drop_last = batch_size, eval_batch_size, drop_last
        self.channels_last, self.index = channels_last, index
        self.augment_repeats, self.views = augment_repeats, views
        self._ready = False
        self._own_order: dict[str, Any] = {}  # see `loader_in_order`
        # Weak reference; used to checkpoint the loader's position without keeping the loader alive.
        self._train_loader: weakref.ref[EpochLoader] | None = None
        self._restored: dict[str, Any] | None = None

    # for subclasses

    @abstractmethod
    def _read(self) -> None:
        """Read the data and fill in what is documented as known after `setup`; raise UserError for what is wrong."""

    @abstractmethod
    def make_loader(self, name: str, training: bool) -> EpochLoader:
        """A loader over the named set ("train" or one of `evaluation_sets`): shuffled and augmented, or as it is."""

    def training_loader(self) -> EpochLoader:
        """The training loader; a data module of several sets returns a `JoinedLoader` here."""
        return self.make_loader("train", training=True)

    def loader_in_order(self, name: str, **order: Any) -> EpochLoader:
        """A further training loader over a set, with a `sampler`, `batch_size` or `seed` (of the order) of its own."""
        self._own_order = order
        try:
            return self.make_loader(name, training=True)
        finally:
            self._own_order = {}

    def hold_out(self, part: float, split_seed: int) -> None:
        """For subclasses: this part of the training images is evaluated as a set of its own, `holdout`; 0: none."""
        check_fraction("holdout", part)
        self.holdout, self.split_seed = part, split_seed
        if part:
            self.holdout_set, self.evaluation_sets = HOLDOUT, ("val", HOLDOUT)

    def choose_target(self, target: str) -> None:
        """For subclasses with several `targets`: check the name and set `target`."""
        if target not in self.targets:
            raise UserError(
                f"data.target: there is no {target!r}; choose one of {', '.join(self.targets)}."
                + did_you_mean(target, self.targets)
            )
        self.target = target

    @property
    @abstractmethod
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        """From a user's image to the normalised (3, H, W) tensor a trained model expects."""

    # for users and Lightning

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def declare(self) -> dict[str, Any]:
        """Metadata of the data after `setup`, as plain values; subclasses add entries.

        `classes` (their names), `class_counts`, `image_size`, `mean`, `std`, `train_images`, `test_images`,
        `fingerprint`, each where the data have it, and `evaluation_sets`, `targets`, `target`.
        """
        known: dict[str, Any] = {"classes": list(self.class_names)} if hasattr(self, "class_names") else {}
        for name in _DECLARED:
            if hasattr(self, name):
                value = getattr(self, name)
                known[name] = list(value) if isinstance(value, list | tuple) else value
        return known | {
            "evaluation_sets": list(self.evaluation_sets), "targets": list(self.targets), "target": self.target
        }  # fmt: skip

    def remarks(self) -> list[str]:
        """Notes on the data for the user, a line each; available after `setup`."""
        return []

    def image_files(self) -> dict[str, list[ImageFile]]:
        """The image files of every set; empty where images are not read from files one by one."""
        return {}

    def passed_over(self) -> list[str]:
        """Files in the folders of the images that are not read, relative to the root."""
        return []

    def annotation_problems(self) -> list[Any]:
        """Wrong entries of annotation files (`data.sets.annotations.WrongEntry`), found without reading an image."""
        return []

    @property
    def info(self) -> DataInfo:
        """The metadata of the data set; calls `setup` if that has not been done."""
        self.setup()
        return DataInfo(self.declare())

    def setup(self, stage: str | None = None) -> None:
        """Read the data once; calling it again costs nothing."""
        if not self._ready:
            self._read()
            self._ready = True
        self._check_restored()

    def train_dataloader(self) -> EpochLoader:
        self.setup()
        loader = self._of_task("training_loader")
        if isinstance(loader, dict):
            loader = JoinedLoader(loader, self._current_epoch)
        loader = self.training_loader() if loader is None else loader
        if self._restored is not None and "train" in self._restored:
            loader.load_state_dict(self._restored.pop("train"))
        self._train_loader = weakref.ref(loader)
        return loader

    def val_dataloader(self) -> EpochLoader | list[EpochLoader]:
        """The evaluation sets, a list where there are several: the protocol reports the last epoch's results on them
        and selects nothing by them."""
        self.setup()
        loaders = [self.make_loader(name, training=False) for name in self.evaluation_sets]
        return loaders[0] if len(loaders) == 1 else loaders

    def evaluation_loader(self, name: str) -> EpochLoader:
        """The set of this name, "train" or one of `evaluation_sets`, each sample once and as it is."""
        self.setup()
        return self.make_loader(name, training=False)

    def undivided_loader(self, name: str) -> EpochLoader:
        """The same for one process alone: all samples, also where several processes share an evaluation."""
        return self._share_of(name, 0, 1)

    def spaced_train_loader(self, most: int | None) -> EpochLoader:
        """At most so many training samples, each as it is, evenly spaced: files are sorted by class. None: all."""
        self.setup()
        rank, world = self._rank_and_world()
        every = 1 if most is None else -(-self.train_images // most)
        return self._share_of("train", rank * every, world * every)

    def _share_of(self, name: str, first: int, step: int) -> EpochLoader:
        self._own_order = {"rank": first, "world": step}
        try:
            return self.evaluation_loader(name)
        finally:
            self._own_order = {}

    def test_dataloader(self) -> EpochLoader | list[EpochLoader]:
        return self.val_dataloader()

    def describe(self) -> dict[str, Any]:
        """The data set in numbers: classes by frequency (Many > 100, Medium 20 to 100, Few < 20), head and tail.

        The tail is the rarest class that is there at all.
        """
        self.setup()
        there = {label: count for label, count in enumerate(self.class_counts) if count}
        head, tail = max(there, key=lambda k: there[k]), min(there, key=lambda k: (there[k], -k))
        return {
            "classes": self.num_classes,
            **{name: getattr(self, name, None) for name in self._counted},
            **count_shots(self.class_counts),
            "head": {"label": head, "name": self.class_names[head], "images": there[head]},
            "tail": {"label": tail, "name": self.class_names[tail], "images": there[tail]},
            "imbalance": there[head] / there[tail],
            "fingerprint": self.fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: fingerprint of the data, seed, and the loader's position in the epoch."""
        state: dict[str, Any] = {"seed": self.seed, "fingerprint": getattr(self, "fingerprint", None)}
        if (loader := self._loader_in_use()) is not None:
            state["train"] = loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the data and restore the loader's position; Lightning also restores the loader itself."""
        self._restored = dict(state)
        if self._ready:
            self._check_restored()
        if (loader := self._loader_in_use()) is not None and "train" in self._restored:
            loader.load_state_dict(self._restored.pop("train"))

    def _loader_in_use(self) -> EpochLoader | None:
        return None if self._train_loader is None else self._train_loader()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickling, without the loader: a copy creates its own."""
        return {**self.__dict__, "_train_loader": None}

    def _check_restored(self) -> None:
        """Refuse to resume a run with other data or another order; testing on other data is allowed."""
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

    def _seed_of(self, name: str) -> int:
        """Seed of a set's order and augmentation: that of the data for the training set, derived ones for others."""
        return self.seed if name == "train" else derived_key(self.seed, name) % 2**63

    def _loader_options(self, name: str, training: bool) -> dict[str, Any]:
        """Arguments common to all loaders. The sampler of a task applies to the training set only."""
        rank, world = self._rank_and_world()
        return {
            "batch_size": self.batch_size if training else self.eval_batch_size,
            "training": training,
            "seed": self._seed_of(name),
            "drop_last": self.drop_last,
            "rank": rank,
            "world": world,
            "epoch_source": self._current_epoch if training else None,
            "channels_last": self.channels_last,
            "repeats": self.augment_repeats if training else 1,
            "sampler": self._of_task("sampler") if training and name == "train" else None,
            **self._own_order,
        }

    def _host_loader(self, samples: Any, name: str, training: bool, passes: int = 1) -> EpochLoader:
        """Loader of samples that are read and augmented one by one on the host, in `workers` processes."""
        from batchformer.data.loading.host_loader import HostLoader

        return HostLoader(
            samples,
            workers=self.workers,
            pin_memory=self._device().type == "cuda" and samples.device.type == "cpu",
            passes=passes,
            **self._loader_options(name, training),
        )

    def _of_task(self, method: str) -> Any:
        """What this method of the task in training returns for these data; None where the task has no such method."""
        found = getattr(self._task(), method, None)
        return found(self) if callable(found) else None

    def _task(self) -> Any:
        return self.trainer.lightning_module if self.trainer is not None else None

    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")

    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _current_epoch(self) -> int | None:
        return self.trainer.current_epoch if self.trainer is not None else None
