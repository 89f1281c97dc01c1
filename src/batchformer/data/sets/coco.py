"""COCO in its official layout, and own data in its format: JSON files are read, validated and converted to arrays."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchformer.data.sets.annotations import WrongEntry, coco_problems, is_box
from batchformer.data.sets.boxes import Categories, Scenes, make_scenes
from batchformer.data.sets.detection import DetectionData
from batchformer.data.sets.files import existing_root, refuse_outside
from batchformer.data.sets.miniature import THINGS, TRAIN_SCENES, VAL_SCENES, save_scene
from batchformer.errors import UserError, reason_of

LAYOUT = "DIR/{train,val}2017/*.jpg, annotations/instances_{train,val}2017.json"
_LISTS = ("images", "annotations", "categories")


class CocoDetection(DetectionData):
    """root/train2017/*.jpg, root/val2017/*.jpg and root/annotations/instances_{train,val}2017.json.

    Own data: name the folders of images and the files of annotations, all relative to `root`; a `bbox` is x, y, width,
    height in pixels. Categories are those of the training annotations, sorted by id. What the other keywords do and
    what batches are: see `DetectionData`. As in DETR, crowds are not trained on, boxes are cut at the edges of the
    image and those of no area left out; evaluation uses all boxes as annotated.
    """

    def __init__(
        self,
        root: str | None = None,
        train_images: str = "train2017",
        train_annotations: str = "annotations/instances_train2017.json",
        val_images: str = "val2017",
        val_annotations: str = "annotations/instances_val2017.json",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.files = {"train": (train_annotations, train_images), "val": (val_annotations, val_images)}

    def _read_scenes(self, root: str) -> tuple[dict[str, Scenes], Categories]:
        check_folders(root, self.files)
        skip = {part: self.skipped.entries(root, self.files[part][0]) for part in ("train", "val")}
        train, categories = read_instances(root, *self.files["train"], skip=skip["train"])
        val, _ = read_instances(root, *self.files["val"], known=categories, skip=skip["val"])
        return {"train": train, "val": val}, categories

    def annotation_problems(self) -> list[WrongEntry]:
        root = existing_root(self.root)
        check_folders(root, self.files)
        return [
            problem
            for annotations in dict.fromkeys(annotations for annotations, _ in self.files.values())
            for problem in coco_problems(read_coco_file(Path(root) / annotations), annotations)
        ]


def check_folders(root: str, files: Mapping[str, tuple[str, ...]]) -> None:
    """Check that the folders of both parts exist: each part has annotations, images and perhaps segmentations."""
    for part, (_, *folders) in files.items():
        for folder, name in zip(folders, ("images", "segmentations"), strict=False):
            if not (Path(root) / folder).is_dir():
                raise UserError(
                    f"there is no folder {Path(root) / folder}: set data.root to the folder that holds {folder}, "
                    f"or data.{part}_{name} to the folder of the {name}."
                )


def read_coco_file(path: Path) -> dict[str, Any]:
    """Read the three lists of a COCO file, as lists of dicts."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: check data.root, or name the annotations that are there.")
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({reason_of(error)}): unpack or write it again.") from error
    for part in _LISTS:
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{path} has no list {part!r}: it is not a file of annotations in COCO's format.")
    return content


def values(entries: Iterable[Mapping[str, Any]], key: str, what: str, path: Path) -> list[Any]:
    """The value of `key` in each entry; raises an error that names an entry without it."""
    entries = list(entries)
    for position, entry in enumerate(entries):
        if key not in entry:
            name = entry.get("id", f"number {position + 1}")
            raise UserError(f"{path}: {what} {name} has no {key!r}.")
    return [entry[key] for entry in entries]


def read_categories(content: dict[str, Any], path: Path) -> Categories:
    """The categories, sorted by id. Without `isthing` entries all are things."""
    entries = content["categories"]
    ids = _whole(values(entries, "id", "category", path), "category ids", path)
    names = values(entries, "name", "category", path)
    _refuse_twice(ids, "category", path)
    if not len(ids) or ids.min() < 0:
        raise UserError(f"{path}: categories need ids from 0 on, got {'none' if not len(ids) else ids.min()}.")
    order = np.argsort(ids)
    things = [bool(entry.get("isthing", 1)) for entry in entries]
    return Categories([int(ids[k]) for k in order], [str(names[k]) for k in order], [things[k] for k in order])


def read_images(content: dict[str, Any], path: Path, root: str, folder: str) -> list[tuple[int, str, int, int]]:
    """(id, file, height, width), in the order of their ids; files are in this folder of the root."""
    entries = content["images"]
    columns = [_whole(values(entries, key, "image", path), f"image {key}s", path) for key in ("id", "height", "width")]
    files = [str(file) for file in values(entries, "file_name", "image", path)]
    for identity, file in zip(columns[0], files, strict=True):
        refuse_outside(file, root, f"{path}, image {identity},", folder)
    _refuse_twice(columns[0], "image", path)
    order = np.argsort(columns[0])
    return [(int(columns[0][k]), files[k], int(columns[1][k]), int(columns[2][k])) for k in order]


def positions(ids: list[Any], known: list[int], what: str, annotations: list[Any], path: Path) -> np.ndarray:
    """The index of each id in `known`; raises an error that names an annotation with an unknown id."""
    position_of = {identity: position for position, identity in enumerate(known)}
    found = [position_of.get(identity, -1) if isinstance(identity, int) else -1 for identity in ids]
    if -1 in found:
        k = found.index(-1)
        raise UserError(
            f"{path}: annotation {annotations[k]} names {what} {ids[k]}, which the file does not list: "
            f"add it to its {'images' if what == 'image' else 'categories'}, or take the annotation out."
        )
    return np.array(found, dtype=np.int64)


def read_instances(
    root: str, annotations: str, folder: str, known: Categories | None = None, skip: Collection[int] = ()
) -> tuple[Scenes, Categories]:
    """Images and boxes. Labels are positions in the categories: those of this file, or the `known` ones.

    `skip`: numbers of annotations to leave out.
    """
    path = Path(root) / annotations
    content = read_coco_file(path)
    own = read_categories(content, path)
    categories = own if known is None else same_categories(own, known, path)
    images = read_images(content, path, root, folder)
    numbered = [(position, entry) for position, entry in enumerate(content["annotations"]) if position not in skip]
    names = [entry.get("id", f"number {position + 1}") for position, entry in numbered]
    entries = [entry for _, entry in numbered]
    image_ids = values(entries, "image_id", "annotation", path)
    owner = positions(image_ids, [image[0] for image in images], "image", names, path)
    per_box = read_per_box(entries, "annotation", names, own, categories, path)
    return make_scenes(str(path), str(Path(root) / folder), images, owner, names, False, **per_box), categories


def read_per_box(
    entries: list[dict[str, Any]], what: str, names: list[Any], own: Categories, categories: Categories, path: Path
) -> dict[str, np.ndarray]:
    """The per-box arrays of `Scenes`; a missing area is that of the box."""
    boxes = read_boxes(values(entries, "bbox", what, path), names, path)
    area = [entry.get("area", box[2] * box[3]) for entry, box in zip(entries, boxes, strict=True)]
    listed = positions(values(entries, "category_id", what, path), own.ids, "category", names, path)
    label_of = np.array([categories.ids.index(identity) for identity in own.ids])
    return {
        "boxes": np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1),
        "labels": label_of[listed],
        "area": numbers(area, "area", names, path),
        "crowd": np.array([bool(entry.get("iscrowd", 0)) for entry in entries], dtype=bool),
        "ignore": np.zeros(len(entries), dtype=bool),
    }


def same_categories(own: Categories, known: Categories, path: Path) -> Categories:
    """Return `known`, after checking that this file has the same name for each of its category ids."""
    name_of = dict(zip(known.ids, known.names, strict=True))
    for identity, name in zip(own.ids, own.names, strict=True):
        if name_of.get(identity) != name:
            there = f"is {name_of[identity]!r}" if identity in name_of else "does not exist"
            raise UserError(f"{path}: category {identity} is {name!r}, but {there} in the training annotations.")
    return known


def numbers(given: list[Any], key: str, names: list[Any], path: Path) -> np.ndarray:
    """Convert to floats; raises an error that names an annotation with a value that is no number."""
    for name, value in zip(names, given, strict=True):
        if not isinstance(value, int | float) or value != value:
            raise UserError(f"{path}: the {key} of annotation {name} is not a number, but {str(value)[:60]}.")
    return np.array(given, dtype=np.float64)


def read_boxes(given: list[Any], names: list[Any], path: Path) -> np.ndarray:
    """Boxes as x, y, width, height; raises an error that names an annotation with an invalid box."""
    try:
        boxes = np.array(given, dtype=np.float64).reshape(-1, 4)
        if len(boxes) == len(given):
            return boxes
    except (TypeError, ValueError):
        pass
    k = next(k for k, box in enumerate(given) if not is_box(box))
    raise UserError(
        f"{path}: the bbox of annotation {names[k]} is not [x, y, width, height], but {str(given[k])[:60]}."
    )


def _whole(given: list[Any], what: str, path: Path) -> np.ndarray:
    wrong = [value for value in given if not isinstance(value, int)]
    if wrong:
        raise UserError(f"{path}: {what} are whole numbers, found {str(wrong[0])[:60]!r}.")
    return np.array(given, dtype=np.int64)


def _refuse_twice(ids: np.ndarray, what: str, path: Path) -> None:
    found, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise UserError(f"{path}: the id {found[counts > 1][0]} stands for two {what} entries.")


def miniature(folder: Path) -> None:
    """24 and 8 images of five classes."""
    for part, scenes in (("train2017", TRAIN_SCENES), ("val2017", VAL_SCENES)):
        write_scenes(folder, part, scenes)


def write_scenes(folder: Path, part: str, scene_numbers: Iterable[int]) -> list[dict]:
    """Write generated images to folder/part, and their annotations; returns the `images` entries of that file."""
    ids = list(THINGS)
    images: list[dict] = []
    annotations: list[dict] = []
    for number in scene_numbers:
        file = f"{number + 9:012d}.jpg"
        scene = save_scene(folder / part / file, number)
        height, width = scene.segments.shape
        images.append({"id": number + 9, "file_name": file, "height": height, "width": width})
        for position, (label, box) in enumerate(scene.objects):
            entry = {"image_id": number + 9, "category_id": ids[label], "bbox": list(box), "area": box[2] * box[3]}
            crowd = int(scene.crowded and position == 0)
            annotations.append({"id": len(annotations) + 1, "iscrowd": crowd, **entry})
    things = [{"id": identity, "name": name} for identity, name in THINGS.items()]
    write_coco_file(folder / f"annotations/instances_{part}.json", images, annotations, things)
    return images


def write_coco_file(path: Path, images: list, annotations: list, categories: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
