"""CIFAR-10 and CIFAR-100 from the official python files: complete, and with a long tail.

For the long tail the papers keep n_c = int(500 F^(-c / 99)) (CIFAR-10: int(5000 F^(-c / 9))) training images of class
c, classes in label order, F the imbalance; the test set is the full one. The released code selects them by an unseeded
shuffle; here they are the first in file order.
"""

import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from batchformer.data.augment.options import ArrayAugmentation
from batchformer.data.loading.order import generator
from batchformer.data.sets.arrays import ArrayData, Split
from batchformer.data.sets.classification import tail_counts, tail_subset
from batchformer.data.sets.miniature import TEST_PER_CLASS, picture
from batchformer.errors import UserError, reason_of

# the globals that the official pickles need: a damaged or foreign file must not run code
_ALLOWED = {
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy._core.multiarray": {"_reconstruct"},
    "numpy": {"ndarray", "dtype"},
    "_codecs": {"encode"},
    "builtins": {"bytes"},
    "__builtin__": {"bytes"},
}
LAYOUT = {
    "cifar10": "DIR/cifar-10-batches-py/{data_batch_1..5,test_batch,...}",
    "cifar100": "DIR/cifar-100-python/{train,test,meta}",
}


class _Files(NamedTuple):
    """The official layout, and torchvision's name for the download."""

    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_key: str
    names_key: str
    torchvision_name: str


_BATCHES = tuple(f"data_batch_{part}" for part in range(1, 6))
_CIFAR10 = _Files("cifar-10-batches-py", _BATCHES, "test_batch", "batches.meta", "labels", "label_names", "CIFAR10")
_CIFAR100 = _Files("cifar-100-python", ("train",), "test", "meta", "fine_labels", "fine_label_names", "CIFAR100")


class _CIFAR(ArrayData):
    # the statistics of CIFAR-10, which the released code uses for CIFAR-100 as well
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2023, 0.1994, 0.2010)
    native_size = image_size = 32

    files: ClassVar[_Files]

    def __init__(self, root: str | None, download: bool, batch_size: int = 512, **options: Any) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.download = download

    def prepare_data(self) -> None:
        """Download by torchvision, if requested and missing; Lightning calls this in one process of each machine."""
        if not self.download or self._missing() is None:
            return
        if self.root is None:
            raise UserError("data.root is not set: name the folder the download is to go to.")
        import torchvision

        name = self.files.torchvision_name
        try:
            getattr(torchvision.datasets, name)(self.root, download=True)
        except Exception as error:  # no network, no space, a broken archive
            raise UserError(f"{name} could not be downloaded to {self.root}: {error}") from error

    def setup(self, stage: str | None = None) -> None:
        if not self._ready:
            self.prepare_data()
        super().setup(stage)

    def _keep(self, train: Split, names: list[str]) -> Split:
        """The part of the training images that is trained on."""
        return train

    def _base(self) -> Path:
        return Path(self.root or ".").expanduser() / self.files.folder

    def _missing(self) -> str | None:
        files = (*self.files.train, self.files.test, self.files.names)
        return next((name for name in files if not (self._base() / name).is_file()), None)

    def read_splits(self) -> tuple[dict[str, Split], list[str]]:
        folder = self.files.folder
        if self.root is None:
            raise UserError(
                f"data.root is not set: name the folder that holds {folder}/, or set data.download to true."
            )
        missing = self._missing()
        if missing is not None:
            raise UserError(
                f"{self.files.torchvision_name} was looked for in {self._base()}, but {missing} is not there: "
                f"set data.root to the folder that holds {folder}/, or data.download to true."
            )
        path, key = self._base() / self.files.names, self.files.names_key
        names: Any = read_pickle(path).get(key)
        if not isinstance(names, list) or not names:
            raise UserError(f"{path} is damaged: it has no list '{key}'; unpack or download it again.")
        parts = [self._read_file(name, len(names)) for name in self.files.train]
        train = Split(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))
        test = self._read_file(self.files.test, len(names))
        return {"train": self._keep(train, names), "val": test}, [str(name) for name in names]

    def _read_file(self, name: str, classes: int) -> Split:
        path, key = self._base() / name, self.files.label_key
        entry = read_pickle(path)
        images = image_array(entry, "data", path)
        labels = np.asarray(entry.get(key, ()))
        if (
            labels.shape != (len(images),)
            or labels.dtype.kind != "i"
            or not (0 <= labels.min() <= labels.max() < classes)
        ):
            raise UserError(
                f"{path} is damaged: '{key}' is not one label from 0 to {classes - 1} for each of its "
                f"{len(images)} images; unpack or download it again."
            )
        return Split(images, labels.astype(np.int64))


class _Complete(_CIFAR):
    """The complete data set at `image_size`: 32 is native, others are resized (see ArrayData)."""

    def __init__(
        self,
        root: str | None = None,
        download: bool = False,
        image_size: int = 32,
        augment: ArrayAugmentation = "randaugment",
        eval_batch_size: int = 500,
        **options: Any,
    ) -> None:
        super().__init__(
            root, download, image_size=image_size, augment=augment, eval_batch_size=eval_batch_size, **options
        )


class _WithTail(_CIFAR):
    """The long-tailed subset of the papers, at 32 pixels; options that the papers do not vary are fixed."""

    def __init__(
        self,
        root: str | None = None,
        imbalance: float = 100.0,
        download: bool = False,
        augment: ArrayAugmentation = "autoaugment-cutout",
        eval_batch_size: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(
            root, download, augment=augment, eval_batch_size=eval_batch_size, image_size=None, statistics="data",
            erase_prob=0.0, augment_repeats=1, **options,
        )  # fmt: skip
        self.imbalance = imbalance

    def _keep(self, train: Split, names: list[str]) -> Split:
        counts = np.bincount(train.labels, minlength=len(names))
        # 500 (CIFAR-10: 5000) in the official files, less in a miniature; files cut to the tail have the whole head
        kept = tail_subset(train.labels, names, int(counts.max()), self.imbalance)
        return Split(train.images[kept], train.labels[kept])


class CIFAR100(_Complete):
    """CIFAR-100: `root` holds cifar-100-python/. 50,000 training and 10,000 test images."""

    files = _CIFAR100


class CIFAR10(_Complete):
    """CIFAR-10: `root` holds cifar-10-batches-py/. 50,000 training and 10,000 test images."""

    files = _CIFAR10


class CIFAR100LT(_WithTail):
    """CIFAR-100-LT: `root` holds cifar-100-python/. 10,847 training images at imbalance 100, 9,502 at 200."""

    files = _CIFAR100


class CIFAR10LT(_WithTail):
    """CIFAR-10-LT: `root` holds cifar-10-batches-py/. 12,406 training images at imbalance 100."""

    files = _CIFAR10


class _DataUnpickler(pickle.Unpickler):
    """Unpickler limited to dicts, lists, strings, numbers and numpy arrays, as in the official files; no callables."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a file of images")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in the file, keys as text; a UserError that names the file when it cannot be had."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from error
    try:
        value = _DataUnpickler(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError("it does not hold a dictionary")
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"{path} is damaged or not an official CIFAR file ({reason_of(error)}): unpack or download it again."
        ) from error
    return value


def image_array(entry: dict[str, Any], key: str, path: Path) -> np.ndarray:
    """(n, 3, 32, 32) bytes: each row of the file is the red, then the green, then the blue plane."""
    data = entry.get(key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"{path} is damaged: '{key}' is not an array of 32 x 32 images; unpack or download it again.")
    return data.reshape(-1, 3, 32, 32)


def miniature(folder: Path, name: str) -> None:
    """The official classes, a head large enough for an imbalance of 100 and 200, and only the images of such a tail."""
    files, classes, head, tests, digits = (
        (_CIFAR10, 10, 300, 10, 1) if name == "cifar10" else (_CIFAR100, 100, 200, TEST_PER_CLASS, 2)
    )
    base = folder / files.folder
    sets = ((files.train, tail_counts(classes, head, 100), 0), ((files.test,), [tests] * classes, 10_000))
    for parts, counts, first in sets:
        rows, labels = _generated_rows(counts, first)
        for part, positions in zip(parts, np.array_split(np.arange(len(labels)), len(parts)), strict=True):
            chosen = [labels[p] for p in positions]
            coarse = {} if files is _CIFAR10 else {"coarse_labels": [c // 5 for c in chosen]}
            _write_pickle(base / part, {"data": rows[positions], files.label_key: chosen, **coarse})
    _write_pickle(base / files.names, {files.names_key: [f"class_{c:0{digits}d}" for c in range(classes)]})


def _generated_rows(counts: list[int], first_number: int) -> tuple[np.ndarray, list[int]]:
    """CIFAR's rows of planes, the classes mixed as they are in the official files."""
    pairs = [(c, i) for c, count in enumerate(counts) for i in range(count)]
    pairs = [pairs[k] for k in generator(first_number, "mix").permutation(len(pairs))]
    rows = [picture(c, first_number + i, 32, 32).transpose(2, 0, 1).reshape(-1) for c, i in pairs]
    return np.stack(rows), [c for c, _ in pairs]


def _write_pickle(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))
