"""Data sets of samples that are read and augmented one by one on the host: from arrays, from files, or cached."""

import copy
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from batchformer.data.images import open_image
from batchformer.data.loading.epoch_loader import Batch
from batchformer.data.loading.order import sample_seed
from batchformer.errors import UserError

Address = tuple[int, int]  # (epoch, slot in the sense of batchformer.data.loading.order)
Fields = Mapping[str, Tensor]  # of every sample one row
Transforms = Callable[[Any], Tensor] | Sequence[Callable[[Any], Tensor]]
_TAKEN = ("images", "views", "labels", "index")  # names of batch entries made by the loaders


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Context that seeds the generators of torch (CPU), Python and numpy, and restores their states afterwards.

    torchvision's transforms draw from the first two, timm's from all three. The CUDA generators are not touched
    (`torch.manual_seed` would).
    """
    if seed is None:
        yield
        return
    before_torch, before_python = torch.default_generator.get_state(), random.getstate()
    before_numpy = np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.default_generator.set_state(before_torch)
        random.setstate(before_python)
        np.random.set_state(before_numpy)


def check_fields(fields: Fields | None, count: int) -> dict[str, Tensor]:
    """The fields, each with one row for every sample, and a name that is free."""
    for name, values in (fields or {}).items():
        if name in _TAKEN:
            raise ValueError(f"a field cannot be called {name!r}: batches have an entry of that name.")
        if len(values) != count:
            raise ValueError(f"the field {name!r} has {len(values)} rows for {count} samples.")
    return dict(fields or {})


class AddressedSamples(Dataset, ABC):
    """Dataset indexed by (epoch, slot), so that persistent workers get the epoch with each index.

    Each of the `views` of a sample is augmented under generators seeded by (seed, epoch, index, repeat, view).
    """

    #: where samples and batches are
    device = torch.device("cpu")
    views = 1

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    def _read(self, index: int) -> Any:
        """The stored sample, decoded; uses no random numbers. None where there is nothing to read."""
        return None

    def _augment(self, index: int, stored: Any, view: int) -> Any:
        """View number `view` of the result of `_read`, not in place; random numbers from the global generators."""
        return stored

    def _finish(self, index: int, views: list[Any]) -> Any:
        """The sample that `collate` takes."""
        return views[0]

    @property
    @abstractmethod
    def collate(self) -> Callable[[list[Any]], Batch]:
        """From samples to a batch. A free function, so that workers need no second copy of the samples."""

    def __getitem__(self, address: Address) -> Any:
        epoch, slot = address
        repeat, index = divmod(slot, len(self))
        stored = self._read(index)
        views = []
        for view in range(self.views):
            with seeded(None if self.seed is None else sample_seed(self.seed, epoch, index, repeat, view)):
                views.append(self._augment(index, stored, view))
        return self._finish(index, views)

    def __getitems__(self, addresses: list[Address]) -> list[Any] | str:
        """A whole batch, or the message of the UserError: torch would wrap the error in a worker's traceback."""
        try:
            return [self[address] for address in addresses]
        except UserError as error:
            return str(error)


class LabelledSamples(AddressedSamples):
    """Samples with one label each, further `fields`, and on request their `index`; images in the subclasses.

    A batch is a dict of `labels` and the fields (features, domains, pairs ...) by their names; with a `transform` of
    what `_read` gives, also of `images`, or with several views of `views`, a list of tensors. A list of transforms has
    one for each view.
    """

    def __init__(
        self,
        labels: Tensor,
        transform: Transforms | None = None,
        seed: int | None = None,
        *,
        fields: Fields | None = None,
        views: int = 1,
        index: bool = False,
    ) -> None:
        super().__init__(seed)
        self.labels, self.fields, self.index = labels, check_fields(fields, len(labels)), index
        self.transforms = list(transform) if isinstance(transform, Sequence) else [transform] * views
        self.views = len(self.transforms)

    def __len__(self) -> int:
        return len(self.labels)

    def _augment(self, index: int, stored: Any, view: int) -> Tensor | None:
        transform = self.transforms[view]
        return None if transform is None else transform(stored)

    def _finish(self, index: int, views: list[Any]) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        if views[0] is not None:
            sample |= {"images": views[0]} if self.views == 1 else {"views": views}
        sample["labels"] = int(self.labels[index])
        sample |= {name: values[index] for name, values in self.fields.items()}
        return sample | {"index": index} if self.index else sample

    @property
    def collate(self) -> Callable[[list[dict[str, Any]]], Batch]:
        return default_collate


class ArraySamples(LabelledSamples):
    """Images held in memory as bytes."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Transforms, seed: int | None, **options: Any) -> None:
        super().__init__(labels, transform, seed, **options)
        self.images = images

    def _read(self, index: int) -> Tensor:
        return self.images[index]


class FileSamples(LabelledSamples):
    """Images read from files. Paths are kept as one array, which forked workers share without copying it."""

    def __init__(
        self,
        paths: list[str],
        labels: Tensor,
        transform: Transforms,
        seed: int | None,
        folder: str = "",
        upright: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(labels, transform, seed, **options)
        self.upright = upright
        self.paths, self.folder = np.array([os.fsencode(path) for path in paths]), folder

    def _read(self, index: int) -> Any:
        return open_image(self.folder + os.fsdecode(self.paths[index]), self.upright)


class KeptSamples(AddressedSamples):
    """Cache of transformed samples of a detector's data set, for deterministic transforms; filled on first access.

    Samples are cached in the memory of `device`, where batches are then collated too, and per process: each worker
    caches the samples it reads. A batch shares no memory with the cache, so in-place changes of its images and targets
    do not affect it.
    """

    def __init__(self, samples: AddressedSamples, device: torch.device | None = None) -> None:
        super().__init__(samples.seed)
        self.samples = samples
        self.device = device or torch.device("cpu")
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, address: Address) -> Any:
        index = address[1] % len(self)
        if index not in self._kept:
            self._kept[index] = move_data_to_device(self.samples[address], self.device)
        return self._kept[index]

    @property
    def collate(self) -> Callable[[list[Any]], Batch]:
        return partial(_collate_copies, collate=self.samples.collate)


def _collate_copies(samples: list[Any], collate: Callable[[list[Any]], Batch]) -> Batch:
    batch = collate(samples)  # images and masks are copied into one canvas
    return batch | {"labels": _copied_labels(batch["labels"])}


def _copied_labels(labels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the labels that shares no memory with them.

    The tensors of a name are copied together: a batch has dozens, which one by one would cost more than the images.
    """
    columns: dict[str, Any] = {}
    for name, first in labels[0].items():
        values = [label[name] for label in labels]
        if name == "masks":  # `collate` has padded them, which copies
            columns[name] = values
        elif isinstance(first, Tensor):
            columns[name] = torch.cat(values).split([len(value) for value in values])
        else:
            columns[name] = copy.deepcopy(values)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
