"""Tiny-ImageNet-200 in its official layout: 200 classes of ImageNet, reduced to 64 x 64 pixels."""

from pathlib import Path
from typing import Any

from batchformer.data.augment.options import ArrayAugmentation
from batchformer.data.images import decode_images
from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.files import Listing, list_images, read_lines, read_pairs
from batchformer.data.sets.imagenet import MINIATURE_WNIDS, first_words
from batchformer.data.sets.miniature import BALANCED, TEST_PER_CLASS, save_picture
from batchformer.errors import UserError

LAYOUT = "DIR/train/<wnid>/images/, DIR/val/images/, wnids.txt, ..."
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
        batch_size: int = 512,
        eval_batch_size: int = 500,
        **options: Any,
    ) -> None:
        super().__init__(
            root, image_size=image_size, augment=augment, batch_size=batch_size, eval_batch_size=eval_batch_size,
            **options,
        )  # fmt: skip

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        if self.root is None:
            raise UserError(f"data.root is not set: name the unpacked folder {_FOLDER}.")
        root = Path(self.root).expanduser()
        if (root / _FOLDER).is_dir():
            root = root / _FOLDER
        wnids = _wnids(root / "wnids.txt")
        names = _names(root / "words.txt", wnids)
        for folder in (root / "train" / wnid / "images" for wnid in wnids):
            _expect(folder.is_dir(), folder)
        listings = {
            "train": list_images(str(root), "train", [f"{wnid}/images" for wnid in wnids]),
            "val": _validation_files(root, wnids),
        }
        rank, _ = self._rank_and_world()
        splits = {}
        for part, listing in listings.items():
            paths, title = [root / path for path in listing.paths], f"Tiny-ImageNet, {part} images"
            images = decode_images(paths, self.native_size, title, show_progress=rank == 0)
            splits[part] = Split(images, listing.labels)
        return splits, names


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


def _validation_files(root: Path, wnids: list[str]) -> Listing:
    """Read val_annotations.txt: lines of file, wnid, and an unused box, separated by tabs."""
    listing, folder = root / "val" / "val_annotations.txt", root / "val" / "images"
    _expect(listing.is_file(), listing)
    _expect(folder.is_dir(), folder)
    label_of = {wnid: label for label, wnid in enumerate(wnids)}

    def pair(line: str) -> tuple[str, int] | None:
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0].strip()
        return (f"val/images/{file.strip()}", label_of[wnid]) if wnid in label_of else None

    return read_pairs(listing, pair, "a file and one of the wnids of wnids.txt, separated by a tab", root)


def _expect(there: bool, path: Path) -> None:
    if not there:
        raise UserError(f"Tiny-ImageNet is not complete, {path} is not there: {_AGAIN}")


def miniature(folder: Path) -> None:
    """Ten classes of 32 training images; as in the official archive some images are grey."""
    for label, wnid in enumerate(MINIATURE_WNIDS):
        for i in range(BALANCED):
            save_picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", label, i, 64, 64, grey=i == 0)
    lines = []
    for number in range(TEST_PER_CLASS * len(MINIATURE_WNIDS)):
        label, file = number % len(MINIATURE_WNIDS), f"val_{number}.JPEG"
        save_picture(folder / "val" / "images" / file, label, 10_000 + number, 64, 64)
        lines.append(f"{file}\t{list(MINIATURE_WNIDS)[label]}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in reversed(MINIATURE_WNIDS)))
    (folder / "words.txt").write_text("".join(f"{wnid}\t{words}\n" for wnid, words in MINIATURE_WNIDS.items()))
