"""Loader of a data set stored on the device as bytes and augmented there, many batches at a time."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.utils._pytree import tree_map

from batchformer.data.augment.batched import BatchedAugmentation
from batchformer.data.augment.crop_erase import erase
from batchformer.data.augment.draws import draw_table, to_device
from batchformer.data.loading.epoch_loader import Batch, SampleLoader
from batchformer.data.loading.samples import Fields, check_fields

_CHUNK_BYTES = {"cuda": 1 << 28, "cpu": 1 << 23}


class _ChunkStart(NamedTuple):
    epoch: int
    batch: int


class DeviceLoader(SampleLoader):
    """Yields dicts of `images` (float32, normalised, (B, 3, H, W)), `labels` (int64, (B,)) and the `fields`, slices of
    a chunk made at once; with several `views`, `views` in place of `images`: a list of as many tensors, each augmented
    by itself; with `index`, the numbers of the samples. Without images (None) it hands out labels and fields.

    Augmenting a 32 px image takes about a microsecond, a kernel launch more than that: so as many batches as fit in
    `chunk_bytes` of float32 images of the size trained at (on CUDA a whole epoch of CIFAR-100-LT, one batch at 224 px)
    are augmented together. The random tables are made on the host and the parameters are sent in one copy; nothing is
    read back, so there is no host synchronisation. A chunk is many small kernels: in training on CUDA (`ahead`) the
    next one, also that of the next epoch, is made when half of this one has been yielded, so that the host launches
    them while the device is busy with queued steps.

    What a sample looks like depends on (seed, epoch, index, repeat, view) only, not on the chunk or batch it falls in.
    When evaluating, images are brought to the augmentation's size and not augmented, and there is one view. A list of
    augmentations has one for each view.
    """

    def __init__(
        self,
        images: UInt8[Tensor, "all 3 height width"] | None,
        labels: Int[Tensor, " all"],
        *,
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
        std: tuple[float, ...] = (1.0, 1.0, 1.0),
        device: torch.device | str = "cpu",
        augmentation: BatchedAugmentation | Sequence[BatchedAugmentation] | None = None,
        chunk_bytes: int | None = None,
        ahead: bool | None = None,
        fields: Fields | None = None,
        views: int = 1,
        index: bool = False,
        **order: Any,
    ) -> None:
        super().__init__(len(labels), **order)
        training = self._order.training
        self.device = torch.device(device)
        augmentation = augmentation or BatchedAugmentation()
        each = [augmentation] * views if isinstance(augmentation, BatchedAugmentation) else list(augmentation)
        self.augmentations = each if training else [each[0].evaluation()]
        self._index = index
        fields = check_fields(fields, len(labels))
        self._columns = {"labels": labels.long(), **fields}
        self._columns = {name: values.to(self.device) for name, values in self._columns.items()}
        if chunk_bytes is None:
            chunk_bytes = _CHUNK_BYTES.get(self.device.type, _CHUNK_BYTES["cuda"])
        self._stores: list[Tensor] = []  # of each view; views with the same border share one
        bytes_of_a_sample = sum(values.element_size() * values[:1].numel() for values in self._columns.values())
        if images is not None:
            self._height, self._width = images.shape[2:]
            images = images.to(self.device)
            by_border: dict[int, Tensor] = {}
            for one in self.augmentations:
                if one.pad not in by_border:
                    by_border[one.pad] = one.store(images)
                self._stores.append(by_border[one.pad])
            self._scale = torch.tensor([1 / (255 * s) for s in std], device=self.device).view(1, -1, 1, 1)
            shift = [-m / s for m, s in zip(mean, std, strict=True)]
            self._shift = torch.tensor(shift, device=self.device).view(1, -1, 1, 1)
            sizes = [one.output_size(self._height, self._width) for one in self.augmentations]
            bytes_of_a_sample = sum(4 * images.shape[1] * height * width for height, width in sizes)
        self._chunk_batches = max(1, chunk_bytes // max(1, bytes_of_a_sample * self.batch_size))
        # chunks of one batch are always made just before their step: prefetching would take more memory
        ahead = self.device.type == "cuda" if ahead is None else ahead
        self._is_ahead = ahead and training and self._chunk_batches > 1
        self._prepared: tuple[_ChunkStart, Batch] | None = None
        self._drawn: tuple[int, np.ndarray, list[dict[str, np.ndarray]]] | None = None

    def __len__(self) -> int:
        return self._batches_of_a_pass

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        size = self.batch_size
        for first in range(start, len(self), self._chunk_batches):
            chunk = self._take_chunk(_ChunkStart(epoch, first))
            following = first + self._chunk_batches
            upcoming = _ChunkStart(epoch, following) if following < len(self) else _ChunkStart(epoch + 1, 0)
            ahead = self._is_ahead and (upcoming.epoch == epoch or not getattr(self._order.sampler, "learnt", False))
            begins = range(0, len(chunk["labels"]), size)
            for number, begin in enumerate(begins):
                if ahead and number == len(begins) // 2:
                    self._prepared = upcoming, self._make_chunk(upcoming)
                yield tree_map(itemgetter(slice(begin, begin + size)), chunk)

    def _take_chunk(self, start: _ChunkStart) -> Batch:
        """The chunk that starts here: the prefetched one if it starts here too, else a new one."""
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared is not None and prepared[0] == start else self._make_chunk(start)

    def _random_numbers(self, epoch: int) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
        """The order of an epoch, and for each view its tables by purpose; the latest epoch is cached."""
        if self._drawn is None or self._drawn[0] != epoch:
            order = self._order(epoch)
            samples = self._order.count
            repeats = max(self._order.repeats, int(order.max(initial=0)) // samples + 1)  # a sampler may use more
            tables = [
                {purpose: draw_table(samples, self.seed, epoch, purpose, repeats, view) for purpose in one.purposes}
                for view, one in enumerate(self.augmentations)
            ]
            self._drawn = epoch, order, tables
        return self._drawn[1:]

    def _make_chunk(self, start: _ChunkStart) -> Batch:
        order, _ = self._random_numbers(start.epoch)
        last = min(start.batch + self._chunk_batches, len(self))
        return self.batch_of(order[start.batch * self.batch_size : last * self.batch_size], start.epoch)

    def batch_of(self, slots: np.ndarray, epoch: int = 0) -> Batch:
        _, tables = self._random_numbers(epoch)
        index = slots.astype(np.int64) % self._order.count
        chunk: Batch = {}
        if not self._stores:
            chosen = to_device({"index": index}, self.device)["index"]
        else:
            views = []
            for augmentation, store, of_view in zip(self.augmentations, self._stores, tables, strict=True):
                draws = {purpose: table[slots] for purpose, table in of_view.items()}
                plan = augmentation.plan(draws, self._height, self._width)
                sent = to_device({"index": index, **plan}, self.device)
                chosen = sent["index"]
                views.append(self._augment(augmentation, store, chosen, sent))
            chunk = {"images": views[0]} if len(views) == 1 else {"views": views}
        chunk |= {name: values.index_select(0, chosen) for name, values in self._columns.items()}
        return chunk | {"index": chosen} if self._index else chunk

    def _augment(
        self, augmentation: BatchedAugmentation, store: Tensor, chosen: Tensor, plan: dict[str, Tensor]
    ) -> Tensor:
        images = augmentation.apply(store, chosen, plan)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        normalised = torch.addcmul(self._shift, images.to(torch.float32, memory_format=layout), self._scale)
        return erase(normalised, plan)
