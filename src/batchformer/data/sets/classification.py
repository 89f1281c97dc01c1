"""Base class of data sets of images with one label: class names and counts, checks of labels, long tails."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from batchformer.data.augment.batched import batched_augmentation
from batchformer.data.loading.data_module import DataModule
from batchformer.data.loading.device_loader import DeviceLoader
from batchformer.data.loading.order import derived_key
from batchformer.errors import UserError, did_you_mean


class ClassificationData(DataModule):
    """A training set, balanced or with a long tail, and a test set.

    After `setup`: `class_names`, `class_counts` (training images per class, in label order), `num_classes`,
    `train_images`, `train_labels`, `test_images`, `fingerprint` (sha256 of what is trained on). Known from the start:
    `mean`, `std`, `image_size`, `predict_transform`. Options, order and augmentation of an epoch: see `DataModule`.

    `on_device`: whether the data are stored and augmented on the training device ("auto": where possible).
    """

    augment: str
    erase_prob: float
    train_labels: np.ndarray
    #: whether classes may be without a training image, as in zero-shot recognition
    allow_empty_classes = False

    def __init__(self, root: str | None = None, *, on_device: Literal["auto"] | bool = "auto", **options: Any) -> None:
        super().__init__(root, **options)
        self.on_device = on_device

    @property
    def view_augments(self) -> list[str]:
        """The augmentation of each view of a training image: those of `views`, or `augment` for all."""
        if isinstance(self.views, list):
            return self.views
        return [self.augment] * (getattr(self._task(), "views", 1) if self.views is None else self.views)

    def _check_views(self, known: Collection[str]) -> None:
        for name in self.views if isinstance(self.views, list) else ():
            if name not in known:
                raise UserError(
                    f"data.views: there is no augmentation {name!r}; choose from {', '.join(known)}."
                    + did_you_mean(name, known)
                )

    def _labelled(self, split: Any) -> dict[str, Any]:
        """Arguments common to all loaders and samples: the labels and fields of a set, and the index."""
        fields = {name: torch.from_numpy(values) for name, values in split.fields.items()}
        return {"labels": torch.from_numpy(split.labels), "fields": fields, "index": self.index}

    def _device_loader(self, images: torch.Tensor, split: Any, name: str, training: bool) -> DeviceLoader:
        """Loader of images stored as bytes on the training device and augmented there."""
        sizes, names = (images.shape[2], self.image_size), self.view_augments if training else [self.augment]
        return DeviceLoader(
            images,
            mean=self.mean,
            std=self.std,
            device=self._device(),
            augmentation=[batched_augmentation(name, *sizes, self.erase_prob, self.mean) for name in names],
            **self._labelled(split),
            **self._loader_options(name, training),
        )

    def feature_loader(self, features: torch.Tensor, name: str = "train", **order: Any) -> DeviceLoader:
        """Training batches of `features` and `labels`: those computed for a set in place of its images, in its order.

        `order`: as for `loader_in_order`.
        """
        options = {**self._loader_options(name, training=True), **order}
        labels = torch.from_numpy(self.set_labels[name])
        return DeviceLoader(None, labels, fields={"features": features}, device=self._device(), **options)

    def _count(self, sets: Mapping[str, Any], digest: Any) -> None:
        """Check the labels of the sets and set the attributes that are available after `setup`.

        Each set has `labels`, `fields` and perhaps a `source` for messages; `digest` is a hash of the training samples.
        """
        sources = {name: getattr(each, "source", f"the split {name!r}") for name, each in sets.items()}
        train, empty = sets["train"], self.allow_empty_classes
        self.class_counts = count_classes(train.labels, self.class_names, sources["train"], empty)
        for name in self.evaluation_sets:
            check_labels(sets[name].labels, self.num_classes, sources[name])
        self.set_labels = {name: each.labels for name, each in sets.items()}
        self.train_labels, self.train_images = train.labels, len(train.labels)
        self.test_images = sum(len(sets[name].labels) for name in self.evaluation_sets)
        for name, values in sorted(train.fields.items()):
            digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
        self.fingerprint = digest.hexdigest()


LongTailedData = ClassificationData  # former name, for compatibility


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Check that labels are integers in 0 .. classes - 1."""
    if not len(labels):
        raise UserError(f"no images in {where}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise UserError(f"label {wrong} in {where} is not one of the {classes} classes 0 to {classes - 1}.")


def count_classes(labels: np.ndarray, names: list[str], where: str, allow_empty: bool = False) -> list[int]:
    """Training images per class.

    A class without any is refused unless `allow_empty`: Balanced Softmax takes the log of the count.
    """
    check_labels(labels, len(names), where)
    if len(names) < 2:
        raise UserError(f"{where} has one class only ({names[0]}): there is nothing to tell apart; add another class.")
    counts = np.bincount(labels, minlength=len(names)).tolist()
    if 0 in counts and not allow_empty:
        empty = counts.index(0)
        others = counts.count(0) - 1
        more = f" (and {others} more)" if others else ""
        raise UserError(
            f"class {empty} ({names[empty]}){more} has no training image in {where}: "
            f"add some, or remove the class and number the labels 0, 1, 2, ... without gaps."
        )
    return counts


def stratified_part(
    names: Sequence[str], labels: np.ndarray, fraction: float, seed: int, purpose: str, at_least: int = 0
) -> np.ndarray:
    """Which samples are in a part of this fraction of every class, as a mask.

    A class keeps at least one sample outside of the part, and where it has two, `at_least` so many are inside. They are
    drawn by a hash of (seed, purpose, name): the same ones in every run, and mostly the same when some are added.
    """
    inside = np.zeros(len(labels), dtype=bool)
    keys = np.array([derived_key(seed, purpose, name) % 2**63 for name in names], dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        number = min(max(at_least, round(len(members) * fraction)), len(members) - 1)
        inside[members[np.argsort(keys[members], kind="stable")[:number]]] = True
    return inside


def tail_counts(classes: int, largest: int, imbalance: float) -> list[int]:
    """Images per class: int(largest * imbalance ** (-c / (classes - 1))), class 0 the head (Cui et al., 2019).

    Evaluated in exactly this form: `imbalance ** -x` and `(1 / imbalance) ** x` differ in the last bit, and `int` cuts.
    """
    if not imbalance >= 1:
        raise UserError(
            f"imbalance must be 1 (balanced) or more, got {imbalance}: it is the largest class / the smallest."
        )
    counts = [int(largest * imbalance ** (-c / max(classes - 1, 1))) for c in range(classes)]
    if counts[-1] < 1:
        raise UserError(
            f"imbalance {imbalance:g} leaves class {counts.index(0)} without a training image "
            f"(the largest class has {largest}): choose {largest} or less."
        )
    return counts


def tail_subset(labels: np.ndarray, names: list[str], largest: int, imbalance: float) -> np.ndarray:
    """The first `tail_counts` images of each class in file order, as ascending positions in the file.

    The papers' code shuffles before it selects them, without a seed, so their subsets cannot be reproduced; ours is
    always the same.
    """
    chosen = []
    for c, needed in enumerate(tail_counts(len(names), largest, imbalance)):
        members = np.flatnonzero(labels == c)
        if len(members) < needed:
            raise UserError(
                f"class {c} ({names[c]}) needs {needed} training images at imbalance {imbalance:g}, "
                f"but the file has {len(members)}: use the complete official file."
            )
        chosen.append(members[:needed])
    return np.sort(np.concatenate(chosen))
