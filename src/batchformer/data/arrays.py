"""Data sets small enough to be held in memory as bytes: the digits, CIFAR and Tiny-ImageNet."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from batchformer.data.augment.batched import batched_augmentation
from batchformer.data.base import ClassificationData
from batchformer.data.checks import check_labels, class_counts
from batchformer.data.device_loader import DeviceLoader
from batchformer.data.epochs import EpochLoader
from batchformer.data.names import IMAGENET_MEAN, IMAGENET_STD, check_image_options


class Split(NamedTuple):
    """Images as bytes, and their labels."""

    images: UInt8[np.ndarray, "n 3 height width"]
    labels: Int[np.ndarray, " n"]


class ArrayData(ClassificationData):
    """Subclasses have a `native_size`, their own `mean` and `std`, and read their two splits in `_read_splits`.

    On a device (`on_device` true or "auto") both splits lie there and batches are augmented there, on CUDA as on the
    CPU; with `on_device=False` timm and torchvision v2 augment image by image, in `workers` processes.

    `image_size` is the size trained at, by default the native one. At another size "resized-crop" and "randaugment"
    cut a random region and resize it, and evaluation resizes the image to 256 / 224 of the size and takes the centre;
    with the other augmentations the whole image is resized. `statistics` says by which mean and deviation images are
    normalised: those of the data set, or ImageNet's.
    """

    native_size: ClassVar[int]

    def __init__(
        self,
        root: str | None,
        *,
        augment: str,
        image_size: int | None = None,
        statistics: Literal["data", "imagenet"] = "data",
        erase_prob: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.image_size = self.native_size if image_size is None else image_size
        check_image_options(self.image_size, erase_prob)
        if statistics == "imagenet":
            self.mean, self.std = IMAGENET_MEAN, IMAGENET_STD
        self.augment, self.erase_prob = augment, erase_prob

    @abstractmethod
    def _read_splits(self) -> tuple[Split, Split, list[str]]:
        """(training split, test split, class names)."""

    def _read(self) -> None:
        train, test, self.class_names = self._read_splits()
        self.class_counts = class_counts(train.labels, self.class_names, "the training split")
        check_labels(test.labels, len(self.class_names), "the test split")
        self.train_images, self.test_images = len(train.labels), len(test.labels)
        digest = hashlib.sha256(np.ascontiguousarray(train.labels, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(train.images).data)
        self.fingerprint = digest.hexdigest()
        self._splits = {True: train, False: test}

    def _make_loader(self, training: bool) -> EpochLoader:
        images, labels = (torch.from_numpy(array) for array in self._splits[training])
        rank, world = self._rank_and_world()
        if self.on_device is False:
            return self._make_host_loader(training, images, labels)
        return DeviceLoader(
            images,
            labels,
            batch_size=self.batch_size if training else self.eval_batch_size,
            mean=self.mean,
            std=self.std,
            device=self._device(),
            augmentation=batched_augmentation(
                self.augment, self.native_size, self.image_size, self.erase_prob, self.mean
            ),
            training=training,
            seed=self.seed,
            drop_last=self.drop_last,
            rank=rank,
            world=world,
            epoch_source=self._current_epoch if training else None,
            channels_last=self.channels_last,
            repeats=self.augment_repeats,
        )

    def _make_host_loader(self, training: bool, images: Tensor, labels: Tensor) -> EpochLoader:
        from batchformer.data.augment.host import array_evaluation, array_transform
        from batchformer.data.host_loader import ArraySamples

        sizes = self.native_size, self.image_size
        if training:
            transform = array_transform(self.augment, *sizes, self.mean, self.std, self.erase_prob)
        else:
            transform = array_evaluation(self.augment, *sizes, self.mean, self.std)
        return self._host_loader(ArraySamples(images, labels, transform, self.seed if training else None), training)

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        from batchformer.data.augment.host import small_image_transform

        return small_image_transform(self.augment, self.native_size, self.image_size, self.mean, self.std)
