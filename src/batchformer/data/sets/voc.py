"""PASCAL VOC in its official folders, with an XML file for each image."""

from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from batchformer.data.images import EXTENSIONS
from batchformer.data.sets.annotations import Skipped, WrongEntry, box_problem
from batchformer.data.sets.boxes import Categories, Scenes, make_scenes
from batchformer.data.sets.detection import DetectionData
from batchformer.data.sets.files import existing_root, read_lines, refuse_outside
from batchformer.data.sets.miniature import TRAIN_SCENES, VAL_SCENES, GeneratedScene, save_scene
from batchformer.errors import UserError

EVERYTHING = "*"  # in the place of a list: all that is annotated
LAYOUT = "DIR/{JPEGImages,Annotations,ImageSets/Main}/..."
VOC_CLASSES = ("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
               "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor")  # fmt: skip


class VocDetection(DetectionData):
    """JPEGImages/, Annotations/*.xml and ImageSets/Main/<list>.txt, in `root` or in folders of it.

    `train` and `val` name lists: `trainval` for ImageSets/Main/trainval.txt in `root`, `VOC2012/trainval` for that of
    root/VOC2012, `*` for everything in Annotations; several are put together (VOC07+12 is `[VOC2007/trainval,
    VOC2012/trainval]` against `VOC2007/test`).
    Classes are `class_names`, or VOC's twenty where the training objects are all of these, else the names that occur,
    sorted. Difficult objects are trained on with `difficult=True` only; evaluation ignores them, found or missed.
    Pixels are counted from 1 in the files, as in VOC. Batches and other keywords: see `DetectionData`.
    """

    def __init__(
        self,
        root: str | None = None,
        train: str | list[str] = "trainval",
        val: str | list[str] = "test",
        class_names: list[str] | None = None,
        difficult: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.lists = {
            part: [names] if isinstance(names, str) else list(names) for part, names in (("train", train), ("val", val))
        }
        self.given_names, self.difficult = class_names, difficult

    def _read_scenes(self, root: str) -> tuple[dict[str, Scenes], Categories]:
        read = {
            part: [image for name in self.lists[part] for image in _read_list(Path(root), name, self.skipped)]
            for part in ("train", "val")
        }
        found = sorted({box["name"] for image in read["train"] for box in image["objects"]})
        names = self.given_names or (list(VOC_CLASSES) if set(found) <= set(VOC_CLASSES) else found)
        train, val = (self._scenes_of(root, part, read[part], names) for part in ("train", "val"))
        return {"train": train, "val": val}, Categories(list(range(len(names))), names, [True] * len(names))

    def annotation_problems(self) -> list[WrongEntry]:
        root = Path(existing_root(self.root))
        entries = {part: [e for name in self.lists[part] for e in _entries(root, name)] for part in ("train", "val")}
        given = None if self.given_names is None else set(self.given_names)
        trained = [_problems_in(root, *entry, known=given) for entry in entries["train"]]
        known = given or {name for _, names in trained for name in names}
        known |= set(VOC_CLASSES) if known <= set(VOC_CLASSES) else set()
        others = [_problems_in(root, *entry, known=known) for entry in entries["val"]]
        return list(dict.fromkeys(problem for problems, _ in (*trained, *others) for problem in problems))

    def _scenes_of(self, root: str, part: str, images: list[dict[str, Any]], names: list[str]) -> Scenes:
        label_of = {name: label for label, name in enumerate(names)}
        boxes = [(position, image["file"], box) for position, image in enumerate(images) for box in image["objects"]]
        for _, file, box in boxes:
            if box["name"] not in label_of:
                raise UserError(
                    f"{file} names the class {box['name']!r}, which is not one of the {len(names)} trained on."
                )
        corners = np.array([box["corners"] for _, _, box in boxes], dtype=np.float64).reshape(-1, 4)
        difficult = np.array([box["difficult"] for _, _, box in boxes], dtype=bool)
        return make_scenes(
            f"{root}, {' and '.join(self.lists[part])}",
            root,
            [(position, image["path"], *image["size"]) for position, image in enumerate(images)],
            np.array([position for position, _, _ in boxes], dtype=np.int64),
            [file for _, file, _ in boxes],
            boxes=corners,
            labels=np.array([label_of[box["name"]] for _, _, box in boxes], dtype=np.int64),
            area=(corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1]),
            crowd=np.zeros(len(boxes), dtype=bool),
            ignore=difficult & (part == "val" or not self.difficult),
        )


def _read_list(root: Path, name: str, skipped: Skipped) -> list[dict[str, Any]]:
    return [
        _read_xml(root / xml, skipped.entries(str(root), xml)) | {"path": image}
        for xml, image in _entries(root, name)
        if image not in skipped.files
    ]


def _entries(root: Path, name: str) -> list[tuple[str, str]]:
    """The XML file and the image of each entry of a list, relative to the root; the list `*` is all XML files."""
    base, _, part = name.rpartition("/")
    folder = root / base
    listing = folder / "ImageSets" / "Main" / f"{part}.txt"
    for expected in (*(() if part == EVERYTHING else (listing,)), folder / "Annotations", folder / "JPEGImages"):
        if not expected.exists():
            raise UserError(
                f"VOC's folders are not complete, {expected} is not there: set data.root to the folder with "
                f"Annotations, ImageSets and JPEGImages, or write data.train and data.val as VOC2007/trainval."
            )
    if part == EVERYTHING:
        listing = folder / "Annotations"
        lines = dict(enumerate(sorted(file.stem for file in listing.glob("*.xml")), 1))
    else:  # lists of one class have a second column
        lines = {number: line.split()[0] for number, line in enumerate(read_lines(listing), 1) if line.strip()}
    for number, stem in lines.items():
        refuse_outside(stem, root, f"{listing}, line {number},", str(Path(base) / "JPEGImages"))
    stems = list(lines.values())
    if not stems:
        raise UserError(f"{listing} lists no image.")
    first = folder / "JPEGImages" / stems[0]
    suffix = next((suffix for suffix in EXTENSIONS if first.with_name(f"{first.name}{suffix}").is_file()), ".jpg")
    inside = Path(base)
    return [
        (str(inside / "Annotations" / f"{stem}.xml"), str(inside / "JPEGImages" / f"{stem}{suffix}")) for stem in stems
    ]


def _problems_in(root: Path, xml: str, image: str, known: set[str] | None) -> tuple[list[WrongEntry], set[str]]:
    """The wrong objects in an XML file, and the names of the others; `known`: the classes there are."""
    try:
        tree = ElementTree.parse(root / xml).getroot()
        height, width = int(_text(tree, "size/height")), int(_text(tree, "size/width"))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        why = "it does not exist" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
        return [WrongEntry(xml, why, image=image)], set()
    found: list[WrongEntry] = []
    names: set[str] = set()
    seen: set[tuple[str, tuple[float, ...]]] = set()
    for number, entry in enumerate(tree.iter("object")):
        reason: str | None = None
        name = (entry.findtext("name") or "").strip()
        try:
            box = _read_object(entry)
            reason = box_problem(box["corners"], height, width)
            if reason is None and known is not None and name not in known:
                reason = "its class is not one of those trained on"
            if reason is None and (name, box["corners"]) in seen:
                reason = "it stands there twice"
            seen.add((name, box["corners"]))
        except ValueError as problem:
            reason = str(problem)
        if reason is None:
            names.add(name)
        else:
            found.append(WrongEntry(xml, f"object {number + 1}{f', {name}' if name else ''}: {reason}", number))
    return found, names


def _read_xml(path: Path, skip: Collection[int] = ()) -> dict[str, Any]:
    try:
        tree = ElementTree.parse(path).getroot()
        size = (int(_text(tree, "size/height")), int(_text(tree, "size/width")))
        entries = [entry for number, entry in enumerate(tree.iter("object")) if number not in skip]
        return {"file": str(path), "size": size, "objects": [_read_object(entry) for entry in entries]}
    except FileNotFoundError as error:
        raise UserError(
            f"annotation {path} does not exist: unpack it again, or take the image out of the list."
        ) from error
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise UserError(f"annotation {path} cannot be read ({error}): unpack or write it again.") from error


def _read_object(entry: ElementTree.Element) -> dict[str, Any]:
    """Read an object, with the corners of its area: a box from pixel 1 to pixel 1 spans 0 to 1."""
    x1, y1, x2, y2 = (float(_text(entry, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    difficult = (entry.findtext("difficult") or "0").strip() == "1"
    return {"name": _text(entry, "name"), "corners": (x1 - 1, y1 - 1, x2, y2), "difficult": difficult}


def _text(element: ElementTree.Element, name: str) -> str:
    text = element.findtext(name)
    if text is None or not text.strip():
        raise ValueError(f"no {name} in <{element.tag}>")
    return text.strip()


def miniature(folder: Path) -> None:
    """24 and 8 images of five of the twenty classes."""
    names = ("person", "car", "cat", "bottle", "dog")
    for part, scenes in (("trainval", TRAIN_SCENES), ("test", VAL_SCENES)):
        stems = []
        for number in scenes:
            stem = f"{number + 1:06d}"
            scene = save_scene(folder / "JPEGImages" / f"{stem}.jpg", number)
            _write_xml(folder / "Annotations" / f"{stem}.xml", scene, names)
            stems.append(stem)
        listing = folder / "ImageSets" / "Main" / f"{part}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{stem}\n" for stem in stems))


def _write_xml(path: Path, scene: GeneratedScene, names: tuple[str, ...]) -> None:
    """Write a scene's annotations; its crowd becomes a difficult object."""
    tree = ElementTree.Element("annotation")
    size = ElementTree.SubElement(tree, "size")
    for name, side in zip(("width", "height"), scene.segments.shape[::-1], strict=True):
        ElementTree.SubElement(size, name).text = str(side)
    for position, (label, (x, y, w, h)) in enumerate(scene.objects):
        entry = ElementTree.SubElement(tree, "object")
        ElementTree.SubElement(entry, "name").text = names[label]
        ElementTree.SubElement(entry, "difficult").text = str(int(scene.crowded and position == 0))
        box = ElementTree.SubElement(entry, "bndbox")
        for name, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + w), ("ymax", y + h)):
            ElementTree.SubElement(box, name).text = str(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ElementTree.tostring(tree))
