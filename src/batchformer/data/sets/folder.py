"""Own images, one folder per class: root/train/<class>/ and root/val/<class>/."""

from pathlib import Path

from batchformer.data.sets.files import FileData, Listing, class_folders, list_images
from batchformer.data.sets.miniature import FILE_COUNTS, TEST_PER_CLASS, save_picture
from batchformer.errors import UserError

LAYOUT = "DIR/train/<class>/*.jpg, DIR/val/<class>/*.jpg"


class ImageFolders(FileData):
    """Classes are the folders of root/train in alphabetical order; images may be in nested folders.

    root/val has the same class folders (one may be missing there: that class has no accuracy). The class counts are
    those of the files. Photos are rotated by their EXIF orientation, as in `batchformer predict`.
    """

    upright = True

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
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
