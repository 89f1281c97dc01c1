"""The embedded data set: handwritten digits of 8 x 8 pixels from scikit-learn, with a long tail. No download."""

from typing import Any, Literal

import numpy as np

from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.classification import tail_subset

LAYOUT = "embedded (scikit-learn), no files needed"
_TRAIN_PER_CLASS = 145
_BRIGHTEST = 16


class DigitsLT(ArrayData):
    """Of each digit the first 145 images are for training and the rest (29 to 38) for testing; then the tail is cut.

    A split by file order and not at random: later images come from other writers, and the split is the same for
    everybody. At imbalance 20 the zeros keep 145 training images and the nines 7; at 1 all classes keep theirs.
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
        from sklearn.datasets import load_digits

        digits = load_digits()
        grey = np.rint(digits.images * (255 / _BRIGHTEST)).astype(np.uint8)
        images = np.repeat(grey[:, None], 3, axis=1)
        labels = digits.target.astype(np.int64)
        names = [str(name) for name in digits.target_names]
        turn = np.empty(len(labels), dtype=np.int64)
        for c in range(len(names)):
            members = np.flatnonzero(labels == c)
            turn[members] = np.arange(len(members))
        train, test = np.flatnonzero(turn < _TRAIN_PER_CLASS), np.flatnonzero(turn >= _TRAIN_PER_CLASS)
        kept = train[tail_subset(labels[train], names, _TRAIN_PER_CLASS, self.imbalance)]
        return {"train": Split(images[kept], labels[kept]), "val": Split(images[test], labels[test])}, names
