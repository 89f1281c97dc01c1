"""Batches made on the host, image by image, in worker processes if wanted."""

import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from batchformer.data.epochs import Batch, EpochLoader
from batchformer.data.images import open_image
from batchformer.data.order import EpochShare, batch_count, check_batches
from batchformer.data.seeds import sample_seed
from batchformer.errors import BadSample, UserError

Address = tuple[int, int]  # (epoch, slot in the sense of batchformer.data.order)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """torch's, Python's and numpy's generators start from `seed` inside and are what they were afterwards.

    torchvision's transforms draw from the first two, timm's from all three. The CUDA generators are not touched
    (`torch.manual_seed` would).
    """
    if seed is None:
        yield
        return
    before_torch, before_python, before_numpy = (
        torch.default_generator.get_state(),
        random.getstate(),
        np.random.get_state(),
    )
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(before_torch)
        random.setstate(before_python)
        np.random.set_state(before_numpy)


class AddressedSamples(Dataset, ABC):
    """Samples by (epoch, slot): with the epoch beside the slot, workers that outlive an epoch know the new one."""

    #: where samples and batches are
    device = torch.device("cpu")

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def _sample(self, index: int) -> Any:
        """The sample, read and transformed; what is random in it is drawn from the global generators."""

    @property
    @abstractmethod
    def collate(self) -> Callable[[list[Any]], Any]:
        """From samples to a batch. A function by itself, so that workers need no second copy of the samples."""

    def __getitem__(self, address: Address) -> Any:
        epoch, slot = address
        repeat, index = divmod(slot, len(self))
        with seeded(None if self.seed is None else sample_seed(self.seed, epoch, index, repeat)):
            return self._sample(index)

    def __getitems__(self, addresses: list[Address]) -> list[Any] | str:
        """A whole batch, or the sentence of the UserError: torch would wrap the error into a worker's traceback."""
        try:
            return [self[address] for address in addresses]
        except UserError as error:
            return str(error)


class _LabelledSamples(AddressedSamples):
    """Images with one label each; a batch is (images, labels)."""

    def __init__(self, labels: Tensor, transform: Callable[[Any], Tensor], seed: int | None) -> None:
        super().__init__(seed)
        self.labels, self.transform = labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def _image(self, index: int) -> Any:
        """The image as it is stored, before its transform."""

    def _sample(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self._image(index)), int(self.labels[index])

    @property
    def collate(self) -> Callable[[list[tuple[Tensor, int]]], Batch]:
        return _stack


class ArraySamples(_LabelledSamples):
    """Images held in memory as bytes."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Any], Tensor], seed: int | None) -> None:
        super().__init__(labels, transform, seed)
        self.images = images

    def _image(self, index: int) -> Tensor:
        return self.images[index]


class FileSamples(_LabelledSamples):
    """Images read from files. Paths are kept as one array, which forked workers share without copying it."""

    def __init__(
        self,
        paths: list[str],
        labels: Tensor,
        transform: Callable[[Any], Tensor],
        seed: int | None,
        folder: str = "",
        upright: bool = False,
    ) -> None:
        super().__init__(labels, transform, seed)
        self.upright = upright
        self.paths, self.folder = np.array([os.fsencode(path) for path in paths]), folder

    def _image(self, index: int) -> Any:
        return open_image(self.folder + os.fsdecode(self.paths[index]), self.upright)


def _stack(samples: list[tuple[Tensor, int]]) -> Batch:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)


def _batch_or_message(samples: list[Any] | str, collate: Callable[[list[Any]], Any]) -> Any:
    return samples if isinstance(samples, str) else collate(samples)


class _Addresses(Sampler):
    """The batches of one epoch from a given one on, as lists of addresses.

    An epoch of several passes is as many epochs of one pass after another: in order, augmentation and batches.
    """

    def __init__(self, order: Callable[[int], np.ndarray], batch_size: int, batches: int, passes: int) -> None:
        self.order, self.batch_size, self.batches, self.passes = order, batch_size, batches, passes
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.batches * self.passes

    def __iter__(self) -> Iterator[list[Address]]:
        first, skipped = divmod(self.start, self.batches) if self.batches else (self.passes, 0)
        for one in range(self.epoch * self.passes + first, (self.epoch + 1) * self.passes):
            order = self.order(one)
            for batch in range(skipped, self.batches):
                yield [(one, int(i)) for i in order[batch * self.batch_size : (batch + 1) * self.batch_size]]
            skipped = 0


class HostLoader(EpochLoader):
    """A torch DataLoader that knows epochs, can start in the middle of one, and does not depend on its workers.

    Yields what the samples collate to: `(images float32 (B, 3, H, W), labels int64 (B,))`, or the dict of a detector.
    Each sample is augmented under generators seeded by (seed, epoch, index, repeat). An epoch goes through the samples
    `passes` times, each time in a new order.
    """

    def __init__(
        self,
        samples: AddressedSamples,
        *,
        batch_size: int,
        training: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin_memory: bool = False,
        epoch_source: Callable[[], int | None] | None = None,
        channels_last: bool = False,
        repeats: int = 1,
        passes: int = 1,
    ) -> None:
        super().__init__(epoch_source)
        if training:
            check_batches(len(samples), batch_size, world, drop_last)
        self.channels_last = channels_last
        drop_last = drop_last and training
        # No method of this loader: in a cycle of references torch cannot tell its workers to end, and waits for each.
        order = EpochShare(len(samples), seed, rank, world, training, drop_last, repeats)
        self._addresses = _Addresses(order, batch_size, batch_count(len(order(0)), batch_size, drop_last), passes)
        self._loader = DataLoader(
            samples,
            batch_sampler=self._addresses,
            collate_fn=partial(_batch_or_message, collate=samples.collate),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else every epoch would draw a number from the global one
        )

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def _iterator(self) -> Any:
        """The workers, under the name by which Lightning ends those of torch's DataLoader after a training."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, none: None) -> None:
        self._loader._iterator = none

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        self._addresses.epoch, self._addresses.start = epoch, start
        try:
            for batch in self._loader:
                if isinstance(batch, str):
                    raise BadSample(batch)
                yield _channels_last(batch) if self.channels_last else batch
        except (Exception, KeyboardInterrupt):
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        """The traceback of an error holds them, and torch waits five seconds for each that goes with one."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None


def _channels_last(batch: Any) -> Any:
    if isinstance(batch, dict):
        return batch | {"pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}
    images, labels = batch
    return images.contiguous(memory_format=torch.channels_last), labels
