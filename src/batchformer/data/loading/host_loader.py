"""Loader that makes batches on the host, image by image, optionally in worker processes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler

from batchformer.data.loading.epoch_loader import Batch, SampleLoader
from batchformer.data.loading.samples import Address, AddressedSamples
from batchformer.errors import BadSample

_IMAGES = ("images", "views", "pixel_values")  # what `channels_last` lays out


class _Addresses(TorchSampler):
    """Batch sampler of one epoch, from a given batch on; yields lists of addresses.

    An epoch of several passes is as many epochs of one pass after another: in order, augmentation and batches.
    """

    def __init__(self, batch_size: int, batches: int, passes: int) -> None:
        self.batch_size, self.batches, self.passes = batch_size, batches, passes
        self._orders: list[tuple[int, np.ndarray]] = []
        self._skipped = 0

    def __len__(self) -> int:
        return self.batches * self.passes

    def prepare(self, order: Callable[[int], np.ndarray], epoch: int, start: int) -> None:
        """Set what `iter` yields next. `order` is called here and not stored: see `HostLoader`."""
        first, self._skipped = divmod(start, self.batches) if self.batches else (self.passes, 0)
        passes = range(epoch * self.passes + first, (epoch + 1) * self.passes)
        self._orders = [(number, order(number)) for number in passes]

    def __iter__(self) -> Iterator[list[Address]]:
        skipped = self._skipped
        for number, order in self._orders:
            for batch in range(skipped, self.batches):
                yield [(number, int(i)) for i in order[batch * self.batch_size : (batch + 1) * self.batch_size]]
            skipped = 0


class HostLoader(SampleLoader):
    """A torch DataLoader with epochs that can start at any batch; its batches do not depend on the workers.

    Yields what the samples collate to: a dict of `images` (float32, (B, 3, H, W)), `labels` (int64, (B,)) and further
    fields, or the dict of a detector. Each sample is augmented under generators seeded by (seed, epoch, index, repeat).
    An epoch goes through the samples `passes` times, each time in a new order.
    """

    def __init__(
        self, samples: AddressedSamples, *, workers: int = 0, pin_memory: bool = False, passes: int = 1, **order: Any
    ) -> None:
        super().__init__(len(samples), **order)
        # Nothing in torch's loader may reference this one or a task: in a reference cycle torch cannot signal its
        # workers to exit, and waits for each.
        self._addresses = _Addresses(self.batch_size, self._batches_of_a_pass, passes)
        self._loader = DataLoader(
            samples,
            batch_sampler=self._addresses,
            collate_fn=partial(_batch_or_message, collate=samples.collate),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise every epoch draws from the global one
        )

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def _iterator(self) -> Any:
        """The iterator with the workers, under the name by which Lightning shuts down those of torch's DataLoader."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, none: None) -> None:
        self._loader._iterator = none

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._addresses.prepare(self._order, epoch, start)
        try:
            with _signals_wait():
                batches = iter(self._loader)
            for batch in batches:
                if isinstance(batch, str):
                    raise BadSample(batch)
                if self.channels_last:
                    last = partial(torch.Tensor.contiguous, memory_format=torch.channels_last)
                    batch |= {name: tree_map(last, batch[name]) for name in _IMAGES if name in batch}
                yield batch
        except (Exception, KeyboardInterrupt):
            self.end_workers()
            raise

    def batch_of(self, slots: np.ndarray, epoch: int = 0) -> Batch:
        samples: Any = self._loader.dataset
        return samples.collate([samples[epoch, int(slot)] for slot in slots])

    def end_workers(self) -> None:
        """Shut down workers explicitly: an error's traceback references them, and torch waits five seconds for each."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the worker processes have been started.

    The workers inherit this SIGINT handler, so that only the process that reads from them handles it; for SIGTERM torch
    installs its own handler in them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])


def _batch_or_message(samples: list[Any] | str, collate: Callable[[list[Any]], Batch]) -> Batch | str:
    return samples if isinstance(samples, str) else collate(samples)
