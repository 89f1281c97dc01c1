"""What a detector gets wrong: AP of each class, objects found and false alarms, and pictures of both.

The entry `failures` of result.json is described in `analysis.class_failures`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from batchformer.analysis.class_failures import FOLDER
from batchformer.analysis.drawing import GAP, MARGIN, blank, captioned, tile, to_pictures, write_index
from batchformer.attach.contexts import keep_modes
from batchformer.data.drawing import draw_boxes
from batchformer.metrics.class_report import rounded
from batchformer.metrics.coco_ap import unmatched

LOOKED_AT = 64  # images that misses and false alarms are drawn from
_DRAWN, _SIDE = 4, 420  # images of each kind, and their size
_NOTE = (
    "Found, and false alarms: of boxes with a score of {limit:.2f} or more, the limit with the best F1 over all "
    "classes, at an overlap of one half."
)
_KINDS = {
    "missed": ("Missed objects", "Images in which the most objects were not found; the boxes are those of the data."),
    "false": ("False alarms", "Images with the surest boxes that have no object of their class, or one found already."),
}


def box_failures(task: Any, data: Any, trainer: Any, pictures: bool = True) -> dict[str, Any]:
    """The numbers of the last evaluation (`task.class_scores`), and pictures in the run folder."""
    scores = task.class_scores
    if not scores:
        return {}
    found: dict[str, Any] = {
        "evaluated": {"set": task.evaluation_sets[0], "images": getattr(data, "test_images", None)},
        "columns": {key: rounded(values) for key, values in scores["columns"].items()},
        "worst_by": scores["worst_by"],
    }
    if (limit := scores.get("threshold")) is None:
        return {"failures": found}
    found |= {"note": _NOTE.format(limit=limit), "threshold": round(limit, 4)}
    if pictures and _draw(Path(trainer.default_root_dir) / FOLDER, task, data, trainer, limit):
        found["pictures"] = FOLDER
    return {"failures": found}


def _draw(folder: Path, task: Any, data: Any, trainer: Any, limit: float) -> bool:
    if not hasattr(data, "undivided_loader") or not hasattr(data, "mean"):
        return False
    looked_at, names, made = _looked_at(task, data, trainer, limit), [str(name) for name in task.data_info.classes], []
    for kind, (title, caption) in _KINDS.items():
        there = [one for one in looked_at if len(one[kind]["labels"])]
        worst = sorted(there, key=lambda one: _badness(one[kind]), reverse=True)[:_DRAWN]
        if not worst:
            continue
        tiles = []
        for one in worst:
            boxes, picture = one[kind], to_pictures(one["pixels"], data.mean, data.std)[0]
            drawn = draw_boxes(picture, boxes["boxes"] * one["scale"], boxes["labels"], names, boxes.get("scores"))
            tiles.append(captioned(tile(drawn, _SIDE), f"{len(boxes['labels'])} {kind}"))
        told = f"{caption} Of {len(looked_at)} images, evenly spaced in the set."
        made.append((f"{kind}.png", _beside(tiles), title, told))
    if made:
        write_index(folder, made, keep=False)
    return bool(made)


def _badness(boxes: dict[str, Any]) -> float:
    """Of false alarms the highest score, of misses their number."""
    return max(boxes["scores"]) if "scores" in boxes else len(boxes["labels"])


def _looked_at(task: Any, data: Any, trainer: Any, limit: float) -> list[dict[str, Any]]:
    """Some images with the objects that were missed and the boxes that are wrong, in pixels of the original image."""
    loader, count = data.undivided_loader(getattr(data, "evaluate_on", "val")), data.test_images
    chosen = np.unique(np.linspace(0, count - 1, min(LOOKED_AT, count)).round().astype(int))
    seen: list[dict[str, Any]] = []
    precision = trainer.strategy.precision_plugin
    with keep_modes(task.to(trainer.strategy.root_device)), torch.no_grad():
        task.eval()
        for start in range(0, len(chosen), loader.batch_size):
            batch = loader.batch_of(chosen[start : start + loader.batch_size])
            with precision.val_step_context():
                found = task.predict_step(trainer.strategy.batch_to_device(precision.convert_input(batch)), 0, limit)
            for k, (boxes, label) in enumerate(zip(found, batch["labels"], strict=True)):
                missed, false = unmatched(boxes, label["truth"])
                (height, width), (high, wide) = (label[key].tolist() for key in ("size", "orig_size"))
                pixels = batch["pixel_values"][k : k + 1, :, :height, :width].float()
                scale = np.array([width / wide, height / high] * 2)
                seen.append({"pixels": pixels, "missed": missed, "false": false, "scale": scale})
    return seen


def _beside(tiles: list[Image.Image]) -> Image.Image:
    width = sum(each.width + GAP for each in tiles) - GAP
    sheet, left = blank(width + 2 * MARGIN, max(each.height for each in tiles) + 2 * MARGIN), MARGIN
    for each in tiles:
        sheet.paste(each, (left, MARGIN))
        left += each.width + GAP
    return sheet
