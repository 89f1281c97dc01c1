"""Samples that are the same in every epoch, made once."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchformer.data.host_loader import Address, AddressedSamples

Labels = list[dict[str, Any]]


class KeptSamples(AddressedSamples):
    """Finished samples of a detector's data set, for transforms that draw nothing; each is made when first asked for.

    They stay in the memory of `device`, where batches are then put together too, and in that of the process: each
    worker keeps what it was asked for. A batch shares no memory with them, so what a step does to its images and
    targets is gone with the batch.
    """

    def __init__(self, samples: AddressedSamples, device: torch.device | None = None) -> None:
        super().__init__(samples.seed)
        self.samples = samples
        self.device = device or torch.device("cpu")
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def _sample(self, index: int) -> Any:
        if index not in self._kept:
            image, target = self.samples._sample(index)
            self._kept[index] = image.to(self.device), _moved(target, self.device)
        return self._kept[index]

    def __getitem__(self, address: Address) -> Any:
        index = address[1] % len(self)
        return self._kept[index] if index in self._kept else super().__getitem__(address)

    @property
    def collate(self) -> Callable[[list[Any]], dict[str, Any]]:
        return partial(_collated, collate=self.samples.collate)


def _collated(samples: list[Any], collate: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
    batch = collate(samples)  # images and masks are copied into one canvas
    return batch | {"labels": _fresh(batch["labels"])}


def _fresh(labels: Labels) -> Labels:
    """The same labels in memory of their own.

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


def _moved(target: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in target.items()}
