"""Own images with boxes, in COCO's or VOC's layout, whichever is there."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from batchformer.data.augment.options import check_fraction
from batchformer.data.sets.annotations import WrongEntry
from batchformer.data.sets.boxes import Categories, Scenes
from batchformer.data.sets.coco import CocoDetection
from batchformer.data.sets.coco import miniature as coco_miniature
from batchformer.data.sets.detection import DetectionData, scene_part
from batchformer.data.sets.files import existing_root
from batchformer.data.sets.voc import EVERYTHING, VocDetection
from batchformer.errors import UserError

LAYOUT = """\
COCO's: DIR/annotations/{train,val}.json (or instances_*.json, or beside the images), DIR/{train,val}/*.jpg
VOC's:  DIR/JPEGImages/*.jpg, DIR/Annotations/*.xml, if wanted DIR/ImageSets/Main/{train,val}.txt"""
_PARTS = {"train": ("train", "trainval"), "val": ("val", "valid", "validation", "test")}
_FILES = (
    "annotations/instances_{}.json", "annotations/instances_{}2017.json", "annotations/{}.json", "{}.json",
    "instances_{}.json", "{}/_annotations.coco.json", "{}/annotations.json",
)  # fmt: skip
_FOLDERS = ("{}", "{}2017", "images/{}", "{}/images", "images", "")


class DetectionFolder(DetectionData):
    """A folder in COCO's layout (JSON files) or in VOC's (XML files): what is there is found by its names.

    The parts may be called train and val, valid, validation or test. `val_fraction`: where there is no part to evaluate
    on, this part of the images is set aside for it, drawn by `split_seed` and stratified by the rarest class in them.
    For other names see `CocoDetection` and `VocDetection`. Batches and other keywords: see `DetectionData`.
    """

    def __init__(self, root: str | None = None, *, val_fraction: float | None = None, **options: Any) -> None:
        super().__init__(root, **options)
        check_fraction("val_fraction", val_fraction or 0)
        self.val_fraction = val_fraction or None

    def _read_scenes(self, root: str) -> tuple[dict[str, Scenes], Categories]:
        inner, has_val = self._found(root)
        inner.skipped = self.skipped
        read, categories = inner._read_scenes(root)
        if not has_val:
            assert self.val_fraction is not None
            inside = scene_part(read["train"], self.val_fraction, self.split_seed, "val", at_least=1)
            parts = {"train": ~inside, "val": inside}
            read = {part: read["train"].subset(np.flatnonzero(mask)) for part, mask in parts.items()}
        return read, categories

    def annotation_problems(self) -> list[WrongEntry]:
        return self._found(existing_root(self.root))[0].annotation_problems()

    def _found(self, root: str) -> tuple[DetectionData, bool]:
        """The reader of the layout that is there, and whether that has images to evaluate on."""
        place = Path(root)
        options: dict[str, Any] = {}
        if (place / "Annotations").is_dir():
            lists = {part: _first(place / "ImageSets" / "Main", [f"{n}.txt" for n in _PARTS[part]]) for part in _PARTS}
            train = EVERYTHING if lists["train"] is None else Path(lists["train"]).stem
            val = None if lists["val"] is None else Path(lists["val"]).stem
            self._check_val(root, val, "ImageSets/Main/val.txt")
            return VocDetection(root, train=train, val=val or train), val is not None
        for part, names in _PARTS.items():
            file = _first(place, [pattern.format(name) for name in names for pattern in _FILES])
            if file is None and part == "train":
                raise UserError(
                    f"{root} has neither annotations/train.json (COCO's layout) nor Annotations/*.xml (VOC's): put the "
                    "boxes there, or name the files (batchformer.data.CocoDetection, VocDetection)."
                )
            if file is None:
                self._check_val(root, None, "annotations/val.json")
                options |= {"val_annotations": options["train_annotations"], "val_images": options["train_images"]}
                return CocoDetection(root, **options), False
            options |= {f"{part}_annotations": file, f"{part}_images": _image_folder(place, file, names)}
        self._check_val(root, file, "")
        return CocoDetection(root, **options), True

    def _check_val(self, root: str, val: str | None, expected: str) -> None:
        if val is None and self.val_fraction is None:
            raise UserError(
                f"{Path(root) / expected} is not there: results are measured on images that are not trained on; add "
                "it, or set a part of the images aside, --data.val_fraction 0.2."
            )
        if val is not None and self.val_fraction is not None:
            raise UserError(
                f"data.val_fraction divides images without a part to evaluate on, and {root} has one ({val}): leave "
                "data.val_fraction out."
            )


def _first(folder: Path, names: list[str]) -> str | None:
    return next((name for name in names if (folder / name).is_file()), None)


def _image_folder(root: Path, file: str, names: tuple[str, ...]) -> str:
    """The folder that has the first image of an annotation file."""
    try:
        images = json.loads((root / file).read_bytes())["images"]
        first = str(images[0]["file_name"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return str(Path(file).parent)  # the reader says what is wrong with the file
    folders = [pattern.format(name) for name in names for pattern in _FOLDERS]
    for folder in (*folders, str(Path(file).parent)):
        if (root / folder / first).is_file():
            return folder
    tried = ", ".join(dict.fromkeys(str(root / folder) for folder in folders[:3]))
    raise UserError(f"image {first}, the first in {root / file}, is not in {tried} or {root}: put the images there.")


def miniature(folder: Path) -> None:
    """24 and 8 images of five classes, in COCO's layout."""
    coco_miniature(folder)
    for part in ("train", "val"):
        (folder / f"{part}2017").rename(folder / part)
        (folder / f"annotations/instances_{part}2017.json").rename(folder / f"annotations/{part}.json")
