"""Tiny data sets for detectors in the official layouts: rectangles of stripes on a grey ground.

Colour and direction of the stripes belong to the class. Among the images are one without any object, one with a crowd,
one in grey, and upright ones.
"""

import json
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from batchformer.data.seeds import generator

THINGS = {1: "person", 3: "car", 17: "cat", 44: "bottle", 90: "toothbrush"}  # COCO's ids, with their gaps
_STUFF = {187: "sky-other-merged", 193: "grass-merged"}
_PARTS = {"train2017": (0, 24), "val2017": (1000, 8)}  # first number, images
_EMPTY, _CROWDED, _GREY = 2, 3, 4


class _Scene(NamedTuple):
    pixels: np.ndarray
    objects: list[tuple[int, tuple[int, int, int, int]]]  # place in THINGS, (x, y, width, height)
    segments: np.ndarray  # 0 void, 1 and 2 stuff, then the objects


def _scene(number: int) -> _Scene:
    from batchformer.data.miniature import picture

    draw = generator(number, "scene")
    height, width = (64, 96) if number % 3 else (96, 72)
    pixels = np.clip(128 + draw.integers(-20, 21, (height, width, 3)), 0, 255).astype(np.uint8)
    segments = np.zeros((height, width), dtype=np.int64)
    segments[: height // 2 - 4], segments[height // 2 :] = 1, 2
    objects = []
    for place in range(0 if number % 1000 == _EMPTY else int(draw.integers(1, 5))):
        label = int(draw.integers(len(THINGS)))
        h, w = (int(draw.integers(12, side // 2)) for side in (height, width))
        y, x = int(draw.integers(height - h)), int(draw.integers(width - w))
        pixels[y : y + h, x : x + w] = picture(label, number, h, w)
        segments[y : y + h, x : x + w] = 3 + place
        objects.append((label, (x, y, w, h)))
    return _Scene(pixels, objects, segments)


def _save_image(path: Path, pixels: np.ndarray, grey: bool) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert("L" if grey else "RGB").save(path, format="JPEG", quality=90)


def write_coco(root: Path, panoptic: bool = False) -> None:
    ids = list(THINGS)
    for part, (start, count) in _PARTS.items():
        images: list[dict] = []
        annotations: list[dict] = []
        panoptics: list[dict] = []
        for number in range(start, start + count):
            scene, file = _scene(number), f"{number + 9:012d}.jpg"
            height, width = scene.segments.shape
            _save_image(root / part / file, scene.pixels, grey=number == _GREY)
            images.append({"id": number + 9, "file_name": file, "height": height, "width": width})
            for place, (label, box) in enumerate(scene.objects):
                entry = {"image_id": number + 9, "category_id": ids[label], "bbox": list(box), "area": box[2] * box[3]}
                crowd = int(number % 1000 == _CROWDED and place == 0)
                annotations.append({"id": len(annotations) + 1, "iscrowd": crowd, **entry})
            if panoptic:
                panoptics.append(_write_panoptic(root / f"panoptic_{part}", number, scene))
        things = [{"id": identity, "name": name} for identity, name in THINGS.items()]
        _dump(root / f"annotations/instances_{part}.json", images, annotations, things)
        if panoptic:
            both = [(THINGS, 1), (_STUFF, 0)]
            kinds = [{"id": k, "name": name, "isthing": kind} for group, kind in both for k, name in group.items()]
            _dump(root / f"annotations/panoptic_{part}.json", images, panoptics, kinds)


def write_coco_panoptic(root: Path) -> None:
    write_coco(root, panoptic=True)


def _write_panoptic(folder: Path, number: int, scene: _Scene) -> dict:
    """Ids that need all three colours; what is covered wholly has no segment."""
    from batchformer.data.panoptic_png import write_segment_ids

    folder.mkdir(parents=True, exist_ok=True)
    categories = [*_STUFF, *(list(THINGS)[label] for label, _ in scene.objects)]
    infos = []
    ids = np.zeros_like(scene.segments)
    for place, category in enumerate(categories, 1):
        rows, columns = np.nonzero(scene.segments == place)
        if len(rows):
            identity = 70_000 * place + number + 1
            ids[rows, columns] = identity
            x, y = int(columns.min()), int(rows.min())
            box = [x, y, int(columns.max()) - x + 1, int(rows.max()) - y + 1]
            crowd = int(number % 1000 == _CROWDED and place == 3)
            infos.append({"id": identity, "category_id": category, "iscrowd": crowd, "bbox": box, "area": len(rows)})
    write_segment_ids(folder / f"{number + 9:012d}.png", ids)
    return {"image_id": number + 9, "file_name": f"{number + 9:012d}.png", "segments_info": infos}


def _dump(path: Path, images: list, annotations: list, categories: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


def write_voc(root: Path) -> None:
    """The first two objects in the folders of VOC2007 have names among its twenty classes, so have all others."""
    names = ("person", "car", "cat", "bottle", "dog")
    for part, (start, count) in (("trainval", _PARTS["train2017"]), ("test", _PARTS["val2017"])):
        stems = []
        for number in range(start, start + count):
            scene, stem = _scene(number), f"{number + 1:06d}"
            _save_image(root / "JPEGImages" / f"{stem}.jpg", scene.pixels, grey=number == _GREY)
            _write_xml(root / "Annotations" / f"{stem}.xml", scene, names, difficult=number % 1000 == _CROWDED)
            stems.append(stem)
        listing = root / "ImageSets" / "Main" / f"{part}.txt"
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{stem}\n" for stem in stems))


def _write_xml(path: Path, scene: _Scene, names: tuple[str, ...], difficult: bool) -> None:
    tree = ElementTree.Element("annotation")
    size = ElementTree.SubElement(tree, "size")
    for name, side in zip(("width", "height"), scene.segments.shape[::-1], strict=True):
        ElementTree.SubElement(size, name).text = str(side)
    for place, (label, (x, y, w, h)) in enumerate(scene.objects):
        entry = ElementTree.SubElement(tree, "object")
        ElementTree.SubElement(entry, "name").text = names[label]
        ElementTree.SubElement(entry, "difficult").text = str(int(difficult and place == 0))
        box = ElementTree.SubElement(entry, "bndbox")
        for name, value in (("xmin", x + 1), ("ymin", y + 1), ("xmax", x + w), ("ymax", y + h)):
            ElementTree.SubElement(box, name).text = str(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ElementTree.tostring(tree))
