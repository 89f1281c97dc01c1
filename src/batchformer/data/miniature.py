"""Tiny data sets in the official layouts, for trying a recipe out without the data it is made for.

The pictures are stripes whose colour and direction belong to the class, under noise: enough to learn something, and
the same bytes every time.
"""

import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from batchformer.data.detection_miniature import write_coco, write_coco_panoptic, write_voc
from batchformer.data.seeds import generator
from batchformer.data.tail import tail_counts
from batchformer.errors import UserError

_FILE_COUNTS = (160, 80, 40, 20, 10, 5, 3, 2)
_TEST_PER_CLASS = 3


class _Layout(NamedTuple):
    """Names of the two lists, and of the images in them (c: class, i: number in the class, n: number in the list)."""

    train_list: str
    test_list: str
    train_path: str
    test_path: str


_LISTS = {
    "imagenet-lt": _Layout(
        "ImageNet_LT_train.txt", "ImageNet_LT_test.txt", "train/n{c:08d}/n{c:08d}_{i}.JPEG", "val/test_{n:08d}.JPEG"
    ),
    "places-lt": _Layout(
        "Places_LT_train.txt", "Places_LT_test.txt", "data_256/c/class_{c}/{i:08d}.jpg", "test_256/test_{n:08d}.jpg"
    ),
    "inaturalist18": _Layout(
        "iNaturalist18_train.txt",
        "iNaturalist18_val.txt",
        "train_val2018/Plantae/{c}/{i}.jpg",
        "train_val2018/Plantae/{c}/val_{n}.jpg",
    ),
}
_WNIDS = {
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
_BALANCED = 32  # training images per class
NAMES = ("cifar10", "cifar100", "tiny-imagenet", "imagenet", *_LISTS, "folder", "coco", "coco-panoptic", "voc")


def write(name: str, dest: str | Path) -> Path:
    """Write the miniature of the named data set into the new or empty folder `dest`; what it returns is `data.root`.

    The CIFAR miniatures have the official classes and a head large enough for an imbalance of 100 and 200; they hold
    only the images that such a tail needs. Those of Tiny-ImageNet and ImageNet have ten classes of 32 images, the
    others eight classes of 160 to 2. Those with boxes (coco, coco-panoptic, voc) have 24 and 8 images of five classes.
    """
    if name not in NAMES:
        raise UserError(f"there is no miniature of {name!r}: choose one of {', '.join(NAMES)}.")
    root = Path(dest)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} exists and is not an empty folder: name another one.")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{root} cannot be made ({problem.strerror}): name another folder.") from problem
    if name in _LISTS:
        _write_lists(name, root)
    else:
        _WRITERS[name](root)
    return root


def picture(label: int, number: int, height: int, width: int) -> np.ndarray:
    """(height, width, 3) bytes that depend on the arguments only."""
    colour = generator(label, "colour").integers(40, 216, 3)
    noise = generator(label, number, "noise").integers(-30, 31, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    stripes = np.sin((x * (label % 5) + y * (label % 3 + 1) + 3 * number) * 0.5)[..., None] * 40
    return np.clip(colour + stripes + noise, 0, 255).astype(np.uint8)


def _rows(counts: list[int], first_number: int) -> tuple[np.ndarray, list[int]]:
    """CIFAR's rows of planes, the classes mixed as they are in the official files."""
    pairs = [(c, i) for c, count in enumerate(counts) for i in range(count)]
    pairs = [pairs[k] for k in generator(first_number, "mix").permutation(len(pairs))]
    rows = [picture(c, first_number + i, 32, 32).transpose(2, 0, 1).reshape(-1) for c, i in pairs]
    return np.stack(rows), [c for c, _ in pairs]


def _dump(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def _write_cifar100(root: Path) -> None:
    base = root / "cifar-100-python"
    for file, counts, first in (("train", tail_counts(100, 200, 100), 0), ("test", [_TEST_PER_CLASS] * 100, 10_000)):
        rows, labels = _rows(counts, first)
        _dump(base / file, {"data": rows, "fine_labels": labels, "coarse_labels": [c // 5 for c in labels]})
    _dump(base / "meta", {"fine_label_names": [f"class_{c:02d}" for c in range(100)]})


def _write_cifar10(root: Path) -> None:
    base = root / "cifar-10-batches-py"
    rows, labels = _rows(tail_counts(10, 300, 100), 0)
    for part, positions in enumerate(np.array_split(np.arange(len(labels)), 5), 1):
        _dump(base / f"data_batch_{part}", {"data": rows[positions], "labels": [labels[p] for p in positions]})
    rows, labels = _rows([10] * 10, 10_000)
    _dump(base / "test_batch", {"data": rows, "labels": labels})
    _dump(base / "batches.meta", {"label_names": [f"class_{c}" for c in range(10)]})


def _save(path: Path, label: int, number: int, height: int = 40, width: int = 48, mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(label, number, height, width)).convert(mode).save(path, format="JPEG", quality=85)


def _write_lists(name: str, root: Path) -> None:
    layout = _LISTS[name]
    train = [(layout.train_path.format(c=c, i=i), c, i) for c, count in enumerate(_FILE_COUNTS) for i in range(count)]
    spread = [(c, i) for c in range(len(_FILE_COUNTS)) for i in range(_TEST_PER_CLASS)]
    test = [(layout.test_path.format(c=c, n=n), c, 10_000 + i) for n, (c, i) in enumerate(spread)]
    for listing, entries in ((layout.train_list, train), (layout.test_list, test)):
        for path, label, number in entries:
            _save(root / path, label, number)
        (root / listing).write_text("".join(f"{path} {label}\n" for path, label, _ in entries))


def _write_folders(root: Path) -> None:
    for label, count in enumerate(_FILE_COUNTS):
        for i in range(count):
            _save(root / "train" / f"class_{label}" / f"{i:04d}.jpg", label, i)
        for i in range(_TEST_PER_CLASS):
            _save(root / "val" / f"class_{label}" / f"{i:04d}.jpg", label, 10_000 + i)


def _write_tiny_imagenet(root: Path) -> None:
    """As in the official archive some images are grey."""
    for label, wnid in enumerate(_WNIDS):
        for i in range(_BALANCED):
            mode = "L" if i == 0 else "RGB"
            _save(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", label, i, 64, 64, mode)
    lines = []
    for number in range(_TEST_PER_CLASS * len(_WNIDS)):
        label, file = number % len(_WNIDS), f"val_{number}.JPEG"
        _save(root / "val" / "images" / file, label, 10_000 + number, 64, 64)
        lines.append(f"{file}\t{list(_WNIDS)[label]}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in reversed(_WNIDS)))
    (root / "words.txt").write_text("".join(f"{wnid}\t{words}\n" for wnid, words in _WNIDS.items()))


def _write_imagenet(root: Path) -> None:
    for label, wnid in enumerate(_WNIDS):
        for i in range(_BALANCED):
            _save(root / "train" / wnid / f"{wnid}_{i}.JPEG", label, i)
        for i in range(_TEST_PER_CLASS):
            number = i * len(_WNIDS) + label + 1
            _save(root / "val" / wnid / f"ILSVRC2012_val_{number:08d}.JPEG", label, 10_000 + i)


_WRITERS = {
    "cifar10": _write_cifar10,
    "cifar100": _write_cifar100,
    "tiny-imagenet": _write_tiny_imagenet,
    "imagenet": _write_imagenet,
    "folder": _write_folders,
    "coco": write_coco,
    "coco-panoptic": write_coco_panoptic,
    "voc": write_voc,
}
