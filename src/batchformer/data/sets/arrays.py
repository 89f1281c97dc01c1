"""Base classes of data sets in memory: images as bytes (the digits, CIFAR, Tiny-ImageNet), or features."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from batchformer.data.augment.batched import BATCHED_AUGMENTATIONS
from batchformer.data.augment.options import IMAGENET_MEAN, IMAGENET_STD, check_images
from batchformer.data.loading.device_loader import DeviceLoader
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.sets.classification import ClassificationData
from batchformer.errors import UserError


@dataclass(frozen=True)
class Split:
    """Images as bytes (or features), their labels, and further fields of every sample (domains, pairs ...)."""

    images: UInt8[np.ndarray, "n 3 height width"] | Float[np.ndarray, "n dim"]
    labels: Int[np.ndarray, " n"]
    fields: dict[str, np.ndarray] = field(default_factory=dict)


class _SplitData(ClassificationData):
    """Base class of data sets that are read as a whole, by `read_splits`; subclasses make the loaders."""

    @abstractmethod
    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        """The splits by name, "train" and the `evaluation_sets`; and the class names."""

    def _read(self) -> None:
        self._splits, self.class_names = self.read_splits()
        train = self._splits["train"]
        digest = hashlib.sha256(np.ascontiguousarray(train.labels, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(train.images).data)
        self._count(self._splits, digest)


class ArrayData(_SplitData):
    """Base class of image data sets in memory, with a `native_size`, `mean` and `std`, and splits by `read_splits`.

    With `on_device` true or "auto" all splits are stored on the device and batches are augmented there, on CUDA or the
    CPU; with `on_device=False` timm and torchvision v2 augment image by image, in `workers` processes.

    `image_size` is the size trained at, by default the native one. At another size "resized-crop" and "randaugment"
    cut a random region and resize it, and evaluation resizes the image to 256 / 224 of the size and takes the centre;
    with the other augmentations the whole image is resized. `statistics` selects the mean and deviation for
    normalisation: those of the data set, or ImageNet's.
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
        if statistics == "imagenet":
            self.mean, self.std = IMAGENET_MEAN, IMAGENET_STD
        check_images(self.image_size, self.std, erase_prob)
        self._check_views(BATCHED_AUGMENTATIONS)
        self.augment, self.erase_prob = augment, erase_prob

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        if self.on_device is False:
            return self._make_host_loader(name, training)
        split = self._splits[name]
        return self._device_loader(torch.from_numpy(split.images), split, name, training)

    def _make_host_loader(self, name: str, training: bool) -> EpochLoader:
        from batchformer.data.augment.host import array_evaluation, array_transform
        from batchformer.data.loading.samples import ArraySamples

        split, sizes = self._splits[name], (self.native_size, self.image_size)
        transforms: list[Callable] = [array_evaluation(self.augment, *sizes, self.mean, self.std)]
        if training:
            common = (*sizes, self.mean, self.std, self.erase_prob)
            transforms = [array_transform(augment, *common) for augment in self.view_augments]
        images, seed = torch.from_numpy(split.images), self._seed_of(name) if training else None
        samples = ArraySamples(images, transform=transforms, seed=seed, **self._labelled(split))
        return self._host_loader(samples, name, training)

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        from batchformer.data.augment.host import small_image_transform

        return small_image_transform(self.augment, self.native_size, self.image_size, self.mean, self.std)


class FeatureData(_SplitData):
    """Base class of data sets of features: a batch holds `features`, nothing is augmented, and there is one view.

    In the splits of subclasses `images` are the features, (n, dim) float32; `declare` adds `feature_dim`.
    """

    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(root, augment_repeats=1, views=1, **options)

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        split = self._splits[name]
        labelled = self._labelled(split)
        labelled["fields"] = {"features": torch.from_numpy(split.images), **labelled["fields"]}
        if self.on_device is not False:
            return DeviceLoader(None, device=self._device(), **labelled, **self._loader_options(name, training))
        from batchformer.data.loading.samples import LabelledSamples

        return self._host_loader(LabelledSamples(**labelled), name, training)

    def declare(self) -> dict[str, Any]:
        return {**super().declare(), "feature_dim": int(self._splits["train"].images.shape[1])}

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        raise UserError("this data set holds features and no images: there is nothing to make of an image.")
