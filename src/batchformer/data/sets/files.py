"""Base class of data sets of image files, from lists or folders, and functions to read both."""

import hashlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchformer.data.augment.options import IMAGENET_MEAN, IMAGENET_STD, FileAugmentation, Statistics, check_images
from batchformer.data.images import EXTENSIONS, decode_images, images_in, passed_over
from batchformer.data.info import HOLDOUT
from batchformer.data.loading.data_module import ImageFile
from batchformer.data.loading.epoch_loader import EpochLoader
from batchformer.data.sets.annotations import SkipsBad
from batchformer.data.sets.classification import ClassificationData, stratified_part
from batchformer.errors import UserError

_OTHER_NAMES_OF_VAL = ("valid", "validation", "test", "eval")


@dataclass(frozen=True)
class Listing:
    """Image files relative to the data set's root, their labels, their source (for messages), further fields of every
    image (domains, pairs ...), and the extensions of other files in the same folders, which `passed` lists."""

    paths: list[str]
    labels: np.ndarray
    source: str
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    passed: list[str] = field(default_factory=list)

    def subset(self, kept: np.ndarray) -> "Listing":
        """Only these images, by number or by a mask."""
        chosen = np.arange(len(self.paths))[kept]
        fields = {name: values[chosen] for name, values in self.fields.items()}
        return replace(self, paths=[self.paths[k] for k in chosen], labels=self.labels[chosen], fields=fields)


class FileData(SkipsBad, ClassificationData):
    """Base class of data sets of files, listed by `_read_listings`; read and augmented in `workers` processes.

    `skip_bad` names the file of a check (`batchformer data RECIPE --check`); what it found is left out.
    """

    #: whether photos are rotated by their EXIF orientation; published data sets are read as stored, as is usual
    upright = False
    #: whether all images may be stored on the device (`on_device: true`)
    may_be_held = False

    def __init__(
        self,
        root: str | None = None,
        *,
        augment: FileAugmentation = "imagenet-lt",
        image_size: int = 224,
        mean: Statistics = IMAGENET_MEAN,
        std: Statistics = IMAGENET_STD,
        erase_prob: float = 0.0,
        workers: int = 4,
        eval_batch_size: int = 256,
        skip_bad: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, workers=workers, eval_batch_size=eval_batch_size, **options)
        if self.on_device is True and not self.may_be_held:
            raise UserError(
                "data.on_device is for data sets held in memory; image files are read on the host: leave it out."
            )
        check_images(image_size, std, erase_prob)
        self._check_views(get_args(FileAugmentation))
        self.augment, self.image_size, self.erase_prob = augment, image_size, erase_prob
        self.mean, self.std, self.skip_bad = mean, std, skip_bad
        self._held: dict[str, torch.Tensor] = {}

    @abstractmethod
    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        """The files by name of their set, "train" and the `evaluation_sets`; and the class names."""

    def _read(self) -> None:
        root = existing_root(self.root)
        listings, self.class_names = self._read_listings(root)
        self._listings = {name: self._without_bad(listing, name == "train") for name, listing in listings.items()}
        train = self._listings["train"]
        lines = "".join(f"{path} {label}\n" for path, label in zip(train.paths, train.labels, strict=True))
        self._count(self._listings, hashlib.sha256(lines.encode(errors="surrogateescape")))
        if HOLDOUT in self.evaluation_sets:
            self.test_images -= len(self._listings[HOLDOUT].labels)  # results are about the others
        for listing in (train, *(self._listings[name] for name in self.evaluation_sets)):
            # one file is enough to detect a wrong root; checking all would take minutes on a network disk
            first = os.path.join(root, listing.paths[0])
            if not os.path.isfile(first):
                raise UserError(f"image {first}, the first in {listing.source}, does not exist: check data.root.")
        self._folder = os.path.join(root, "")

    def _without_bad(self, listing: Listing, training: bool) -> Listing:
        if not self.skipped:
            return listing
        return listing.subset(np.array([self.skipped.keeps(path, training) for path in listing.paths], dtype=bool))

    def _hold_out(self, train: Listing, fraction: float, seed: int) -> dict[str, Listing]:
        """The training images without a part, and that part, which is evaluated as `holdout`; see `stratified_part`."""
        if not fraction:
            return {"train": train}
        held = stratified_part(train.paths, train.labels, fraction, seed, HOLDOUT)
        return {"train": train.subset(~held), HOLDOUT: replace(train.subset(held), others=Counter(), passed=[])}

    def image_files(self) -> dict[str, list[ImageFile]]:
        self.setup()
        return {
            name: [ImageFile(path, label) for path, label in zip(each.paths, each.labels.tolist(), strict=True)]
            for name, each in self._listings.items()
        }

    def passed_over(self) -> list[str]:
        return sorted({path for listing in self._listings.values() for path in listing.passed})

    def remarks(self) -> list[str]:
        others = sum((listing.others for listing in self._listings.values()), Counter[str]())
        lines = [f"{self.root}: {passed_over(others)}"] if others else []
        if number := len(self.skipped.files | self.skipped.training):
            lines.append(f"{number} {'file is' if number == 1 else 'files are'} left out ({self.skip_bad})")
        return [*super().remarks(), *lines]

    def make_loader(self, name: str, training: bool) -> EpochLoader:
        from batchformer.data.augment.host import file_transform
        from batchformer.data.loading.samples import FileSamples

        listing = self._listings[name]
        if self.on_device is True:
            return self._device_loader(self._held_images(name), listing, name, training)
        transforms = [self.predict_transform]
        if training:
            common = (self.image_size, self.mean, self.std, self.erase_prob)
            transforms = [file_transform(augment, *common) for augment in self.view_augments]
        samples = FileSamples(
            listing.paths,
            transform=transforms,
            seed=self._seed_of(name) if training else None,
            folder=self._folder,
            upright=self.upright,
            **self._labelled(listing),
        )
        return self._host_loader(samples, name, training)

    def _held_images(self, name: str) -> torch.Tensor:
        """The images of a set on the device, shared by all its loaders, and by sets of the same images."""
        paths, rank = self._listings[name].paths, self._rank_and_world()[0]
        key = next((other for other in self._held if self._listings[other].paths == paths), name)
        if key not in self._held:
            files = [self._folder + path for path in paths]
            images = decode_images(files, self.image_size, f"images of {key}", rank == 0, True, self.upright)
            self._held[key] = torch.from_numpy(images).to(self._device())
        return self._held[key]

    @property
    def predict_transform(self) -> Callable[[Image.Image], Tensor]:
        from batchformer.data.augment.host import evaluation_transform

        return evaluation_transform(self.augment, self.image_size, self.mean, self.std)


def existing_root(root: str | None) -> str:
    """The folder of the images; raises a UserError where it does not exist."""
    if root is None:
        raise UserError("data.root is not set: name the folder the images are in.")
    folder = os.path.expanduser(root)
    if not os.path.isdir(folder):
        raise UserError(f"data.root {root} is not a folder: name the one the images are in (--data-root DIR).")
    return folder


def read_lines(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"there is no file {path}: put it there, or check data.root.")
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}).") from error


def refuse_outside(file: str, root: str | Path, source: str, folder: str = "") -> None:
    """Refuse an image outside the data root: a list from a third party could name any file of this machine.

    `file` is relative to `folder` in `root`, which is a setting and may be anywhere; `source` is for the message.
    """
    if ".." not in file and not os.path.isabs(file):  # nearly all, of a million
        return
    named = os.path.join(root, folder, file)
    places = {os.path.abspath(named), os.path.realpath(named)}
    allowed = {
        look(os.path.join(root, inside)) for look in (os.path.abspath, os.path.realpath) for inside in ("", folder)
    }
    if not any(place.startswith(os.path.join(base, "")) for place in places for base in allowed):
        raise UserError(
            f"{source} names {file[:200]}, which is outside of {root}: put the images there, or set data.root to a "
            f"folder that holds them all."
        )


def read_pairs(path: Path, pair: Callable[[str], tuple[str, int] | None], expected: str, root: str | Path) -> Listing:
    """Read one image per line, empty lines skipped; `pair` parses (path, label), None raises an error with the line."""
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        if line.strip():
            if (found := pair(line)) is None:
                raise UserError(f"{path}, line {number}: expected {expected}, found {line.strip()[:80]!r}.")
            refuse_outside(found[0], root, f"{path}, line {number},")
            pairs.append(found)
    if not pairs:
        raise UserError(f"{path} lists no image.")
    return Listing([file for file, _ in pairs], np.array([label for _, label in pairs], dtype=np.int64), str(path))


def find_file(name: str, root: str, keyword: str) -> Path:
    """Find a text file in `root` or else in the working directory."""
    given = Path(name).expanduser()
    candidates = [given] if given.is_absolute() else [Path(root) / given, given]
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(dict.fromkeys(map(str, candidates)))
    raise UserError(f"data.{keyword}: there is no file {looked}.")


def visible_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def class_folders(root: str, part: str) -> list[str]:
    folder = Path(root) / part
    if not folder.is_dir():
        above = Path(root).parent
        if Path(root).name in ("train", "val") and (above / part).is_dir():
            raise UserError(f"{root} holds one part of the images only: name the folder above it, {above}.")
        advice = ""
        if part == "val":
            beside = [name for name in _OTHER_NAMES_OF_VAL if (Path(root) / name).is_dir()]
            advice = f"; rename {Path(root) / beside[0]} to val" if beside else "; move some images of each class there"
            advice += (
                ", since results are measured on images that are not trained on; or --data.val_fraction 0.2 sets a "
                "fifth of the images aside for that"
            )
        elif not (Path(root) / "val").is_dir() and Path(root).is_dir() and (inside := visible_folders(Path(root))):
            advice = (
                f"; if {inside[0]} and the other folders are the classes, --data.val_fraction 0.2 sets a fifth of "
                "their images aside to measure results on"
            )
        raise UserError(
            f"there is no folder {folder}: images are expected in {root}/train/<class>/ and {root}/val/<class>/"
            f"{advice}."
        )
    names = visible_folders(folder)
    if not names:
        raise UserError(f"{folder} has no class folders: images are expected in {folder}/<class>/.")
    return names


def list_images(root: str, part: str, names: list[str], allow_empty: bool = False) -> Listing:
    """All images of the classes, classes and then paths in alphabetical order.

    A training class needs one image at least, unless `allow_empty`.
    """
    paths: list[str] = []
    labels: list[int] = []
    others: Counter[str] = Counter()
    passed: list[str] = []
    for label, name in enumerate(names):
        folder = Path(root) / part / name
        above = len(str(folder)) - len(os.path.join(part, name))
        found = [path[above:] for path in images_in(folder, others, passed)]  # os.path.relpath takes a while
        if not found and part == "train" and not allow_empty:
            there = f"; {passed_over(others)}" if others else ""
            raise UserError(
                f"class {name} has no training image in {folder} (looked for {' '.join(EXTENSIONS)}{there}): "
                f"add some, or remove the folder."
            )
        paths += found
        labels += [label] * len(found)
    passed = [os.path.relpath(path, root) for path in passed]
    return Listing(paths, np.array(labels, dtype=np.int64), str(Path(root) / part), others=others, passed=passed)
