"""Wrong entries of annotation files, all of them; and what a data set leaves out: what `data --check` found.

The readers of COCO and VOC stop at the first wrong entry.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from batchformer.errors import UserError
from batchformer.files import read_json

BEYOND = 0.1  # fraction of an image's side by which a box may exceed it; annotated boxes do by a pixel or two


class WrongEntry(NamedTuple):
    """A wrong entry, and what is left out of training because of it: an entry of the file, or the whole image."""

    file: str  # relative to the root
    reason: str
    entry: int | None = None  # its number in the file
    image: str | None = None  # relative to the root


def box_problem(corners: Sequence[float], height: int, width: int) -> str | None:
    """What is wrong with a box x1, y1, x2, y2 in pixels of an image."""
    x1, y1, x2, y2 = corners
    if not all(math.isfinite(value) for value in corners):
        return "its box is not made of numbers"
    if x2 < x1 or y2 < y1:
        return f"its box has a negative width or height ({x2 - x1:g} x {y2 - y1:g})"
    if x2 == x1 or y2 == y1:
        return f"its box has no width or no height ({x2 - x1:g} x {y2 - y1:g})"
    spare = [max(BEYOND * side, 2) for side in (width, height)]
    if min(x1 + spare[0], y1 + spare[1], width + spare[0] - x2, height + spare[1] - y2) < 0:
        return (
            f"its box reaches from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g}), out of its image of {width} x {height} pixels"
        )
    return None


def coco_problems(content: dict[str, Any], file: str) -> list[WrongEntry]:
    """The wrong entries of the list `annotations` of a file in COCO's format."""
    images = {entry.get("id"): entry for entry in content["images"]}
    categories = {entry.get("id") for entry in content["categories"]}
    found: list[WrongEntry] = []
    names: dict[Any, int] = {}
    boxes: dict[Any, str] = {}
    for number, entry in enumerate(content["annotations"]):
        name = f"annotation {entry.get('id', f'number {number + 1}')}"
        if (identity := entry.get("id")) is not None and names.setdefault(_plain(identity), number) != number:
            found.append(WrongEntry(file, f"{name}: another annotation has the same id"))
        reason = _coco_problem(entry, images, categories)
        if reason is None:
            key = (entry["image_id"], entry["category_id"], *entry["bbox"], entry.get("iscrowd", 0))
            if key in boxes:
                reason = f"it is a copy of {boxes[key]}"
            boxes.setdefault(key, name)
        if reason is not None:
            found.append(WrongEntry(file, f"{name}: {reason}", number))
    return found


def _coco_problem(entry: dict[str, Any], images: dict[Any, dict[str, Any]], categories: set[Any]) -> str | None:
    for key in ("image_id", "category_id", "bbox"):
        if key not in entry:
            return f"it has no {key!r}"
    if not isinstance(entry["image_id"], int) or entry["image_id"] not in images:
        return f"it names image {entry['image_id']}, which the file does not list"
    if not isinstance(entry["category_id"], int) or entry["category_id"] not in categories:
        return f"it names category {entry['category_id']}, which the file does not list"
    box, image = entry["bbox"], images[entry["image_id"]]
    if not is_box(box):
        return f"its bbox is not [x, y, width, height], but {str(box)[:60]}"
    if not isinstance(entry.get("area", 0), int | float):
        return f"its area is not a number, but {str(entry['area'])[:60]}"
    x, y, w, h = box
    return box_problem((x, y, x + w, y + h), image["height"], image["width"])


def is_box(box: Any) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(isinstance(value, int | float) for value in box)


def _plain(identity: Any) -> Any:
    return identity if isinstance(identity, int | str) else str(identity)


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
