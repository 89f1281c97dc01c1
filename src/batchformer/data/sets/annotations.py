"""Wrong entries of annotation files, all of them: the readers of COCO and VOC stop at the first one."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

BEYOND = 0.1  # fraction of an image's side by which a box may exceed it; annotated boxes do by a pixel or two


class Problem(NamedTuple):
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


def coco_problems(content: dict[str, Any], file: str) -> list[Problem]:
    """The wrong entries of the list `annotations` of a file in COCO's format."""
    images = {entry.get("id"): entry for entry in content["images"]}
    categories = {entry.get("id") for entry in content["categories"]}
    found: list[Problem] = []
    names: dict[Any, int] = {}
    boxes: dict[Any, str] = {}
    for number, entry in enumerate(content["annotations"]):
        name = f"annotation {entry.get('id', f'number {number + 1}')}"
        if (identity := entry.get("id")) is not None and names.setdefault(_plain(identity), number) != number:
            found.append(Problem(file, f"{name}: another annotation has the same id"))
        reason = _coco_problem(entry, images, categories)
        if reason is None:
            key = (entry["image_id"], entry["category_id"], *entry["bbox"], entry.get("iscrowd", 0))
            if key in boxes:
                reason = f"it is a copy of {boxes[key]}"
            boxes.setdefault(key, name)
        if reason is not None:
            found.append(Problem(file, f"{name}: {reason}", number))
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
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(value, int | float) for value in box):
        return f"its bbox is not [x, y, width, height], but {str(box)[:60]}"
    if not isinstance(entry.get("area", 0), int | float):
        return f"its area is not a number, but {str(entry['area'])[:60]}"
    x, y, w, h = box
    return box_problem((x, y, x + w, y + h), image["height"], image["width"])


def _plain(identity: Any) -> Any:
    return identity if isinstance(identity, int | str) else str(identity)
