"""Domains as folders of images: your own, PACS, VLCS, OfficeHome, TerraIncognita, VisDA-2017."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from batchformer.data.augment.options import FileAugmentation
from batchformer.data.sets.domains import DomainData, Part
from batchformer.data.sets.files import FileData, Listing, list_images, visible_folders
from batchformer.data.sets.list_files import read_list
from batchformer.data.sets.miniature import save_picture
from batchformer.errors import UserError

LAYOUT = {
    "folder-domains": "DIR/<domain>/<class>/*.jpg",
    "pacs": "DIR/{art_painting,cartoon,photo,sketch}/<class>/*.jpg\n"
    "official lists, if wanted: DIR/splits/<domain>_{train,crossval,test}_kfold.txt",
    "vlcs": "DIR/{Caltech101,LabelMe,SUN09,VOC2007}/<class>/*.jpg",
    "office-home": "DIR/{Art,Clipart,Product,Real World}/<class>/*.jpg",
    "terra-incognita": "DIR/{location_38,location_43,location_46,location_100}/<class>/*.jpg",
    "visda": "DIR/{train,validation}/<class>/*, DIR/{train,validation}/image_list.txt",
}


class DomainFolders(DomainData, FileData):
    """root/<domain>/<class>/<image>: domains, classes and images in alphabetical order.

    `on_device: true` reads all images once, resized to a square of `image_size` whatever their aspect ratio, and stores
    them as bytes on the device, where they are augmented (PACS at 128 pixels takes 491 MB). Random regions are then
    cropped from the squares and not from the files.
    """

    upright = True
    may_be_held = True
    #: the domains of a published data set, and DomainBed's folder of them, which is `root` or inside it
    domains: ClassVar[tuple[str, ...]] = ()
    folder: ClassVar[str] = ""

    def __init__(self, root: str | None = None, *, augment: FileAugmentation = "domains", **options: Any) -> None:
        super().__init__(root, augment=augment, **options)
        if self.on_device is True and augment != "domains":
            raise UserError(f"data.on_device true needs data.augment domains, got {augment}: leave one of them out.")
        self._others: Counter[str] = Counter()

    def _find_domains(self) -> tuple[str, ...]:
        if self.domains:
            return self.domains
        root = Path(self.root or "").expanduser()
        return tuple(visible_folders(root)) if self.root and root.is_dir() else ()

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        names = self._choose_domains()
        above = not any((Path(root) / name).is_dir() for name in names) and (Path(root) / self.folder).is_dir()
        found, classes = self._read_domains(root, self.folder if above else "", names)
        sets = self._arrange(found, classes)
        arranged = {
            name: Listing(part.samples.tolist(), part.labels, part.source, fields)
            for name, (part, fields) in sets.items()
        }
        arranged["train"].others.update(self._others)  # files passed over, of all domains
        return arranged, classes

    def _read_domains(self, root: str, inside: str, names: list[str]) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
        """The domains in this folder inside of `root`, and the classes."""
        folders = {name: os.path.join(inside, name) for name in names}
        for folder in folders.values():
            if not (Path(root) / folder).is_dir():
                raise UserError(
                    f"there is no folder {Path(root) / folder}: data.root holds a folder for each domain "
                    f"({', '.join(self.targets)}), with a folder for each class in it."
                )
        classes = sorted({each for folder in folders.values() for each in visible_folders(Path(root) / folder)})
        listings = {name: list_images(root, folder, classes, allow_empty=True) for name, folder in folders.items()}
        self._others = sum((listing.others for listing in listings.values()), Counter[str]())
        return {name: (_part(listing),) for name, listing in listings.items()}, classes


def _part(listing: Listing) -> Part:
    return Part(np.array(listing.paths), listing.labels, listing.source)


def _from_lists(
    root: str, inside: str, found: Mapping[str, Sequence[Listing]], first: int = 0
) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
    """Listings of domain/class/image with labels from `first` on, in the alphabetical order of the classes."""
    listings = [listing for parts in found.values() for listing in parts]
    classes = sorted({Path(path).parent.name for listing in listings for path in listing.paths})
    numbers = {name: number for number, name in enumerate(classes, first)}
    there: dict[Path, set[str]] = {}
    for listing in listings:
        for path, label in zip(listing.paths, listing.labels.tolist(), strict=True):
            folder = Path(root) / inside / os.path.dirname(path)
            if folder not in there:
                there[folder] = {*os.listdir(folder)} if folder.is_dir() else set()
            if os.path.basename(path) not in there[folder]:
                raise UserError(
                    f"image {folder / os.path.basename(path)} is named in {listing.source} and does not exist: put it "
                    f"back, or check data.root and the list."
                )
            if label != numbers[folder.name]:
                raise UserError(
                    f"{listing.source} gives {path} the label {label}, but {folder.name} is number "
                    f"{numbers[folder.name]} of the classes {', '.join(classes)}: correct the list, or move the image."
                )
    return {
        name: tuple(
            Part(np.array([os.path.join(inside, path) for path in each.paths]), each.labels - first, each.source)
            for each in parts
        )
        for name, parts in found.items()
    }, classes


class PACS(DomainFolders):
    """Li et al. (2017): 9,991 images of 7 classes.

    `lists` names the folder of the official lists (`<domain>_train_kfold.txt` and so on): then the train lists are
    trained on, the crossval lists are held out, and the target's test list is tested on.
    """

    domains, folder, upright = ("art_painting", "cartoon", "photo", "sketch"), "PACS", False

    def __init__(self, root: str | None = None, *, lists: str | None = None, **options: Any) -> None:
        super().__init__(root, **options)
        self.lists = lists

    def _read_domains(self, root: str, inside: str, names: list[str]) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
        if self.lists is None:
            return super()._read_domains(root, inside, names)
        looked = [Path(root) / self.lists, Path(root) / inside / self.lists, Path(self.lists).expanduser()]
        place = next((folder for folder in looked if folder.is_dir()), None)
        if place is None:
            raise UserError(
                f"data.lists: there is no folder {' or '.join(str(each) for each in dict.fromkeys(looked))}."
            )
        found = {}
        for name in names:
            parts = ("test", "test") if name == self.target else ("train", "crossval")
            found[name] = [read_list(place / f"{name}_{part}_kfold.txt", os.path.join(root, inside)) for part in parts]
        return _from_lists(root, inside, found, first=1)


class VLCS(DomainFolders):
    """Fang et al. (2013): 10,729 images of 5 classes."""

    domains, folder, upright = ("Caltech101", "LabelMe", "SUN09", "VOC2007"), "VLCS", False


class OfficeHome(DomainFolders):
    """Venkateswara et al. (2017): 15,588 images of 65 classes."""

    domains, folder, upright = ("Art", "Clipart", "Product", "Real World"), "office_home", False


class TerraIncognita(DomainFolders):
    """Beery et al. (2018): camera traps at four places, 10 classes, as DomainBed chooses them."""

    domains = ("location_38", "location_43", "location_46", "location_100")
    folder, upright = "terra_incognita", False


class VisDA(DomainFolders):
    """VisDA-2017 (Peng et al., 2017): 152,397 synthetic images ("train"), 55,388 real ones ("validation"), 12 classes.

    Each domain has a list, image_list.txt, of "class/image label" lines.
    """

    domains, upright = ("train", "validation"), False

    def __init__(
        self, root: str | None = None, *, target: str | None = "validation", batch_size: int = 36, **options: Any
    ) -> None:
        super().__init__(root, target=target, batch_size=batch_size, **options)

    def _read_domains(self, root: str, inside: str, names: list[str]) -> tuple[dict[str, tuple[Part, ...]], list[str]]:
        found = {}
        for name in names:
            listing = read_list(Path(root) / name / "image_list.txt", os.path.join(root, name))
            paths = [os.path.join(name, path) for path in listing.paths]
            found[name] = [Listing(paths, listing.labels, listing.source)]
        return _from_lists(root, inside, found)


_MINIATURES: dict[str, tuple[str, ...]] = {
    "folder-domains": ("evening", "morning", "noon"),
    "pacs": PACS.domains,
    "vlcs": VLCS.domains,
    "office-home": OfficeHome.domains,
    "terra-incognita": TerraIncognita.domains,
    "visda": VisDA.domains,
}
_CLASSES, _PER_CLASS = ("dog", "elephant", "giraffe"), 5


def miniature(folder: Path, name: str) -> None:
    """Three classes of five images in every domain."""
    for number, domain in enumerate(_MINIATURES[name]):
        lines = []
        for label, each in enumerate(_CLASSES):
            for i in range(_PER_CLASS):
                save_picture(folder / domain / each / f"{i:03d}.jpg", label, 100 * number + i, grey=domain == "sketch")
                lines.append((f"{each}/{i:03d}.jpg", label, i))
        if name == "visda":
            (folder / domain / "image_list.txt").write_text("".join(f"{path} {label}\n" for path, label, _ in lines))
        if name == "pacs":
            (folder / "splits").mkdir(exist_ok=True)
            lists = {"train": range(1, _PER_CLASS), "crossval": range(1), "test": range(_PER_CLASS)}
            for part, kept in lists.items():
                text = "".join(f"{domain}/{path} {label + 1}\n" for path, label, i in lines if i in kept)
                (folder / "splits" / f"{domain}_{part}_kfold.txt").write_text(text)
