"""CIFAR-10 and CIFAR-100 from the official python files: complete, and with a long tail.

For the long tail the papers take of class c the n_c = int(500 F^(-c / 99)) (CIFAR-10: int(5000 F^(-c / 9))) training
images, classes in label order, F the imbalance; the test set is the full one. The released code draws which ones by an
unseeded shuffle; here they are the first in file order.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from batchformer.data.arrays import ArrayData, Split
from batchformer.data.names import ArrayAugmentation
from batchformer.data.pickles import image_array, read_pickle
from batchformer.data.tail import tail_subset
from batchformer.errors import UserError


class _Files(NamedTuple):
    """The official layout, and torchvision's name for the download."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_key: str
    names_key: str
    torchvision_name: str


_CIFAR10 = _Files(
    "cifar-10-batches-py",
    tuple(f"data_batch_{part}" for part in range(1, 6)),
    "test_batch",
    "batches.meta",
    "labels",
    "label_names",
    "CIFAR10",
)
_CIFAR100 = _Files("cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", "CIFAR100")


class _CIFAR(ArrayData):
    # the statistics of CIFAR-10, which the released code uses for CIFAR-100 as well
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)
    native_size = image_size = 32

    files: ClassVar[_Files]

    def __init__(self, root: str | None, download: bool, **options: Any) -> None:
        super().__init__(root, **options)
        self.download = download

    def prepare_data(self) -> None:
        """Download by torchvision where asked for and needed; Lightning calls this in one process of each machine."""
        if not self.download or self._missing() is None:
            return
        if self.root is None:
            raise UserError("data.root is not set: name the folder the download is to go to.")
        import torchvision

        name = self.files.torchvision_name
        try:
            getattr(torchvision.datasets, name)(self.root, download=True)
        except Exception as error:  # no network, no space, a broken archive
            raise UserError(f"{name} could not be downloaded to {self.root}: {error}") from error

    def setup(self, stage: str | None = None) -> None:
        if not self._ready:
            self.prepare_data()
        super().setup(stage)

    def _keep(self, train: Split, names: list[str]) -> Split:
        """The part of the training images that is trained on."""
        return train

    def _base(self) -> Path:
        return Path(self.root or ".").expanduser() / self.files.folder

    def _missing(self) -> str | None:
        files = (*self.files.train, self.files.test, self.files.names)
        return next((name for name in files if not (self._base() / name).is_file()), None)

    def _read_splits(self) -> tuple[Split, Split, list[str]]:
        folder = self.files.folder
        if self.root is None:
            raise UserError(
                f"data.root is not set: name the folder that holds {folder}/, or set data.download to true."
            )
        missing = self._missing()
        if missing is not None:
            raise UserError(
                f"{self.files.torchvision_name} was looked for in {self._base()}, but {missing} is not there: "
                f"set data.root to the folder that holds {folder}/, or data.download to true."
            )
        names = self._class_names()
        train = self._join([self._read_file(name, len(names)) for name in self.files.train])
        return self._keep(train, names), self._read_file(self.files.test, len(names)), names

    def _class_names(self) -> list[str]:
        path, key = self._base() / self.files.names, self.files.names_key
        names: Any = read_pickle(path).get(key)
        if not isinstance(names, list) or not names:
            raise UserError(f"{path} is damaged: it has no list '{key}'; unpack or download it again.")
        return [str(name) for name in names]

    def _read_file(self, name: str, classes: int) -> Split:
        path, key = self._base() / name, self.files.label_key
        entry = read_pickle(path)
        images = image_array(entry, "data", path)
        labels = np.asarray(entry.get(key, ()))
        if (
            labels.shape != (len(images),)
            or labels.dtype.kind != "i"
            or not (0 <= labels.min() <= labels.max() < classes)
        ):
            raise UserError(
                f"{path} is damaged: '{key}' is not one label from 0 to {classes - 1} for each of its "
                f"{len(images)} images; unpack or download it again."
            )
        return Split(images, labels.astype(np.int64))

    @staticmethod
    def _join(parts: list[Split]) -> Split:
        return Split(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


class _Complete(_CIFAR):
    """All images, at `image_size`: 32 as they are, anything else resized (see ArrayData)."""

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        image_size: int = 32,
        augment: ArrayAugmentation = "randaugment",
        erase_prob: float = 0.0,
        augment_repeats: int = 1,
        statistics: Literal["data", "imagenet"] = "data",
        batch_size: int = 512,
        seed: int = 0,
        workers: int = 0,
        on_device: Literal["auto"] | bool = "auto",
        drop_last: bool = True,
        eval_batch_size: int = 500,
        channels_last: bool = False,
    ) -> None:
        super().__init__(
            root, download, image_size=image_size, augment=augment, erase_prob=erase_prob,
            augment_repeats=augment_repeats, statistics=statistics, batch_size=batch_size, seed=seed, workers=workers,
            on_device=on_device, drop_last=drop_last, eval_batch_size=eval_batch_size, channels_last=channels_last,
        )  # fmt: skip


class _WithTail(_CIFAR):
    def __init__(
        self,
        root: str | None = None,
        imbalance: float = 100.0,
        download: bool = False,
        augment: ArrayAugmentation = "autoaugment-cutout",
        batch_size: int = 512,
        seed: int = 0,
        workers: int = 0,
        on_device: Literal["auto"] | bool = "auto",
        drop_last: bool = True,
        eval_batch_size: int = 2000,
        channels_last: bool = False,
    ) -> None:
        super().__init__(
            root, download, augment=augment, batch_size=batch_size, seed=seed, workers=workers,
            on_device=on_device, drop_last=drop_last, eval_batch_size=eval_batch_size, channels_last=channels_last,
        )  # fmt: skip
        self.imbalance = imbalance

    def _keep(self, train: Split, names: list[str]) -> Split:
        counts = np.bincount(train.labels, minlength=len(names))
        # 500 (CIFAR-10: 5000) in the official files, less in a miniature; files cut to the tail have the whole head
        kept = tail_subset(train.labels, names, int(counts.max()), self.imbalance)
        return Split(train.images[kept], train.labels[kept])


class CIFAR100(_Complete):
    """CIFAR-100: `root` holds cifar-100-python/. 50,000 training and 10,000 test images."""

    files = _CIFAR100


class CIFAR10(_Complete):
    """CIFAR-10: `root` holds cifar-10-batches-py/. 50,000 training and 10,000 test images."""

    files = _CIFAR10


class CIFAR100LT(_WithTail):
    """CIFAR-100-LT: `root` holds cifar-100-python/. 10,847 training images at imbalance 100, 9,502 at 200."""

    files = _CIFAR100


class CIFAR10LT(_WithTail):
    """CIFAR-10-LT: `root` holds cifar-10-batches-py/. 12,406 training images at imbalance 100."""

    files = _CIFAR10
