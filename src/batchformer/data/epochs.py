"""The protocol all loaders share: which epoch is read, from which batch on, and how that is saved and restored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

Batch = tuple[Tensor, Tensor]


class EpochLoader(ABC):
    """An iterable over the batches of one epoch; iterating again reads the next one.

    The epoch comes from `epoch_source` (a data module passes the trainer's `current_epoch`), or from `set_epoch`,
    or counts up by itself. It is read when the first batch is asked for, not when `iter` is called: Lightning creates
    the iterator before it has finished restoring its counters.
    """

    def __init__(self, epoch_source: Callable[[], int | None] | None = None) -> None:
        self._epoch_source = epoch_source
        self._epoch = 0
        self._batch = 0
        self._start: tuple[int | None, int] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        """The batches of this epoch from number `start` on."""

    def set_epoch(self, epoch: int) -> None:
        """The epoch to read next (without effect where a trainer says which epoch it is)."""
        self._epoch, self._batch = epoch, 0

    def set_start(self, batch: int) -> None:
        """Skip the first `batch` batches of the coming epoch, and of that one only."""
        self._start = (None, batch)

    def state_dict(self) -> dict[str, Any]:
        """The epoch being read and how many of its batches have been handed out."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch the state was saved at; an epoch read to its end is followed by the next one."""
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])
        self._start = (self._epoch, self._batch)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._begin()
        self._epoch, self._batch = epoch, start
        for batch in self._batches(epoch, start):
            self._batch += 1
            yield batch

    def _begin(self) -> tuple[int, int]:
        told = self._epoch_source() if self._epoch_source is not None else None
        pending, self._start = self._start, None
        if told is None:
            epoch = self._epoch + (self._batch >= len(self) > 0)
        else:
            epoch = told
        if pending is None or pending[0] not in (None, epoch):
            return epoch, 0
        return epoch, min(pending[1], len(self))
