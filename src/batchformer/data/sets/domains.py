"""Images of several domains; one is held out of training for testing, or adapted to without its labels."""

import os
import struct
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch

from batchformer.data.augment.options import FileAugmentation, check_at_least
from batchformer.data.loading.epoch_loader import EpochLoader, JoinedLoader
from batchformer.data.loading.order import balanced_order, generator
from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.classification import ClassificationData
from batchformer.data.sets.files import FileData, Listing, existing_root, list_images, visible_folders
from batchformer.data.sets.list_files import read_list
from batchformer.data.sets.miniature import picture, save_picture
from batchformer.errors import UserError, did_you_mean

LAYOUT = {
    "folder-domains": "DIR/<domain>/<class>/*.jpg",
    "pacs": "DIR/{art_painting,cartoon,photo,sketch}/<class>/*.jpg\n"
    "official lists, if wanted: DIR/splits/<domain>_{train,crossval,test}_kfold.txt",
    "vlcs": "DIR/{Caltech101,LabelMe,SUN09,VOC2007}/<class>/*.jpg",
    "office-home": "DIR/{Art,Clipart,Product,Real World}/<class>/*.jpg",
    "terra-incognita": "DIR/{location_38,location_43,location_46,location_100}/<class>/*.jpg",
    "visda": "DIR/{train,validation}/<class>/*, DIR/{train,validation}/image_list.txt",
    "mnist-usps-svhn": "DIR/MNIST/raw/*-ubyte; DIR/usps.npz or DIR/{usps,usps.t}.bz2; DIR/{train,test}_32x32.mat\n"
    "(two of the three are enough)",
}
Draw = Literal["replacement", "shortest"]


class Part(NamedTuple):
    """Some samples of a domain: images as bytes or file paths, their labels, and their source (for messages)."""

    samples: np.ndarray
    labels: np.ndarray
    source: str

    def take(self, index: np.ndarray) -> "Part":
        return Part(self.samples[index], self.labels[index], self.source)


class DomainData(ClassificationData):
    """Several domains: the sources, which are trained on, and the target, which is used for testing only.

    A training batch holds equally many samples of each source, domain by domain, and `domains`, the index of each
    sample's domain in `source_domains` (in `declare`: "domains"). The evaluation sets are "target", with the number of
    sources as its domain index, and "source": the samples held out of the sources.

    Args:
        target: the domain that is left out and tested on.
        sources: the domains trained on; by default all others.
        holdout: the part of each source domain that is held out, drawn by `seed`, where there is no official split.
        steps_per_epoch: an epoch is that many steps.
        draw: how domains of unequal size are drawn from; see `batchformer.data.loading.order.balanced_order`.
        adapt: domain adaptation. A training batch is {"source": batch, "target": batch}, the second one of as many
            images of the target as the first has in all, with labels of -1.
        allow_missing_classes: a domain may be without some of the classes.
        batch_size: of one process, all sources together: a multiple of their number.
    """

    evaluation_sets = ("target", "source")
    source_domains: list[str]

    def __init__(
        self,
        root: str | None = None,
        *,
        target: str | None = None,
        sources: list[str] | None = None,
        holdout: float = 0.2,
        steps_per_epoch: int = 100,
        draw: Draw = "replacement",
        adapt: bool = False,
        allow_missing_classes: bool = False,
        batch_size: int = 96,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_at_least(1, steps_per_epoch=steps_per_epoch)
        if not 0 < holdout < 1:
            raise UserError(f"data.holdout is a part of each source domain, above 0 and below 1, got {holdout}.")
        if draw not in get_args(Draw):
            raise UserError(f"data.draw is one of {', '.join(get_args(Draw))}, got {draw!r}.")
        if self.augment_repeats > 1:
            raise UserError(
                "data.augment_repeats is not for data of several domains, which have an order of their own."
            )
        self.sources, self.holdout, self.steps_per_epoch = sources, holdout, steps_per_epoch
        self.draw, self.adapt, self.allow_missing_classes = draw, adapt, allow_missing_classes
        self.allow_empty_classes = allow_missing_classes  # a class may be one of the target's alone
        self.targets, self.target = self._find_domains(), target

    # for subclasses

    @abstractmethod
    def _find_domains(self) -> tuple[str, ...]:
        """The names of all domains; those found on disk, where the data set does not define them."""

    def _choose_domains(self) -> list[str]:
        """The source domains and the target, in this order."""
        self.targets = self._find_domains()
        if len(self.targets) < 2:
            found = f"one domain only ({self.targets[0]})" if self.targets else "no domain"
            raise UserError(
                f"{self.root} has {found}: there must be one to train on and another to test on (`batchformer data` "
                f"shows the layout)."
            )
        if self.target is None:
            raise UserError(
                f"data.target is not set: name the domain to leave out and test on, one of {', '.join(self.targets)}."
            )
        self.choose_target(self.target)
        sources = [name for name in self.targets if name != self.target] if self.sources is None else self.sources
        for name in sources:
            if name not in self.targets:
                known = ", ".join(self.targets)
                hint = did_you_mean(name, self.targets)
                raise UserError(f"data.sources: there is no {name!r}; choose from {known}.{hint}")
        if not sources or self.target in sources or len({*sources}) < len(sources):
            raise UserError(
                f"data.sources names domains other than the target {self.target!r}, each once, got {sources}."
            )
        if self.batch_size % len(sources):
            below = self.batch_size // len(sources) * len(sources)
            near = " or ".join(str(size) for size in (below, below + len(sources)) if size)
            raise UserError(
                f"data.batch_size {self.batch_size} is no multiple of the {len(sources)} source domains, of which a "
                f"batch holds equal numbers: choose {near}."
            )
        self.source_domains = list(sources)
        return [*sources, self.target]

    def _arrange(
        self, found: Mapping[str, Sequence[Part]], classes: list[str]
    ) -> dict[str, tuple[Part, dict[str, np.ndarray]]]:
        """Build the sets by name, each with its fields, from the domains, sources first and the target last.

        A domain has two parts where there is an official split (of a source training and held-out samples, of the
        target those to adapt to and to test on); otherwise one, which is divided here.
        """
        for name, parts in found.items():
            labels = np.concatenate([part.labels for part in parts])
            _check_domain(name, labels, classes, parts[0].source, self.allow_missing_classes)
        pairs = [parts if len(parts) == 2 else self._divided(name, parts[0]) for name, parts in found.items()]
        *sources, target = pairs
        sets = {"train": [train for train, _ in sources], "source": [held for _, held in sources]}
        sets["target"] = [target[1]]
        if self.adapt:
            sets["unlabelled"] = [target[0]._replace(labels=np.full(len(target[0].labels), -1))]
        self._counts = {name: [len(part.labels) for part in parts] for name, parts in sets.items()}
        arranged = {}
        for name, parts in sets.items():
            first = 0 if name in ("train", "source") else len(sources)
            domains = np.repeat(np.arange(first, first + len(parts)), self._counts[name])
            samples = np.concatenate([part.samples for part in parts])
            labels = np.concatenate([part.labels for part in parts])
            arranged[name] = Part(samples, labels, _listed([part.source for part in parts])), {"domains": domains}
        return arranged

    def _divided(self, name: str, part: Part) -> tuple[Part, Part]:
        if name == self.target:
            return part, part
        count = len(part.labels)
        if count < 2:
            raise UserError(f"the domain {name} has one image only: a part of a source domain is held out; add some.")
        order = generator(self.seed, name, "holdout").permutation(count)
        held = max(1, int(count * self.holdout))
        return part.take(np.sort(order[held:])), part.take(np.sort(order[:held]))

    def _count(self, sets: Mapping[str, Any], digest: Any) -> None:
        super()._count(sets, digest)
        self.test_images = len(sets["target"].labels)  # results are about these

    # for loaders and users

    def training_loader(self) -> EpochLoader:
        source = self.make_loader("train", training=True)
        if not self.adapt:
            return source
        return JoinedLoader({"source": source, "target": self.make_loader("unlabelled", True)}, self._current_epoch)

    def _loader_options(self, name: str, training: bool) -> dict[str, Any]:
        options = super()._loader_options(name, training)
        if training and options["sampler"] is None:
            counts, seed = self._counts[name], options["seed"]
            each = options["world"] * self.batch_size // len(counts)
            if self.draw == "shortest" and min(counts) < each:
                names = self.source_domains if name == "train" else [str(self.target)]
                raise UserError(
                    f"the domain {names[int(np.argmin(counts))]} has {min(counts)} training images, fewer than the "
                    f"{each} that a batch takes of it: lower data.batch_size, or set data.draw to replacement."
                )
            options["sampler"] = partial(
                balanced_order, counts=counts, each=each, steps=self.steps_per_epoch, seed=seed, draw=self.draw
            )
        return options

    def declare(self) -> dict[str, Any]:
        return {**super().declare(), "domains": list(self.source_domains)}

    def describe(self) -> dict[str, Any]:
        numbers = super().describe()
        pairs = zip(self.source_domains, self._counts["train"], strict=True)
        trained = ", ".join(f"{name} ({count:,})" for name, count in pairs)
        return numbers | {
            "details": [
                f"trained on {trained}; {sum(self._counts['source']):,} images of these are held out",
                f"tested on {self.target} ({self._counts['target'][0]:,})",
            ]
        }


def _check_domain(name: str, labels: np.ndarray, classes: list[str], source: str, allow_missing: bool) -> None:
    if not len(labels):
        raise UserError(
            f"the domain {name} has no images in {source}: put some there, in a folder for each class, or take the "
            f"domain out."
        )
    missing = sorted({*range(len(classes))} - {*labels.tolist()})
    if missing and not allow_missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(
            f"the domain {name} has no image of the class {classes[missing[0]]}{more} in {source}: add some, take the "
            f"class out, or set data.allow_missing_classes to true."
        )


def _listed(sources: list[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"


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


class DigitDomains(DomainData, ArrayData):
    """MNIST, USPS and SVHN, those found in `root`, in colour at 28 pixels (USPS has 16, SVHN 32).

    As usual with these three, the official training sets are trained on, or adapted to, and the official test sets are
    held out, or tested on; `holdout` has no effect. `domains` limits which of the three are used.
    """

    mean = std = (0.5, 0.5, 0.5)
    native_size = image_size = 28
    #: the files that identify each; USPS may be an array file or LIBSVM's
    files: ClassVar[dict[str, tuple[str, ...]]] = {
        "mnist": ("MNIST/raw/train-images-idx3-ubyte",),
        "usps": ("usps.npz", "usps.bz2"),
        "svhn": ("train_32x32.mat",),
    }

    def __init__(
        self,
        root: str | None = None,
        *,
        augment: Literal["none", "shift", "domains"] = "none",
        image_size: int = 28,
        domains: list[str] | None = None,
        **options: Any,
    ) -> None:
        self.domains = list(self.files) if domains is None else domains
        super().__init__(root, augment=augment, image_size=image_size, **options)

    def _find_domains(self) -> tuple[str, ...]:
        root = Path(self.root or "").expanduser()
        there = {name for name, files in self.files.items() if any((root / file).is_file() for file in files)}
        return tuple(name for name in self.domains if name in there)

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        root = Path(existing_root(self.root))
        names = self._choose_domains()
        found = {name: [self._read_part(root, name, part) for part in ("train", "test")] for name in names}
        sets = self._arrange(found, classes := [str(digit) for digit in range(10)])
        return {name: Split(part.samples, part.labels, fields) for name, (part, fields) in sets.items()}, classes

    def _read_part(self, root: Path, name: str, part: str) -> Part:
        from torchvision.transforms.v2 import functional as F

        try:
            images, labels = _READERS[name](root, part)
        except ImportError as error:
            raise UserError(f"{name} is read with {error.name}, which is missing: install it.") from error
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                f"the {part} images of {name} cannot be read from {root} ({error}): unpack them again."
            ) from error
        colour = torch.from_numpy(np.ascontiguousarray(images)).reshape(len(labels), -1, *images.shape[-2:])
        sized = F.resize(colour, [self.native_size] * 2).expand(-1, 3, -1, -1)
        return Part(sized.contiguous().numpy(), np.asarray(labels, np.int64), str(root))


def _read_mnist(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    from torchvision.datasets import MNIST

    digits = MNIST(str(root), train=part == "train")
    return digits.data.numpy(), digits.targets.numpy()


def _read_usps(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """An array file, or the files torchvision reads, in LIBSVM's format: values from -1 to 1, labels from 1."""
    if (root / "usps.npz").is_file():
        with np.load(root / "usps.npz") as arrays:
            return arrays[f"{part}_images"], arrays[f"{part}_labels"]
    from sklearn.datasets import load_svmlight_file

    values, labels = load_svmlight_file(root / ("usps.bz2" if part == "train" else "usps.t.bz2"), n_features=256)
    return ((values.toarray().reshape(-1, 16, 16) + 1) / 2 * 255).astype(np.uint8), labels - 1


def _read_svhn(root: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read an SVHN file, in which the digit zero has the label 10."""
    from scipy.io import loadmat

    file = loadmat(root / f"{part}_32x32.mat")
    return file["X"].transpose(3, 2, 0, 1), file["y"].ravel() % 10


_READERS = {"mnist": _read_mnist, "usps": _read_usps, "svhn": _read_svhn}
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
    """Three classes of five images in every domain; of the digits 40 in each training set and 20 in each test set."""
    if name not in _MINIATURES:
        _digit_miniature(folder)
        return
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


def _digit_miniature(folder: Path) -> None:
    from scipy.io import savemat

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    usps: dict[str, np.ndarray] = {}
    for part, prefix, count in (("train", "train", 40), ("test", "t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        coloured = np.stack([picture(label, i, 32, 32) for i, label in enumerate(labels.tolist())])
        grey = coloured.mean(3).astype(np.uint8)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, count, 28, 28) + grey[:, :28, :28].tobytes()
        )
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
        usps |= {f"{part}_images": grey[:, 8:24, 8:24], f"{part}_labels": labels}
        mat = folder / f"{part}_32x32.mat"
        savemat(mat, {"X": coloured.transpose(1, 2, 3, 0), "y": np.where(labels, labels, 10)[:, None]})
        written = mat.read_bytes()  # its first 116 bytes are a text with the time
        mat.write_bytes(b"MATLAB 5.0 MAT-file".ljust(116) + written[116:])
    np.savez(folder / "usps.npz", **usps)  # type: ignore[arg-type]  # numpy's stub has an option among the names
