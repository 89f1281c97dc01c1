"""Batches of a data set that lies on the device as bytes, augmented there many batches at a time."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from batchformer.data.augment.batched import BatchedAugmentation
from batchformer.data.augment.draws import draw_table
from batchformer.data.augment.packing import to_device
from batchformer.data.epochs import Batch, EpochLoader
from batchformer.data.order import EpochShare, batch_count, check_batches

_CHUNK_BYTES = {"cuda": 1 << 28, "cpu": 1 << 23}


class Place(NamedTuple):
    """Where a chunk begins."""

    epoch: int
    first: int  # batch


class DeviceLoader(EpochLoader):
    """Yields `(images float32 normalised (B, 3, H, W), labels int64 (B,))`, slices of a chunk made at once.

    A 32 px image is worth about a microsecond of augmentation, a kernel launch more than that: so as many batches as
    fit in `chunk_bytes` of float32 images of the size trained at (on CUDA a whole epoch of CIFAR-100-LT, one batch at
    224 px) are augmented together. The random tables are made on the host and what follows from them is sent in one
    copy; nothing is read back, so the host never waits for the device. A chunk is many small kernels: in training on
    CUDA (`ahead`) the next one, that of the next epoch too, is made when half of this one has been handed out, so that
    the host starts them while the device is busy with steps it was given before.

    What a sample looks like depends on (seed, epoch, index, repeat) only, not on the chunk or batch it falls in.
    When evaluating, images are brought to the augmentation's size and not augmented.
    """

    def __init__(
        self,
        images: UInt8[Tensor, "all 3 height width"],
        labels: Int[Tensor, " all"],
        *,
        batch_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device | str = "cpu",
        augmentation: BatchedAugmentation | None = None,
        training: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        world: int = 1,
        epoch_source: Callable[[], int | None] | None = None,
        channels_last: bool = False,
        chunk_bytes: int | None = None,
        repeats: int = 1,
        ahead: bool | None = None,
    ) -> None:
        super().__init__(epoch_source)
        if training:
            check_batches(len(labels), batch_size, world, drop_last)
        self.batch_size, self.seed = batch_size, seed
        drop_last = drop_last and training
        self._order = EpochShare(len(labels), seed, rank, world, training, drop_last, repeats)
        self.device = torch.device(device)
        augmentation = augmentation or BatchedAugmentation()
        self.augmentation = augmentation if training else augmentation.evaluation()
        self._repeats = repeats
        self.channels_last = channels_last
        self._samples = len(labels)
        self._height, self._width = images.shape[2:]
        self._length = batch_count(len(self._order(0)), batch_size, drop_last)
        self._store = self.augmentation.store(images.to(self.device))
        self._labels = labels.to(self.device, torch.int64)
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=self.device).view(1, -1, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=self.device).view(
            1, -1, 1, 1
        )
        if chunk_bytes is None:
            chunk_bytes = _CHUNK_BYTES.get(self.device.type, _CHUNK_BYTES["cuda"])
        height, width = self.augmentation.output_size(self._height, self._width)
        self._chunk_batches = max(1, chunk_bytes // (4 * images.shape[1] * height * width * batch_size))
        # one batch at a time is made just before its step, with or without: no more memory for that
        ahead = self.device.type == "cuda" if ahead is None else ahead
        self._is_ahead = ahead and training and self._chunk_batches > 1
        self._prepared: tuple[Place, Batch] | None = None
        self._drawn: tuple[int, np.ndarray, dict[str, np.ndarray]] | None = None

    def __len__(self) -> int:
        return self._length

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        size = self.batch_size
        for first in range(start, len(self), self._chunk_batches):
            images, labels = self._made(Place(epoch, first))
            following = first + self._chunk_batches
            upcoming = Place(epoch, following) if following < len(self) else Place(epoch + 1, 0)
            begins = range(0, len(labels), size)
            for number, begin in enumerate(begins):
                if self._is_ahead and number == len(begins) // 2:
                    self._prepared = upcoming, self._chunk(upcoming)
                yield images[begin : begin + size], labels[begin : begin + size]

    def _made(self, place: Place) -> Batch:
        """The chunk at this place: the one that was made ahead, unless something else was expected then."""
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared is not None and prepared[0] == place else self._chunk(place)

    def _draw(self, epoch: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Order and random numbers of an epoch; those of the latest are kept."""
        if self._drawn is None or self._drawn[0] != epoch:
            tables = {
                purpose: draw_table(self._samples, self.seed, epoch, purpose, self._repeats)
                for purpose in self.augmentation.purposes
            }
            self._drawn = epoch, self._order(epoch), tables
        return self._drawn[1:]

    def _chunk(self, place: Place) -> Batch:
        order, tables = self._draw(place.epoch)
        last = min(place.first + self._chunk_batches, len(self))
        slots = order[place.first * self.batch_size : last * self.batch_size]
        draws = {purpose: table[slots] for purpose, table in tables.items()}
        plan = self.augmentation.plan(draws, self._height, self._width)
        sent = to_device({"index": slots.astype(np.int64) % self._samples, **plan}, self.device)
        chosen = sent["index"]
        images = self.augmentation.apply(self._store, chosen, sent)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        normalised = torch.addcmul(self._shift, images.to(torch.float32, memory_format=layout), self._scale)
        return self.augmentation.finish(normalised, sent), self._labels.index_select(0, chosen)
