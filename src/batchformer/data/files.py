"""Data sets of image files: what lists of files and folders of images have in common."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.base import ClassificationData
from batchformer.data.checks import check_labels, class_counts
from batchformer.data.epochs import EpochLoader
from batchformer.data.names import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FileAugmentation,
    Statistics,
    check_image_options,
    check_statistics,
)
from batchformer.errors import UserError


class Listing(NamedTuple):
    """Image files relative to the data set's root, their labels, and where they were listed (for messages)."""

    paths: list[str]
    labels: np.ndarray
    source: str


class FileData(ClassificationData):
    """Subclasses list their files in `_read_listings`; images are read and augmented in `workers` processes."""

    #: whether photos are turned as their cameras noted; published data sets are read as stored, as everybody does
    upright = False

    def __init__(
        self,
        root: str | None = None,
        *,
        augment: FileAugmentation = "imagenet-lt",
        image_size: int = 224,
        mean: Statistics = IMAGENET_MEAN,
        std: Statistics = IMAGENET_STD,
        batch_size: int = 128,
        seed: int = 0,
        workers: int = 4,
        on_device: Literal["auto"] | bool = "auto",
        drop_last: bool = True,
        eval_batch_size: int = 256,
        channels_last: bool = False,
        erase_prob: float = 0.0,
        augment_repeats: int = 1,
    ) -> None:
        super().__init__(
            root, batch_size=batch_size, seed=seed, workers=workers, on_device=on_device, drop_last=drop_last,
            eval_batch_size=eval_batch_size, channels_last=channels_last, augment_repeats=augment_repeats,
        )  # fmt: skip
        if self.on_device is True:
            raise UserError(
                "data.on_device is for data sets held in memory; image files are read on the host: leave it out."
            )
        check_image_options(image_size, erase_prob)
        check_statistics(std)
        self.augment = augment
        self.image_size = image_size
        self.erase_prob = erase_prob
        self.mean, self.std = mean, std

    @abstractmethod
    def _read_listings(self, root: str) -> tuple[Listing, Listing, list[str]]:
        """(training files, test files, class names)."""

    def _read(self) -> None:
        if self.root is None:
            raise UserError("data.root is not set: name the folder the images are in.")
        root = os.path.expanduser(self.root)
        if not os.path.isdir(root):
            raise UserError(f"data.root {self.root} is not a folder: name the one the images are in (--data-root DIR).")
        train, test, self.class_names = self._read_listings(root)
        self.class_counts = class_counts(train.labels, self.class_names, train.source)
        check_labels(test.labels, len(self.class_names), test.source)
        for listing in (train, test):
            # one look is enough to find a wrong root; looking at all would take minutes on a network disk
            first = os.path.join(root, listing.paths[0])
            if not os.path.isfile(first):
                raise UserError(f"image {first}, the first in {listing.source}, does not exist: check data.root.")
        self.train_images, self.test_images = len(train.paths), len(test.paths)
        lines = "".join(f"{path} {label}\n" for path, label in zip(train.paths, train.labels, strict=True))
        self.fingerprint = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
        self._listings = {True: train, False: test}
        self._folder = os.path.join(root, "")

    def _make_loader(self, training: bool) -> EpochLoader:
        from batchformer.data.augment.host import file_transform
        from batchformer.data.host_loader import FileSamples

        listing = self._listings[training]
        transform = (
            file_transform(self.augment, self.image_size, self.mean, self.std, self.erase_prob)
            if training
            else self.predict_transform
        )
        labels = torch.from_numpy(listing.labels)
        seed = self.seed if training else None
        samples = FileSamples(listing.paths, labels, transform, seed, self._folder, self.upright)
        return self._host_loader(samples, training)

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        from batchformer.data.augment.host import evaluation_transform

        return evaluation_transform(self.augment, self.image_size, self.mean, self.std)


def read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}).") from error


def find_file(name: str, root: str, keyword: str) -> Path:
    """A text file beside the images, looked for in `root` and then in the working directory."""
    given = Path(name).expanduser()
    candidates = [given] if given.is_absolute() else [Path(root) / given, given]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    raise UserError(f"data.{keyword}: there is no file {looked}.")
