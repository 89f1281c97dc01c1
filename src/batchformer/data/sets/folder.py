"""Own images, one folder per class: root/train/<class>/ and root/val/<class>/."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from batchformer.data.augment.options import check_fraction
from batchformer.data.sets.classification import stratified_part, tail_subset
from batchformer.data.sets.files import FileData, Listing, class_folders, list_images
from batchformer.data.sets.miniature import FILE_COUNTS, TEST_PER_CLASS, save_picture
from batchformer.errors import UserError

LAYOUT = "DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg"


class ImageFolders(FileData):
    """Classes are the folders of root/train in alphabetical order; images may be in nested folders.

    root/val has the same class folders (one may be missing there: that class has no accuracy). The class counts are
    those of the files. Photos are rotated by their EXIF orientation, as in `batchformer predict`.

    `val_fraction`: where there is no root/val, this part of every class (one image at least) is evaluated on and not
    trained on; the class folders are those of root/train, or of `root` itself. `holdout`: this part of every training
    class is not trained on but evaluated as a set of its own, which may choose a checkpoint (`run.best`) or end a run
    (`run.early_stop`). `split_seed` decides which images; it is the same for all seeds of a comparison.

    `imbalance`: a study of long tails. Of the training images class c keeps `tail_counts`, the first class as many as
    the smallest class has; the last this many times fewer.
    """

    upright = True

    def __init__(
        self,
        root: str | None = None,
        *,
        val_fraction: float | None = None,
        holdout: float = 0.0,
        split_seed: int = 0,
        imbalance: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        check_fraction("val_fraction", val_fraction or 0)
        self.val_fraction, self.imbalance = val_fraction or None, imbalance
        self.hold_out(holdout, split_seed)

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        listings, names = self._read_parts(root) if self.val_fraction is None else self._divide(root, self.val_fraction)
        train = listings["train"]
        if self.imbalance is not None:
            smallest = int(np.bincount(train.labels, minlength=len(names)).min())
            train = train.subset(tail_subset(train.labels, names, smallest, self.imbalance))
        return {**listings, **self._hold_out(train, self.holdout, self.split_seed)}, names

    def _divide(self, root: str, fraction: float) -> tuple[dict[str, Listing], list[str]]:
        """The images of root/train, or of `root`, divided into those to train and those to evaluate on."""
        if (Path(root) / "val").is_dir():
            raise UserError(
                f"data.val_fraction divides images without a val part, and {Path(root) / 'val'} is there: leave "
                "data.val_fraction out, or move that folder away."
            )
        part = "train" if (Path(root) / "train").is_dir() else ""
        names = class_folders(root, part)
        everything = list_images(root, part, names, self.allow_empty_classes)
        inside = stratified_part(everything.paths, everything.labels, fraction, self.split_seed, "val", at_least=1)
        if not inside.any():
            raise UserError(f"{everything.source} has one image in each class: there is none to evaluate on; add some.")
        train = everything.subset(~inside)
        return {"train": train, "val": replace(everything.subset(inside), others=Counter(), passed=[])}, names

    def _read_parts(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        names = class_folders(root, "train")
        unknown = [name for name in class_folders(root, "val") if name not in names]
        if unknown:
            raise UserError(
                f"{Path(root) / 'val' / unknown[0]} is a class without a folder in {Path(root) / 'train'}: "
                f"add training images, or take it out of val."
            )
        train, val = list_images(root, "train", names, self.allow_empty_classes), list_images(root, "val", names)
        if not val.paths:
            raise UserError(f"no images in {val.source}: put some to evaluate on there, one folder per class.")
        return {"train": train, "val": val}, names

    def remarks(self) -> list[str]:
        test = Path(self.root or "").expanduser() / "test"
        return [*super().remarks(), *([f"{test} is not used: results are those on val"] if test.is_dir() else [])]


def miniature(folder: Path) -> None:
    """Eight classes of 160 to 2 training images."""
    for label, count in enumerate(FILE_COUNTS):
        for i in range(count):
            save_picture(folder / "train" / f"class_{label}" / f"{i:04d}.jpg", label, i)
        for i in range(TEST_PER_CLASS):
            save_picture(folder / "val" / f"class_{label}" / f"{i:04d}.jpg", label, 10_000 + i)
