"""Predictions on a user's images: each image with its detections drawn, and files in COCO's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchformer.data.drawing import refuse_other_picture, save_marked
from batchformer.data.images import check_image, output_names
from batchformer.errors import UserError
from batchformer.files import csv_text, refuse_to_replace, write_text

MOST_BOXES = 100  # per image in the files, as in COCO's evaluation
DRAWN_FROM = 0.5
JSON, CSV, SEGMENTS = "predictions.json", "predictions.csv", "segments"


def predict_objects(
    task: Any,
    images: list[Path],
    data: Any,
    out: Path,
    line: Any,
    threshold: str | None = None,
    strict: str | None = None,
) -> str:
    """Predict image by image, nothing padded; returns the message to print."""
    sure = _probability(threshold)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: name a folder for the images with what was found in them.")
    names = output_names(images)
    for path, name in zip(images, names, strict=True):
        if path.resolve() == (out / f"{name}.png").resolve():
            raise UserError(f"--out {out} is where {path} is, which would be overwritten: name another folder.")
        if strict is not None:
            check_image(path)  # before anything is written
    _refuse_what_is_not_ours(out, names)
    writer = _writer_of(task, out, sure)
    drawn = read = 0
    try:
        for done, (path, name, number) in enumerate(zip(images, names, image_ids(images), strict=True)):
            line.update(done / len(images), path.name)
            if (picture := task.read_image(path, strict is not None)) is None:
                writer.rows.append([str(path), *[""] * (len(writer.columns) - 2), task.unreadable[path]])
                continue
            read += 1
            out.mkdir(parents=True, exist_ok=True)
            drawn += writer.add(number, path, name, picture, predict_one(task, data, picture, sure))
        line.update(1.0, "done", force=True)
    finally:
        line.clear()
    if not read:
        raise UserError(next(iter(task.unreadable.values())))
    writer.write()
    many = f"{read} {'image' if read == 1 else 'images'}"
    message = f"{drawn} {'object' if drawn == 1 else 'objects'} drawn on {many}: {out}/"
    if not drawn:
        message += f"\n  {writer.why_nothing()}"
    return f"{message}\n  what was found: {out / JSON} (COCO's format), {out / CSV}"


def _refuse_what_is_not_ours(out: Path, names: Sequence[str]) -> None:
    columns = tuple(",".join(kind.columns).encode() for kind in (BoxWriter, SegmentWriter))
    refuse_to_replace(out / CSV, lambda content: content.startswith(columns))
    refuse_to_replace(
        out / JSON, lambda content: content.startswith((b'[\n{"image_id"', b"[\n\n]", b'{\n "images": ['))
    )
    for name in names:
        for folder in (out, out / SEGMENTS):
            refuse_other_picture(folder / f"{name}.png", "predict")


def predict_one(task: Any, data: Any, picture: Any, threshold: float | None = None) -> dict[str, Any]:
    """Detections of a run's network in one image, in pixels of that image, as arrays on the host.

    Boxes: `scores`, `labels`, `boxes` (x1, y1, x2, y2). Panoptic: `segmentation` and `segments_info`, of queries
    with a score of `threshold` or more.
    """
    pixels = data.predict_transform(picture)[None].to(task.device)
    sizes = torch.tensor([[picture.height, picture.width]]), torch.tensor([pixels.shape[-2:]])
    batch = {
        "pixel_values": pixels,
        "pixel_mask": torch.ones_like(pixels[:, 0], dtype=torch.int64),
        "labels": [{"orig_size": sizes[0][0], "size": sizes[1][0]}],
    }
    asked = {"threshold": threshold} if _segments(task) and threshold is not None else {}  # boxes: all of them
    with torch.inference_mode():
        return {name: _on_host(value) for name, value in task.predict_step(batch, 0, **asked)[0].items()}


def _probability(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError(f"--threshold: expected a number from 0 to 1, got {given}.")
    return value


def image_ids(images: Sequence[Path]) -> list[int]:
    """Ids from file names that are numbers, as COCO's are, so that its annotations match; else 1, 2, 3."""
    if all(path.stem.isdecimal() for path in images) and len({int(path.stem) for path in images}) == len(images):
        return [int(path.stem) for path in images]
    return list(range(1, len(images) + 1))


def _segments(task: Any) -> bool:
    """Whether the task predicts segments, not boxes."""
    return hasattr(task, "segments")


def _on_host(value: Any) -> Any:
    return value.cpu().numpy() if hasattr(value, "cpu") else value


def _writer_of(task: Any, out: Path, threshold: float | None) -> BoxWriter | SegmentWriter:
    names = [str(name) for name in task.data_info.classes]
    identities = task.category_ids or list(range(len(names)))
    if _segments(task):
        return SegmentWriter(out, names, identities, task.is_thing)
    return BoxWriter(out, names, identities, DRAWN_FROM if threshold is None else threshold)


class BoxWriter:
    """Boxes: COCO's list of results (pycocotools' `loadRes` reads it), with the file and class spelled out."""

    columns = ("path", "class", "score", "x", "y", "width", "height", "error")

    def __init__(self, out: Path, names: Sequence[str], identities: Sequence[int], threshold: float) -> None:
        self.out, self.names, self.identities, self.threshold = out, names, identities, threshold
        self.entries: list[dict[str, Any]] = []
        self.rows: list[list[str]] = []

    def add(self, number: int, path: Path, name: str, picture: Any, objects: dict[str, Any]) -> int:
        from batchformer.data.drawing import draw_boxes

        order = (-objects["scores"]).argsort(kind="stable")[:MOST_BOXES]
        scores, labels, boxes = (objects[key][order] for key in ("scores", "labels", "boxes"))
        for score, label, (x1, y1, x2, y2) in zip(scores.tolist(), labels.tolist(), boxes.tolist(), strict=True):
            box = [round(v, 2) for v in (x1, y1, x2 - x1, y2 - y1)]
            self.entries.append(
                {
                    "image_id": number,
                    "file_name": str(path),
                    "category_id": self.identities[label],
                    "category_name": self.names[label],
                    "bbox": box,
                    "score": round(score, 6),
                }
            )
            self.rows.append([str(path), self.names[label], f"{score:.6f}", *map(str, box), ""])
        sure = scores >= self.threshold
        drawing = draw_boxes(picture, boxes[sure], labels[sure].tolist(), self.names, scores[sure].tolist())
        save_marked(drawing, self.out / f"{name}.png", "predict")
        return int(sure.sum())

    def why_nothing(self) -> str:
        best = max(self.entries, key=lambda entry: entry["score"], default=None)
        if best is None:
            return "no box was found"
        return (
            f"the best score is {best['score']:.2g} ({best['category_name']} in {best['file_name']}), boxes are drawn "
            f"from {self.threshold:g} on: lower --threshold to see more"
        )

    def write(self) -> None:
        write_text(self.out / JSON, _json_lines(self.entries))
        write_text(self.out / CSV, csv_text(self.columns, self.rows))


class SegmentWriter:
    """Segments: COCO's panoptic format, a JSON file and a PNG of ids for each image."""

    columns = ("path", "segment", "class", "kind", "score", "area", "error")

    def __init__(self, out: Path, names: Sequence[str], identities: Sequence[int], is_thing: Sequence[bool]) -> None:
        self.out, self.names, self.identities, self.is_thing = out, names, identities, is_thing
        self.images: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.rows: list[list[str]] = []

    def add(self, number: int, path: Path, name: str, picture: Any, objects: dict[str, Any]) -> int:
        import numpy as np
        from PIL import Image

        from batchformer.data.drawing import draw_segments
        from batchformer.data.sets.coco_panoptic import colours_of_ids

        ids, infos = objects["segmentation"], objects["segments_info"]
        (self.out / SEGMENTS).mkdir(exist_ok=True)
        colours = Image.fromarray(colours_of_ids(ids.astype(np.int64)))
        save_marked(colours, self.out / SEGMENTS / f"{name}.png", "predict")
        segments = []
        for info in infos:
            rows, columns = np.nonzero(ids == info["id"])
            x, y = int(columns.min()), int(rows.min())
            label, score, area = info["label_id"], info["score"], len(rows)
            segments.append(
                {
                    "id": info["id"],
                    "category_id": self.identities[label],
                    "category_name": self.names[label],
                    "score": round(score, 6),
                    "area": area,
                    "bbox": [x, y, int(columns.max()) - x + 1, int(rows.max()) - y + 1],
                    "iscrowd": 0,
                }
            )
            kind = "thing" if self.is_thing[label] else "stuff"
            self.rows.append([str(path), str(info["id"]), self.names[label], kind, f"{score:.6f}", str(area), ""])
        self.images.append({"id": number, "file_name": str(path), "height": ids.shape[0], "width": ids.shape[1]})
        self.entries.append({"image_id": number, "file_name": f"{name}.png", "segments_info": segments})
        save_marked(draw_segments(picture, ids, infos, self.names), self.out / f"{name}.png", "predict")
        return len(infos)

    def why_nothing(self) -> str:
        return "no query is sure enough of a segment: lower --threshold to see more"

    def write(self) -> None:
        categories = [
            {"id": identity, "name": name, "isthing": int(thing)}
            for identity, name, thing in zip(self.identities, self.names, self.is_thing, strict=True)
            if identity >= 0
        ]
        content = {"images": self.images, "annotations": self.entries, "categories": categories}
        write_text(self.out / JSON, json.dumps(content, indent=1) + "\n")
        write_text(self.out / CSV, csv_text(self.columns, self.rows))


def _json_lines(entries: Sequence[dict[str, Any]]) -> str:
    """A list with one entry a line: readable, and hundreds of boxes stay a small file."""
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"
