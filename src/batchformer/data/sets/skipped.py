"""Files and annotations that a data set leaves out: what `batchformer data RECIPE --check` found."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.files import read_json


@dataclass(frozen=True)
class Skipped:
    """What to leave out, by paths relative to the root of the data.

    `training` is left out of training only: copies of pictures that results are measured on. `annotations` are numbers
    of entries in a file (of COCO's list, of the objects in VOC's XML), with the sha256 of the file they were found in.
    """

    files: frozenset[str] = frozenset()
    training: frozenset[str] = frozenset()
    annotations: Mapping[str, tuple[str, frozenset[int]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.files or self.training or self.annotations)

    def keeps(self, path: str, training: bool) -> bool:
        return path not in self.files and not (training and path in self.training)

    def entries(self, root: str, file: str) -> frozenset[int]:
        """The numbers of the entries of an annotation file to leave out; refuses a file that has changed since."""
        if file not in self.annotations:
            return frozenset()
        digest, positions = self.annotations[file]
        if digest != file_digest(Path(root) / file):
            raise UserError(
                f"{Path(root) / file} is not the file that was checked: check the data again (batchformer data RECIPE "
                f"--check), or leave --skip-bad out."
            )
        return positions

    def as_dict(self) -> dict[str, Any]:
        annotations = {
            file: {"sha256": digest, "entries": sorted(positions)}
            for file, (digest, positions) in sorted(self.annotations.items())
        }
        return {"files": sorted(self.files), "training": sorted(self.training), "annotations": annotations}


class SkipsBad:
    """Data modules with an option `skip_bad`, the file of a check; it is read when the data are."""

    root: str | None
    skip_bad: str | None

    @cached_property
    def skipped(self) -> Skipped:
        return read_skipped(self.skip_bad, self.root)


def read_skipped(file: str | None, root: str | None) -> Skipped:
    """Read the section `skip` of a file that the check wrote; nothing is left out where `file` is None.

    A file about another folder than `root` is refused, unless that is gone: the data may have been moved.
    """
    if file is None:
        return Skipped()
    path = Path(file).expanduser()
    again = "batchformer data RECIPE --data-root DIR --check writes it"
    if not path.is_file():
        raise UserError(f"data.skip_bad: there is no file {path}: {again}.")
    content = read_json(path, "is not what a check wrote", again)
    try:
        skip, checked = content["skip"], Path(content["root"]).expanduser()
        annotations = {
            str(name): (str(each["sha256"]), frozenset(int(position) for position in each["entries"]))
            for name, each in skip["annotations"].items()
        }
        found = Skipped(frozenset(map(str, skip["files"])), frozenset(map(str, skip["training"])), annotations)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UserError(f"data.skip_bad: {path} is not what a check wrote: {again}.") from problem
    if root is not None and checked.is_dir() and not checked.samefile(Path(root).expanduser()):
        raise UserError(f"data.skip_bad: {path} is about {checked}, not about {root}: {again}.")
    return found


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
