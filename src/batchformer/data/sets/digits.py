"""Handwritten digits of 8 x 8 pixels from scikit-learn, long-tailed or as rotated domains. No download."""

from typing import Any, Literal

import numpy as np
from PIL import Image

from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.classification import tail_subset
from batchformer.data.sets.domains import DomainData, Part

LAYOUT = "embedded (scikit-learn), no files needed"
_TRAIN_PER_CLASS = 145
_BRIGHTEST = 16
_DEGREES = {f"{degrees}-degrees": degrees for degrees in range(0, 90, 15)}


def _read_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Grey bytes, labels, the number of each image among those of its class, and the names of the classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = np.rint(digits.images * (255 / _BRIGHTEST)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    names = [str(name) for name in digits.target_names]
    turn = np.empty(len(labels), dtype=np.int64)
    for c in range(len(names)):
        members = np.flatnonzero(labels == c)
        turn[members] = np.arange(len(members))
    return grey, labels, turn, names


def _coloured(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, None], 3, axis=1)


class DigitsLT(ArrayData):
    """Long-tailed digits: of each digit the first 145 images for training, reduced to the tail, the rest for testing.

    Split by file order and not at random: later images (29 to 38 per digit) come from other writers, and the split is
    always the same. At imbalance 20 the zeros keep 145 training images and the nines 7; at 1 all classes keep theirs.
    """

    mean = (0.305, 0.305, 0.305)
    std = (0.377, 0.377, 0.377)
    native_size = image_size = 8

    def __init__(
        self,
        imbalance: float = 20.0,
        augment: Literal["none", "shift"] = "shift",
        root: str | None = None,
        image_size: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, image_size=image_size, statistics="data", **options)
        self.imbalance = imbalance

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        grey, labels, turn, names = _read_digits()
        images = _coloured(grey)
        train, test = np.flatnonzero(turn < _TRAIN_PER_CLASS), np.flatnonzero(turn >= _TRAIN_PER_CLASS)
        kept = train[tail_subset(labels[train], names, _TRAIN_PER_CLASS, self.imbalance)]
        return {"train": Split(images[kept], labels[kept]), "val": Split(images[test], labels[test])}, names


class DigitsDomains(DomainData, ArrayData):
    """The digits turned by 0, 15, 30, 45, 60 and 75 degrees: six domains of some 300 images.

    As in Rotated MNIST (DomainBed) the images are divided among the domains, every sixth one of a digit to each, so no
    image is seen under two angles.
    """

    mean, std = DigitsLT.mean, DigitsLT.std
    native_size = image_size = 8

    def __init__(
        self,
        root: str | None = None,
        *,
        augment: Literal["none", "shift"] = "shift",
        image_size: int = 8,
        batch_size: int = 160,
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, image_size=image_size, batch_size=batch_size, **options)

    def _find_domains(self) -> tuple[str, ...]:
        return tuple(_DEGREES)

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        chosen, (grey, labels, turn, names) = self._choose_domains(), _read_digits()
        found = {}
        for name in chosen:
            members = np.flatnonzero(turn % len(_DEGREES) == list(_DEGREES).index(name))
            turned = (Image.fromarray(one).rotate(_DEGREES[name], Image.Resampling.BILINEAR) for one in grey[members])
            images = _coloured(np.stack([np.asarray(one) for one in turned]))
            found[name] = [Part(images, labels[members], "the digits")]
        sets = self._arrange(found, names)
        return {name: Split(part.samples, part.labels, fields) for name, (part, fields) in sets.items()}, names
