"""Tiny-ImageNet-200 in its official layout: 200 classes of ImageNet, reduced to 64 x 64 pixels."""

from pathlib import Path
from typing import Literal

import numpy as np

from batchformer.data.arrays import ArrayData, Split
from batchformer.data.decode import decode_images
from batchformer.data.files import read_lines
from batchformer.data.imagenet import first_words
from batchformer.data.images import is_image
from batchformer.data.names import ArrayAugmentation
from batchformer.errors import UserError

_FOLDER = "tiny-imagenet-200"
_AGAIN = f"set data.root to the unpacked {_FOLDER}, or unpack it again."


class TinyImageNet(ArrayData):
    """100,000 training and 10,000 validation images; `root` is the unpacked folder tiny-imagenet-200 or holds it.

    Read are train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt, wnids.txt, and class names from
    words.txt where it is there; labels follow the alphabetical order of the wnids. All images are decoded once, into
    1.4 GB of memory, and trained at any `image_size` (see ArrayData). The test images of the archive have no labels and
    are not used. BatchFormerV2 calls something else Tiny-ImageNet: see `batchformer.data.ImageNet`.
    """

    # of the training images
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    native_size = image_size = 64

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 64,
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
            root, image_size=image_size, augment=augment, erase_prob=erase_prob,
            augment_repeats=augment_repeats, statistics=statistics, batch_size=batch_size, seed=seed, workers=workers,
            on_device=on_device, drop_last=drop_last, eval_batch_size=eval_batch_size, channels_last=channels_last,
        )  # fmt: skip

    def _read_splits(self) -> tuple[Split, Split, list[str]]:
        if self.root is None:
            raise UserError(f"data.root is not set: name the unpacked folder {_FOLDER}.")
        root = Path(self.root).expanduser()
        if (root / _FOLDER).is_dir():
            root = root / _FOLDER
        wnids = _wnids(root / "wnids.txt")
        names = _names(root / "words.txt", wnids)
        train, test = _training_files(root, wnids), _validation_files(root, wnids)
        return self._decode(*train, "training images"), self._decode(*test, "validation images"), names

    def _decode(self, paths: list[Path], labels: list[int], title: str) -> Split:
        rank, _ = self._rank_and_world()
        images = decode_images(paths, self.native_size, f"Tiny-ImageNet, {title}", show_progress=rank == 0)
        return Split(images, np.array(labels, dtype=np.int64))


def _wnids(path: Path) -> list[str]:
    _expect(path.is_file(), path)
    wnids = sorted({line.strip() for line in read_lines(path) if line.strip()})
    if not wnids:
        raise UserError(f"{path} names no class: {_AGAIN}")
    return wnids


def _names(path: Path, wnids: list[str]) -> list[str]:
    if not path.is_file():
        return wnids
    pairs = [line.partition("\t") for line in read_lines(path)]
    words = {wnid: text.strip() for wnid, tab, text in pairs if tab}
    return first_words([words.get(wnid) or wnid for wnid in wnids], wnids)


def _training_files(root: Path, wnids: list[str]) -> tuple[list[Path], list[int]]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, wnid in enumerate(wnids):
        folder = root / "train" / wnid / "images"
        _expect(folder.is_dir(), folder)
        found = sorted(path for path in folder.iterdir() if is_image(path))
        if not found:
            raise UserError(f"{folder} has no image: {_AGAIN}")
        paths += found
        labels += [label] * len(found)
    return paths, labels


def _validation_files(root: Path, wnids: list[str]) -> tuple[list[Path], list[int]]:
    """The lines of val_annotations.txt are: file, wnid, and a box that is of no use here; separated by tabs."""
    listing, folder = root / "val" / "val_annotations.txt", root / "val" / "images"
    _expect(listing.is_file(), listing)
    _expect(folder.is_dir(), folder)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    paths: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(listing), 1):
        if not line.strip():
            continue
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        if wnid not in label_of:
            raise UserError(
                f"{listing}, line {number}: expected a file and one of the wnids of wnids.txt, separated by a tab, "
                f"found {line.strip()[:80]!r}."
            )
        paths.append(folder / file.strip())
        labels.append(label_of[wnid])
    if not paths:
        raise UserError(f"{listing} lists no image: {_AGAIN}")
    return paths, labels


def _expect(there: bool, path: Path) -> None:
    if not there:
        raise UserError(f"Tiny-ImageNet is not complete, {path} is not there: {_AGAIN}")
