"""Anybody's images, one folder per class: root/train/<class>/ and root/val/<class>/."""

import os
from pathlib import Path

import numpy as np

from batchformer.data.files import FileData, Listing
from batchformer.data.images import EXTENSIONS, images_in
from batchformer.errors import UserError


class ImageFolders(FileData):
    """Classes are the folders of root/train in alphabetical order; images may lie deeper inside them.

    root/val has the same class folders (one may be missing there: that class has no accuracy). How long the tail is
    follows from the images that are there. Photos are turned as their cameras noted, as in `batchformer predict`.
    """

    upright = True

    def _read_listings(self, root: str) -> tuple[Listing, Listing, list[str]]:
        names = class_folders(root, "train")
        unknown = [name for name in class_folders(root, "val") if name not in names]
        if unknown:
            raise UserError(
                f"{Path(root) / 'val' / unknown[0]} is a class without a folder in {Path(root) / 'train'}: "
                f"add training images, or take it out of val."
            )
        train, test = list_images(root, "train", names), list_images(root, "val", names)
        if not test.paths:
            raise UserError(f"no images in {test.source}: put some to evaluate on there, one folder per class.")
        return train, test, names


def class_folders(root: str, part: str) -> list[str]:
    folder = Path(root) / part
    if not folder.is_dir():
        above = Path(root).parent
        if Path(root).name in ("train", "val") and (above / part).is_dir():
            raise UserError(f"{root} holds one part of the images only: name the folder above it, {above}.")
        raise UserError(
            f"there is no folder {folder}: images are expected in {root}/train/<class>/ and {root}/val/<class>/."
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{folder} has no class folders: images are expected in {folder}/<class>/.")
    return names


def list_images(root: str, part: str, names: list[str]) -> Listing:
    """All images of the classes, classes and then paths in alphabetical order; a training class needs one at least."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        folder = Path(root) / part / name
        above = len(str(folder)) - len(os.path.join(part, name))
        found = [path[above:] for path in images_in(folder)]  # os.path.relpath of a million files takes a while
        if not found and part == "train":
            raise UserError(
                f"class {name} has no training image in {folder} (looked for {' '.join(EXTENSIONS)}): "
                f"add some, or remove the folder."
            )
        paths += found
        labels += [label] * len(found)
    return Listing(paths, np.array(labels, dtype=np.int64), str(Path(root) / part))
