"""ImageNet (ILSVRC 2012) in its official folders, complete or some of its classes."""

import re
from pathlib import Path
from typing import Any

from batchformer.data.augment.options import FileAugmentation
from batchformer.data.images import EXTENSIONS
from batchformer.data.sets.files import FileData, Listing, class_folders, find_file, list_images, read_lines
from batchformer.data.sets.miniature import BALANCED, TEST_PER_CLASS, save_picture
from batchformer.errors import UserError

LAYOUT = "DIR/train/<wnid>/*.JPEG, DIR/val/<wnid>/*.JPEG"
_WNID = re.compile(r"n\d{8}")
MINIATURE_WNIDS = {
    "n01440764": "tench, Tinca tinca",
    "n01443537": "goldfish, Carassius auratus",
    "n01484850": "great white shark",
    "n01491361": "tiger shark",
    "n01494475": "hammerhead",
    "n01496331": "electric ray",
    "n01498041": "stingray",
    "n01514668": "cock",
    "n01514859": "hen",
    "n01518878": "ostrich",
}


class ImageNet(FileData):
    """root/train/<wnid>/*.JPEG and root/val/<wnid>/*.JPEG; labels follow the alphabetical order of the wnids.

    `classes` takes a part of the classes: a list of wnids, or a text file with one at the beginning of each line
    (looked for in `root` and in the working directory). BatchFormerV2's "Tiny-ImageNet" is such a part: 200 classes of
    ImageNet at 224 px, and not the data set of 64-px images that goes by that name (which is `TinyImageNet`).
    """

    def __init__(
        self,
        root: str | None = None,
        classes: str | list[str] | None = None,
        augment: FileAugmentation = "randaugment",
        workers: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, augment=augment, workers=workers, **options)
        self.classes = classes

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        _refuse_flat(Path(root) / "val")
        there = class_folders(root, "train")
        wnids = there if self.classes is None else self._chosen(root, there)
        train, test = list_images(root, "train", wnids), list_images(root, "val", wnids)
        without = set(range(len(wnids))) - set(test.labels.tolist())
        if without:
            raise UserError(
                f"{Path(root) / 'val' / wnids[min(without)]} has no image: the official val folder has 50 of each "
                f"class; unpack it again, or name the classes that are there in data.classes."
            )
        return {"train": train, "val": test}, readable_names(wnids)

    def _chosen(self, root: str, there: list[str]) -> list[str]:
        if isinstance(self.classes, str):
            path = find_file(self.classes, root, "classes")
            given, source = [line.split()[0] for line in read_lines(path) if line.strip()], str(path)
        else:
            given, source = list(self.classes or []), "data.classes"
        wnids = sorted(set(given))
        wrong = next((wnid for wnid in wnids if not _WNID.fullmatch(wnid)), None)
        if wrong is not None or not wnids:
            found = f"found {wrong!r}" if wnids else "it has none"
            raise UserError(f"{source}: expected wnids such as n01440764, {found}.")
        absent = [wnid for wnid in wnids if wnid not in set(there)]
        if absent:
            more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
            raise UserError(
                f"{source} names {absent[0]}{more}, but there is no folder {Path(root) / 'train' / absent[0]}."
            )
        return wnids


def readable_names(wnids: list[str]) -> list[str]:
    """The first WordNet word of each class, from timm's metadata; the wnid where two would be the same."""
    from timm.data import ImageNetInfo

    known = ImageNetInfo("imagenet-1k")
    of_wnid = dict(zip(known.label_names(), known.label_descriptions(), strict=True))
    return first_words([of_wnid.get(wnid, wnid) for wnid in wnids], wnids)


def first_words(descriptions: list[str], wnids: list[str]) -> list[str]:
    short = [text.split(",")[0].strip() for text in descriptions]
    return [f"{name} ({wnid})" if short.count(name) > 1 else name for name, wnid in zip(short, wnids, strict=True)]


def _refuse_flat(folder: Path) -> None:
    if not folder.is_dir() or any(entry.is_dir() for entry in folder.iterdir()):
        return
    if any(entry.suffix.lower() in EXTENSIONS for entry in folder.iterdir()):
        raise UserError(
            f"the images in {folder} are not sorted into class folders, as in the official archive: "
            f"move each into {folder}/<wnid>/ (torchvision.datasets.ImageNet does it from the archive and the devkit)."
        )


def miniature(folder: Path) -> None:
    """Ten classes of 32 training images."""
    for label, wnid in enumerate(MINIATURE_WNIDS):
        for i in range(BALANCED):
            save_picture(folder / "train" / wnid / f"{wnid}_{i}.JPEG", label, i)
        for i in range(TEST_PER_CLASS):
            number = i * len(MINIATURE_WNIDS) + label + 1
            save_picture(folder / "val" / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", label, 10_000 + i)
