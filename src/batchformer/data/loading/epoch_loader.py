"""Base classes of the loaders: current epoch, first batch, and checkpointing of the position."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from batchformer.data.loading.order import EpochShare, Sampler, check_batches
from batchformer.errors import UserError

#: input of a training step: images (or views, or features), labels, and further fields of the samples, by name
Batch = dict[str, Any]


def as_batch(batch: Any) -> dict[str, Any]:
    """A batch as a dict; a pair, as most loaders of other libraries give it, is images and labels."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Sequence) and len(batch) == 2:
        return {"images": batch[0], "labels": batch[1]}
    raise UserError(f"a batch must be a dict, or a pair of images and labels, got {type(batch).__name__}.")


def images_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    batch = as_batch(batch)
    return batch["images"], batch["labels"]


def samples_in(batch: Any) -> int:
    """How many samples a batch has; of several sets read together, how many the first one has."""
    if isinstance(batch, dict):
        return len(batch["labels"]) if "labels" in batch else samples_in(next(iter(batch.values())))
    return len(batch if isinstance(batch, Tensor) else batch[0])


class EpochLoader(ABC):
    """An iterable over the batches of one epoch; iterating again reads the next one.

    The epoch comes from `epoch_source` (a data module passes the trainer's `current_epoch`), or from `set_epoch`,
    or counts up by itself. It is read when the first batch is requested, not when `iter` is called: Lightning creates
    the iterator before it has finished restoring its counters.
    """

    def __init__(self, epoch_source: Callable[[], int | None] | None = None) -> None:
        self._epoch_source = epoch_source
        self._epoch = 0
        self._batch = 0
        self._start: tuple[int, int] | None = None  # epoch and batch to go on from

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of this epoch from number `start` on."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch to read next (no effect where `epoch_source` gives the epoch)."""
        self._epoch, self._batch = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch being read and how many of its batches have been yielded."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch the state was saved at; an epoch read to its end is followed by the next one."""
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])
        self._start = (self._epoch, self._batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._begin()
        self._epoch, self._batch = epoch, start
        for batch in self._batches(epoch, start):
            self._batch += 1
            yield batch

    def _begin(self) -> tuple[int, int]:
        current = self._epoch_source() if self._epoch_source is not None else None
        pending, self._start = self._start, None
        epoch = self._epoch + (self._batch >= len(self) > 0) if current is None else current
        return epoch, min(pending[1], len(self)) if pending is not None and pending[0] == epoch else 0

    def end_workers(self) -> None:  # noqa: B027 - most loaders have none
        """End worker processes, where the loader has any; they start again when it is read again."""


class SampleLoader(EpochLoader):
    """A loader over this process's share of `count` samples: in training in a given order, else as stored.

    What the keywords mean: see `DataModule` and `loading.order`.
    """

    def __init__(
        self,
        count: int,
        *,
        batch_size: int,
        training: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        world: int = 1,
        epoch_source: Callable[[], int | None] | None = None,
        channels_last: bool = False,
        repeats: int = 1,
        sampler: Sampler | None = None,
    ) -> None:
        super().__init__(epoch_source)
        self.batch_size, self.seed, self.channels_last = batch_size, seed, channels_last
        self._order = EpochShare(count, seed, rank, world, training, drop_last and training, repeats, sampler)
        if training:
            check_batches(self._order.slots_of_an_epoch, batch_size, world, drop_last)
        slots = len(self._order(0))
        self._batches_of_a_pass = slots // batch_size if drop_last and training else -(-slots // batch_size)

    @abstractmethod
    def batch_of(self, slots: np.ndarray, epoch: int = 0) -> Batch:
        """These slots as one batch, as they are in that epoch; of an evaluation set, these samples."""


class JoinedLoader(EpochLoader):
    """Several loaders read together: a batch is a dict of their batches, by their names.

    The first loader defines the length of an epoch. Each of the others is read as one endless sequence of its own
    epochs: at step s of epoch e it gives its batch number n = e * len(first) + s, which is batch n mod len of its own
    epoch n div len. So the batches of (epoch, step) are a pure function of the loaders' seeds, and a run resumed in the
    middle of an epoch reads what the uninterrupted one would; the state is that of any loader, (epoch, batch).
    """

    def __init__(
        self, loaders: Mapping[str, EpochLoader], epoch_source: Callable[[], int | None] | None = None
    ) -> None:
        super().__init__(epoch_source)
        self.loaders = dict(loaders)
        if not self.loaders:
            raise ValueError("a JoinedLoader needs one loader at least.")
        for name, loader in self.loaders.items():
            if not len(loader):
                raise UserError(f"the set {name!r} does not fill one batch: lower data.batch_size.")
        # of the others: the number of the batch that comes next, and the iterator that gives it
        self._readers: dict[str, tuple[int, Iterator[Batch]]] = {}

    def __len__(self) -> int:
        return len(next(iter(self.loaders.values())))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        first, *others = self.loaders
        for step, batch in enumerate(self.loaders[first]._batches(epoch, start), start):
            number = epoch * len(self) + step
            yield {first: batch, **{name: self._batch_of(name, number) for name in others}}

    def _batch_of(self, name: str, number: int) -> Batch:
        upcoming, reader = self._readers.pop(name, (None, None))
        if reader is None or upcoming != number:
            reader = _endless(self.loaders[name], number)
        batch = next(reader)
        self._readers[name] = number + 1, reader
        return batch

    def end_workers(self) -> None:
        self._readers.clear()
        for loader in self.loaders.values():
            loader.end_workers()

    @property
    def _iterator(self) -> Any:
        """Iterator with worker processes of one of the loaders; Lightning checks this attribute for workers."""
        iterators = [getattr(loader, "_iterator", None) for loader in self.loaders.values()]
        return next((iterator for iterator in iterators if iterator is not None), None)

    @_iterator.setter
    def _iterator(self, none: None) -> None:
        self.end_workers()


def _endless(loader: EpochLoader, number: int) -> Iterator[Batch]:
    """The batches of all epochs in succession, from this number on."""
    epoch, start = divmod(number, len(loader))
    while True:
        yield from loader._batches(epoch, start)
        epoch, start = epoch + 1, 0
