"""Lists of "path label" lines: the layout ImageNet-LT, Places-LT and iNaturalist 2018 are published in."""

from pathlib import Path
from typing import Any, NamedTuple

from batchformer.data.sets.classification import check_labels
from batchformer.data.sets.files import FileData, Listing, find_file, read_lines, read_pairs
from batchformer.data.sets.miniature import FILE_COUNTS, TEST_PER_CLASS, save_picture
from batchformer.errors import UserError

LAYOUT = {
    "imagenet-lt": "DIR/{train,val}/..., ImageNet_LT_train.txt, ImageNet_LT_test.txt",
    "places-lt": "DIR/{data_256,test_256}/..., Places_LT_train.txt, Places_LT_test.txt",
    "inaturalist18": "DIR/train_val2018/..., iNaturalist18_train.txt, iNaturalist18_val.txt",
}


class ListFiles(FileData):
    """Data set of list files: each line is an image path (relative to `root`) and its label, an integer from 0.

    Lists are looked for in `root` and then in the working directory. `val_list` is the list results are reported on:
    ImageNet_LT_test.txt, Places_LT_test.txt, iNaturalist18_val.txt. `names` may name a text file with one class name
    a line. `meta_list` may name a third list, the set `meta`, for methods that learn from a set of their own (BALMS):
    ImageNet_LT_val.txt, Places_LT_val.txt. iNaturalist 2018 has statistics of its own: mean (.466, .471, .380), std
    (.195, .194, .192). `holdout` and `split_seed`: see `ImageFolders`.
    """

    def __init__(
        self,
        root: str | None = None,
        train_list: str = "train.txt",
        val_list: str = "val.txt",
        names: str | None = None,
        meta_list: str | None = None,
        workers: int = 8,
        holdout: float = 0.0,
        split_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(root, workers=workers, **options)
        self.hold_out(holdout, split_seed)
        self.train_list = train_list
        self.val_list = val_list
        self.names, self.meta_list = names, meta_list

    def _read_listings(self, root: str) -> tuple[dict[str, Listing], list[str]]:
        train = read_list(find_file(self.train_list, root, "train_list"), root)
        test = read_list(find_file(self.val_list, root, "val_list"), root)
        classes, listings = int(train.labels.max()) + 1, {"train": train, "val": test}
        listings |= self._hold_out(train, self.holdout, self.split_seed)
        if self.meta_list is not None:
            listings["meta"] = read_list(find_file(self.meta_list, root, "meta_list"), root)
            check_labels(listings["meta"].labels, classes, listings["meta"].source)
        if self.names is None:
            return listings, [str(c) for c in range(classes)]
        path = find_file(self.names, root, "names")
        names = [line.strip() for line in read_lines(path) if line.strip()]
        if len(names) != classes:
            raise UserError(
                f"{path} has {len(names)} class names, but the labels in {train.source} go up to {classes - 1}."
            )
        return listings, names


def read_list(path: Path, root: str) -> Listing:
    """Read a list of "path label" lines; paths may contain spaces."""

    def pair(line: str) -> tuple[str, int] | None:
        file, *label = line.rsplit(maxsplit=1)
        known = label and label[0].isascii() and label[0].isdigit()
        return (file.strip(), int(label[0])) if known else None

    return read_pairs(path, pair, '"path label" with a label from 0 on', root)


class _ListedFiles(NamedTuple):
    """Names of the lists, and of the images in them (c: class, i: number in the class, n: number in the list)."""

    train_list: str
    test_list: str
    train_path: str
    test_path: str
    val_list: str | None = None
    val_path: str = ""


_MINIATURES = {
    "imagenet-lt": _ListedFiles(
        "ImageNet_LT_train.txt", "ImageNet_LT_test.txt", "train/n{c:08d}/n{c:08d}_{i}.JPEG", "val/test_{n:08d}.JPEG"
    ),
    "places-lt": _ListedFiles(
        "Places_LT_train.txt",
        "Places_LT_test.txt",
        "data_256/c/class_{c}/{i:08d}.jpg",
        "test_256/test_{n:08d}.jpg",
        "Places_LT_val.txt",
        "val_256/val_{n:08d}.jpg",
    ),
    "inaturalist18": _ListedFiles(
        "iNaturalist18_train.txt",
        "iNaturalist18_val.txt",
        "train_val2018/Plantae/{c}/{i}.jpg",
        "train_val2018/Plantae/{c}/val_{n}.jpg",
    ),
}


def miniature(folder: Path, name: str) -> None:
    """Eight classes of 160 to 2 training images."""
    layout = _MINIATURES[name]
    train = [(layout.train_path.format(c=c, i=i), c, i) for c, count in enumerate(FILE_COUNTS) for i in range(count)]
    spread = [(c, i) for c in range(len(FILE_COUNTS)) for i in range(TEST_PER_CLASS)]
    test = [(layout.test_path.format(c=c, n=n), c, 10_000 + i) for n, (c, i) in enumerate(spread)]
    lists = {layout.train_list: train, layout.test_list: test}
    if layout.val_list is not None:
        lists[layout.val_list] = [(layout.val_path.format(n=n), c, 20_000 + i) for n, (c, i) in enumerate(spread)]
    for listing, entries in lists.items():
        for path, label, number in entries:
            save_picture(folder / path, label, number)
        (folder / listing).write_text("".join(f"{path} {label}\n" for path, label, _ in entries))
