"""Lists of "path label" lines: the layout ImageNet-LT, Places-LT and iNaturalist 2018 are published in."""

from pathlib import Path
from typing import Any

import numpy as np

from batchformer.data.files import FileData, Listing, find_file, read_lines
from batchformer.errors import UserError


class ListFiles(FileData):
    """Each line of a list names an image (relative to `root`) and its label, a whole number from 0.

    Lists are looked for in `root` and then in the working directory. `val_list` is the list results are reported on:
    ImageNet_LT_test.txt, Places_LT_test.txt, iNaturalist18_val.txt. `names` may name a text file with one class name
    a line. iNaturalist 2018 has statistics of its own: mean (.466, .471, .380), std (.195, .194, .192).
    """

    def __init__(
        self,
        root: str | None = None,
        train_list: str = "train.txt",
        val_list: str = "val.txt",
        names: str | None = None,
        workers: int = 8,
        **options: Any,
    ) -> None:
        super().__init__(root, workers=workers, **options)
        self.train_list = train_list
        self.val_list = val_list
        self.names = names

    def _read_listings(self, root: str) -> tuple[Listing, Listing, list[str]]:
        train = read_list(find_file(self.train_list, root, "train_list"))
        test = read_list(find_file(self.val_list, root, "val_list"))
        classes = int(train.labels.max()) + 1
        if self.names is None:
            return train, test, [str(c) for c in range(classes)]
        path = find_file(self.names, root, "names")
        names = [line.strip() for line in read_lines(path) if line.strip()]
        if len(names) != classes:
            raise UserError(
                f"{path} has {len(names)} class names, but the labels in {train.source} go up to {classes - 1}."
            )
        return train, test, names


def read_list(path: Path) -> Listing:
    """The paths may contain spaces; empty lines are passed over; anything else that is no pair is named by its line."""
    paths: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        parts = line.rsplit(maxsplit=1)
        if len(parts) != 2 or not parts[1].isascii() or not parts[1].isdigit():
            raise UserError(
                f'{path}, line {number}: expected "path label" with a label from 0 on, found {line.strip()[:80]!r}.'
            )
        paths.append(parts[0].strip())
        labels.append(int(parts[1]))
    if not paths:
        raise UserError(f"{path} lists no image.")
    return Listing(paths, np.array(labels, dtype=np.int64), str(path))
