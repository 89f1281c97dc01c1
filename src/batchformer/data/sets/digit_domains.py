"""MNIST, USPS and SVHN as domains."""

import struct
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.domains import DomainData, Part
from batchformer.data.sets.files import existing_root
from batchformer.data.sets.miniature import picture, write_mat
from batchformer.errors import UserError

LAYOUT = (
    "DIR/MNIST/raw/*-ubyte; DIR/usps.npz or DIR/{usps,usps.t}.bz2; DIR/{train,test}_32x32.mat\n"
    "(two of the three are enough)"
)


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


def miniature(folder: Path) -> None:
    """40 images in each training set and 20 in each test set."""
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
        svhn = {"X": coloured.transpose(1, 2, 3, 0), "y": np.where(labels, labels, 10)[:, None]}
        write_mat(folder / f"{part}_32x32.mat", svhn)
    np.savez(folder / "usps.npz", **usps)  # type: ignore[arg-type]  # numpy's stub has an option among the names
