"""CIFAR-10-LT and CIFAR-100-LT from the official python files.

The papers take of class c the n_c = int(500 F^(-c / 99)) (CIFAR-10: int(5000 F^(-c / 9))) training images, classes in
label order, F the imbalance; the test set is the full one. The released code draws which ones by an unseeded shuffle;
here they are the first in file order.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from batchformer.data.arrays import ArrayData, Split
from batchformer.data.pickles import image_array, read_pickle
from batchformer.data.tail import tail_subset
from batchformer.errors import UserError


class _CIFAR(ArrayData):
    # the statistics of CIFAR-10, which the released code uses for CIFAR-100 as well
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)
    image_size = 32

    folder: ClassVar[str]
    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]
    names_file: ClassVar[str]
    label_key: ClassVar[str]
    names_key: ClassVar[str]
    torchvision_name: ClassVar[str]

    def __init__(
        self,
        root: str | None = None,
        imbalance: float = 100.0,
        download: bool = False,
        augment: Literal["none", "crop-flip", "autoaugment-cutout"] = "autoaugment-cutout",
        batch_size: int = 512,
        seed: int = 0,
        workers: int = 0,
        on_device: Literal["auto"] | bool = "auto",
        drop_last: bool = True,
        eval_batch_size: int = 2000,
        channels_last: bool = False,
    ) -> None:
        super().__init__(root, batch_size, seed, workers, on_device, drop_last, eval_batch_size, channels_last)
        self.imbalance = imbalance
        self.download = download
        self.augment = augment

    def prepare_data(self) -> None:
        """Download by torchvision where asked for and needed; Lightning calls this in one process of each machine."""
        if not self.download or self._missing() is None:
            return
        if self.root is None:
            raise UserError("data.root is not set: name the folder the download is to go to.")
        import torchvision

        try:
            getattr(torchvision.datasets, self.torchvision_name)(self.root, download=True)
        except Exception as error:  # no network, no space, a broken archive
            raise UserError(f"{self.torchvision_name} could not be downloaded to {self.root}: {error}") from error

    def setup(self, stage: str | None = None) -> None:
        if not self._ready:
            self.prepare_data()
        super().setup(stage)

    def _base(self) -> Path:
        return Path(self.root or ".").expanduser() / self.folder

    def _missing(self) -> str | None:
        files = (*self.train_files, self.test_file, self.names_file)
        return next((name for name in files if not (self._base() / name).is_file()), None)

    def _read_splits(self) -> tuple[Split, Split, list[str]]:
        if self.root is None:
            raise UserError(
                f"data.root is not set: name the folder that holds {self.folder}/, or set data.download to true."
            )
        missing = self._missing()
        if missing is not None:
            raise UserError(
                f"{self.torchvision_name} was looked for in {self._base()}, but {missing} is not there: "
                f"set data.root to the folder that holds {self.folder}/, or data.download to true."
            )
        names = self._class_names()
        train = self._join([self._read_file(name, len(names)) for name in self.train_files])
        counts = np.bincount(train.labels, minlength=len(names))
        # 500 (CIFAR-10: 5000) in the official files, less in a miniature; files cut to the tail have the whole head
        kept = tail_subset(train.labels, names, int(counts.max()), self.imbalance)
        return Split(train.images[kept], train.labels[kept]), self._read_file(self.test_file, len(names)), names

    def _class_names(self) -> list[str]:
        path = self._base() / self.names_file
        names: Any = read_pickle(path).get(self.names_key)
        if not isinstance(names, list) or not names:
            raise UserError(f"{path} is damaged: it has no list '{self.names_key}'; unpack or download it again.")
        return [str(name) for name in names]

    def _read_file(self, name: str, classes: int) -> Split:
        path = self._base() / name
        entry = read_pickle(path)
        images = image_array(entry, "data", path)
        labels = np.asarray(entry.get(self.label_key, ()))
        if (
            labels.shape != (len(images),)
            or labels.dtype.kind != "i"
            or not (0 <= labels.min() <= labels.max() < classes)
        ):
            raise UserError(
                f"{path} is damaged: '{self.label_key}' is not one label from 0 to {classes - 1} for each of its "
                f"{len(images)} images; unpack or download it again."
            )
        return Split(images, labels.astype(np.int64))

    @staticmethod
    def _join(parts: list[Split]) -> Split:
        return Split(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


class CIFAR100LT(_CIFAR):
    """CIFAR-100-LT: `root` holds cifar-100-python/. 10,847 training images at imbalance 100, 9,502 at 200."""

    folder = "cifar-100-python"
    train_files = ("train",)
    test_file, names_file = "test", "meta"
    label_key, names_key = "fine_labels", "fine_label_names"
    torchvision_name = "CIFAR100"


class CIFAR10LT(_CIFAR):
    """CIFAR-10-LT: `root` holds cifar-10-batches-py/. 12,406 training images at imbalance 100."""

    folder = "cifar-10-batches-py"
    train_files = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
    test_file, names_file = "test_batch", "batches.meta"
    label_key, names_key = "labels", "label_names"
    torchvision_name = "CIFAR10"
