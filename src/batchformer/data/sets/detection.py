"""Base class of data sets for detectors: options, targets, attributes after `setup`."""

import os
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from batchformer.data.augment.options import IMAGENET_MEAN, IMAGENET_STD, Statistics, check_at_least, check_images
from batchformer.data.info import HOLDOUT
from batchformer.data.loading.data_module import DataModule, ImageFile
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.sets.annotations import SkipsBad
from batchformer.data.sets.boxes import Categories, DetectionSamples, Scenes
from batchformer.data.sets.classification import stratified_part
from batchformer.data.sets.files import existing_root
from batchformer.errors import UserError
from batchformer.metrics.measures import count_shots

Labels = Literal["contiguous", "official"]


class DetectionData(SkipsBad, DataModule):
    """Images with boxes, for transformers' detectors: `model(**batch)`.

    A batch is a dict of `pixel_values`, `pixel_mask` (1 where an image is, 0 where it is padded) and `labels`, one dict
    an image with `class_labels`, `boxes` (centre x, y, width, height in fractions of the image), `area`, `iscrowd`
    (always 0: crowds are not trained on), `image_id`, `orig_size` and `size` (height, width), and, when evaluating,
    `truth`: all annotations, crowds too, in pixels of the original image, for `CocoAP`.

    `image_size` is the largest short side; DETR's other sizes are in proportion to it unless `scales` and `max_size`
    are given. Batches are padded to a multiple of `pad_multiple`. `labels="contiguous"` numbers the categories 0, 1, 2
    in the order of their ids; `"official"` keeps the ids (COCO's go to 90 with gaps: 91 classes). `limit_train` and
    `limit_val` take the first so many images; `evaluate_on="train"` evaluates on the images trained on. `keep_empty`
    keeps training images without any box.

    `repeat`: an epoch goes through the training images that many times, each time in a new order, for sets of a few
    dozen images, with very short epochs. The batches are those of as many epochs.

    `cache` keeps in memory what is the same in every epoch, for sets that fit there: the transformed samples where the
    transform is deterministic (`augment="none"`, and when evaluating), else the decoded images. Each worker process has
    its own cache: memory is used once per worker, and time is saved once every worker has read an image. With
    `cache="device"` and no workers, transformed training samples stay on the device of the run and batches are collated
    there. Batches are the same with and without.

    `holdout`: this part of the training images, drawn by `split_seed` and stratified by the rarest class in them, is
    not trained on but evaluated as a set of its own, which may choose a checkpoint (`run.best`) or end a run
    (`run.early_stop`). `skip_bad` names the file of a check (`batchformer data RECIPE --check`); what it found is left
    out.

    After `setup`: `num_classes`, `class_names` and `id2label` by label, `category_ids` by label (-1 in a gap),
    `is_thing`, `class_counts` (training boxes), `train_images`, `test_images`, `train_boxes`, `test_boxes`,
    `fingerprint`.
    """

    _counted = ("train_images", "test_images", "train_boxes", "test_boxes", "image_size")

    category_ids: list[int]
    is_thing: list[bool]
    train_boxes: int
    test_boxes: int

    def __init__(
        self,
        root: str | None = None,
        *,
        image_size: int = 800,
        max_size: int | None = None,
        scales: list[int] | None = None,
        augment: Literal["detr", "flip", "none"] = "detr",
        pad_multiple: int = 1,
        labels: Labels = "contiguous",
        keep_empty: bool = True,
        limit_train: int | None = None,
        limit_val: int | None = None,
        evaluate_on: Literal["train", "val"] = "val",
        mean: Statistics = IMAGENET_MEAN,
        std: Statistics = IMAGENET_STD,
        batch_size: int = 2,
        workers: int = 4,
        eval_batch_size: int = 4,
        repeat: int = 1,
        cache: bool | Literal["device"] = False,
        holdout: float = 0.0,
        split_seed: int = 0,
        skip_bad: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            root, batch_size=batch_size, workers=workers, eval_batch_size=eval_batch_size,
            augment_repeats=1, views=1, index=False, **options,
        )  # fmt: skip
        check_images(image_size, std)
        smallest = None if scales is None else min(scales, default=0)
        check_at_least(1, max_size=max_size, scales=smallest, pad_multiple=pad_multiple, repeat=repeat)
        check_at_least(1, limit_train=limit_train, limit_val=limit_val)
        if max_size is not None and max_size < image_size:
            raise UserError(
                f"data.max_size, the longest side, must be at least data.image_size, got {max_size} and {image_size}."
            )
        self.image_size, self.max_size, self.scales = image_size, max_size, scales
        self.augment, self.pad_multiple = augment, pad_multiple
        self.labels, self.keep_empty = labels, keep_empty
        self.limits = {"train": limit_train, "val": limit_val}
        self.evaluate_on = evaluate_on
        self.mean, self.std = mean, std
        self.repeat, self.cache = repeat, cache
        self.skip_bad = skip_bad
        self.hold_out(holdout, split_seed)
        self._kept: dict[tuple[str, bool], Any] = {}  # cached samples, by part and whether they are trained on

    @abstractmethod
    def _read_scenes(self, root: str) -> tuple[dict[str, Scenes], Categories]:
        """Images to train ("train") and to evaluate on ("val"), their labels as positions in the categories."""

    @property
    def id2label(self) -> dict[int, str]:
        """Class names by label, for transformers' configurations."""
        return dict(enumerate(self.class_names))

    def evaluation_loader(self, name: str) -> EpochLoader:
        """The images of "train" or "val" as they are, with their truth, whatever `evaluate_on` says."""
        self.setup()
        return self._loader_of(name, training=False)

    def _read(self) -> None:
        root = existing_root(self.root)
        read, categories = self._read_scenes(root)
        train, val = read["train"], read["val"]
        self._set_categories(categories)
        sets = {"train": train, "val": val}
        if self.holdout:
            held = scene_part(train, self.holdout, self.split_seed, HOLDOUT)
            sets = {
                "train": train.subset(np.flatnonzero(~held)),
                "val": val,
                HOLDOUT: train.subset(np.flatnonzero(held)),
            }
        if self.skipped:
            sets = {name: self._without_bad(scenes, root, name == "train") for name, scenes in sets.items()}
        train = sets["train"]
        if not self.keep_empty:
            sets["train"] = train.subset(
                np.unique(np.repeat(np.arange(len(train)), np.diff(train.first))[train.trained()])
            )
        self._scenes: dict[str, Scenes] = {}
        for part, scenes in sets.items():
            scenes = scenes.subset(np.arange(len(scenes))[: self.limits.get(part)])
            if not len(scenes):
                raise UserError(f"{scenes.source} lists no image{' with a box' if not self.keep_empty else ''}.")
            if not os.path.isfile(scenes.path(0)):
                raise UserError(
                    f"image {scenes.path(0)}, the first in {scenes.source}, does not exist: check data.root."
                )
            self._scenes[part] = replace(scenes, labels=self._label_of[scenes.labels])
        train, test = self._scenes["train"], self._scenes[self.evaluate_on]
        self.class_counts = np.bincount(train.labels[train.trained()], minlength=self.num_classes).tolist()
        self.train_images, self.test_images = len(train), len(test)
        self.train_boxes, self.test_boxes = sum(self.class_counts), int(test.trained().sum())
        if not self.train_boxes:
            raise UserError(f"{train.source} has no box to train on in the images chosen.")
        self.fingerprint = train.fingerprint()

    def _without_bad(self, scenes: Scenes, root: str, training: bool) -> Scenes:
        kept = [self.skipped.keeps(os.path.relpath(scenes.path(k), root), training) for k in range(len(scenes))]
        return scenes.subset(np.flatnonzero(kept))

    def image_files(self) -> dict[str, list[ImageFile]]:
        self.setup()
        root = existing_root(self.root)
        return {
            name: [
                ImageFile(os.path.relpath(scenes.path(k), root), None, (int(height), int(width)))
                for k, (height, width) in enumerate(scenes.sizes)
            ]
            for name, scenes in self._scenes.items()
        }

    def _set_categories(self, categories: Categories) -> None:
        """Set names, ids and things or stuff by label."""
        by_label = categories.ids if self.labels == "official" else range(len(categories.ids))
        position_of = {label: position for position, label in enumerate(by_label)}
        self._label_of = np.array(list(position_of), dtype=np.int64)
        labels = range(max(position_of) + 1)
        self.class_names = [categories.names[position_of[k]] if k in position_of else "N/A" for k in labels]
        self.category_ids = [categories.ids[position_of[k]] if k in position_of else -1 for k in labels]
        self.is_thing = [categories.things[position_of[k]] if k in position_of else False for k in labels]

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        part = "train" if training else name if name == HOLDOUT else self.evaluate_on
        return self._loader_of(part, training)

    def _loader_of(self, part: str, training: bool) -> EpochLoader:
        samples = self._cached_samples(part, training)
        return self._host_loader(samples, part, training, self.repeat if training else 1)

    def _cached_samples(self, part: str, training: bool) -> Any:
        """The samples; with `cache` all loaders share one object."""
        if not self.cache:
            return self._samples(part, training)
        if (part, training) not in self._kept:
            from batchformer.data.loading.samples import KeptSamples

            samples = self._samples(part, training)
            if training and self.augment != "none":
                samples.keep_decoded()
            else:
                there = training and self.cache == "device" and not self.workers
                samples = KeptSamples(samples, self._device() if there else None)
            self._kept[part, training] = samples
        return self._kept[part, training]

    def _samples(self, part: str, training: bool) -> Any:
        return self._samples_of(DetectionSamples, part, training)

    def _samples_of(self, kind: Any, part: str, training: bool, **options: Any) -> Any:
        return kind(
            self._scenes[part],
            self._transform(training),
            seed=self.seed if training else None,
            truth=not training,
            pad_multiple=self.pad_multiple,
            **options,
        )

    def remarks(self) -> list[str]:
        lines = super().remarks()
        for scenes in self._scenes.values():
            if count := scenes.left_out:
                boxes = "1 box is" if count == 1 else f"{count} boxes are"
                lines.append(f"{scenes.source}: {boxes} of negative width or height and left out")
        skip = self.skipped
        if number := len(skip.files | skip.training) + sum(len(entries) for _, entries in skip.annotations.values()):
            what = "file or box is" if number == 1 else "files or boxes are"
            lines.append(f"{number} {what} left out ({self.skip_bad})")
        if self.evaluate_on == "train":
            lines.append("results are those on the training images (data.evaluate_on: train)")
        return lines

    def declare(self) -> dict[str, Any]:
        return {**super().declare(), "category_ids": list(self.category_ids), "is_thing": list(self.is_thing)}

    def _transform(self, training: bool) -> Callable[[Any], Any]:
        from batchformer.data.augment.detection import evaluation_transform, training_transform

        if training:
            sizes = (self.image_size, self.max_size, self.scales)
            return training_transform(self.augment, *sizes, self.mean, self.std)
        return evaluation_transform(self.image_size, self.max_size, self.mean, self.std)

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        from torchvision.transforms import v2

        return v2.Compose([v2.RGB(), self._transform(training=False), v2.ToPureTensor()])

    def describe(self) -> dict[str, Any]:
        """The data set in numbers; classes are counted by their training boxes, those without any left out."""
        numbers = super().describe()
        shots = count_shots(count for count in self.class_counts if count)
        return numbers | {"classes": self.num_classes - self.category_ids.count(-1)} | shots


def scene_part(scenes: Scenes, fraction: float, seed: int, purpose: str, at_least: int = 0) -> np.ndarray:
    """Which images are in a part of this fraction: `stratified_part` by the rarest class that an image has."""
    owner = np.repeat(np.arange(len(scenes)), np.diff(scenes.first))
    counts = np.bincount(scenes.labels, minlength=1)
    rarest = np.full(len(scenes), -1)
    for box in np.argsort(-counts[scenes.labels], kind="stable"):  # rarer ones overwrite
        rarest[owner[box]] = scenes.labels[box]
    return stratified_part([os.fsdecode(path) for path in scenes.paths], rarest, fraction, seed, purpose, at_least)
