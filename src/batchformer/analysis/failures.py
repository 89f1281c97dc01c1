"""What a classifier or a detector gets wrong: the entry `failures` of result.json, and pictures of the mistakes.

The entry is the same for every task; the page and the terminal read nothing else: `columns` (name -> a number or None
for each class), `worst_by` (the column that classes are sorted by), `evaluated` (how many images of which set), and
where there are any `confusions` ([class, class it was taken for, images]), `matrix`, `calibration`, `note` and
`pictures`, a folder inside the run folder. A task lists "class_failures" or "box_failures" in its `analyses`, or a
function of its own that returns such an entry.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from batchformer.analysis.drawing import GAP, MARGIN, MORE, TILE, blank, captioned, tile, to_pictures, write_index
from batchformer.analysis.pictures import MOST_SHOWN, draw_grad_cam
from batchformer.analysis.rare_images import explain_classes
from batchformer.attach.contexts import keep_modes
from batchformer.data.drawing import draw_boxes
from batchformer.data.loading.epoch_loader import as_batch
from batchformer.errors import UserError
from batchformer.metrics.class_report import Calibration, calibration, class_report, rounded, worst_mistakes
from batchformer.metrics.coco_ap import unmatched
from batchformer.metrics.measures import CLASS_SCORES, Measure

FOLDER = "failures"  # of the pictures in a run folder
_ANSWER = "evidence for the predicted class"
_COLUMNS, _WIDTH = 4, TILE + 60  # of tiles with mistakes

EXAMINED = 64  # images that misses and false alarms are drawn from
_DRAWN, _SIDE = 4, 420  # images of each kind, and their size
_NOTE = (
    "Found, and false alarms: of boxes with a score of {limit:.2f} or more, the limit with the best F1 over all "
    "classes, at an overlap of one half."
)
_KINDS = {
    "missed": ("Missed objects", "Images with the most objects that were not found; the boxes are the annotations."),
    "false": (
        "False alarms",
        "Images with the highest-scoring boxes without an object of their class, or with one already found.",
    ),
}

Mistake = tuple[Image.Image, str, str]  # image, what the network said, what it is


def class_failures(task: Any, data: Any, trainer: Any, pictures: bool = True) -> dict[str, Any]:
    """Precision, recall and F1 of each class, confusions, calibration; and the worst mistakes, drawn in the run folder.

    The whole first evaluation set is read by this process, with the weights after the last step.
    """
    name = task.evaluation_sets[0]
    logits, labels = _evaluated(task, data, trainer, name)
    names = [str(each) for each in task.data_info.get("classes", ())]
    if not len(labels) or labels.ndim != 1 or logits.shape != (len(labels), len(names)):
        return {}  # not evaluated, or no classifier with one label an image
    said = logits.argmax(1)
    report = class_report(said, labels, len(names))
    other = None
    held_out: Any = getattr(data, "holdout_set", None)
    if held_out in task.evaluation_sets[1:]:  # which results are not about
        other = (*_evaluated(task, data, trainer, held_out), held_out)
    trusted = calibration(logits, labels, other)
    found: dict[str, Any] = {
        "evaluated": {"set": name, "images": len(labels)},
        "columns": {
            "images": report.images,
            "precision": rounded(report.precision),
            "recall": rounded(report.recall),
            "F1": rounded(report.f1),
        },
        "worst_by": "F1",
        "confusions": report.confusions,
        "calibration": {key: value for key, value in asdict(trusted).items() if value is not None},
    }
    if report.matrix:
        found["matrix"] = report.matrix
    wrong = worst_mistakes(logits, labels, MOST_SHOWN)
    folder = Path(trainer.default_root_dir) / FOLDER
    if pictures and wrong and _draw_worst(folder, task, data, np.array(wrong), logits[wrong]):
        found["pictures"] = FOLDER
    return {"failures": found, "measured": _measured(report, trusted)}


def _measured(report: Any, trusted: Calibration) -> list[tuple[Measure, float]]:
    values = {
        "balanced_accuracy": report.balanced_accuracy,
        "macro_f1": report.macro_f1,
        "ece": trusted.ece,
        "ece_scaled": trusted.ece_scaled,
    }
    return [(measure, value) for measure in CLASS_SCORES if (value := values[measure.key]) is not None]


def _evaluated(task: Any, data: Any, trainer: Any, name: str) -> tuple[Tensor, Tensor]:
    """Logits and labels of a whole evaluation set, as the evaluation computes them; on the CPU."""
    place = task.evaluation_sets.index(name)
    device, precision = trainer.strategy.root_device, trainer.strategy.precision_plugin
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    with keep_modes(task.to(device)), torch.no_grad():  # no inference mode: what a network caches may need gradients
        task.eval()
        for batch in _batches(data, trainer, place, name):
            batch = as_batch(trainer.strategy.batch_to_device(precision.convert_input(batch), dataloader_idx=place))
            if not {"images", "labels"} <= batch.keys():
                raise UserError(f"the batches of the evaluation set {name} have no images and labels.")
            with precision.val_step_context():
                logits.append(task.test_logits(batch["images"]).float().cpu())
            labels.append(batch["labels"].cpu())
    if not labels:
        return torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    return torch.cat(logits), torch.cat(labels)


def _batches(data: Any, trainer: Any, place: int, name: str) -> Iterator[Any]:
    """As many batches as the evaluation takes, of all images, also where several processes share them."""
    if hasattr(data, "undivided_loader"):
        loader = data.undivided_loader(name)
    else:
        loaders = data.val_dataloader()
        loader = loaders[place] if isinstance(loaders, list | tuple) else loaders
    limit = trainer.limit_val_batches
    if limit == 1.0 and isinstance(limit, float):
        return iter(loader)
    most = int(limit) if isinstance(limit, int) else int(len(loader) * limit)
    return islice(loader, most)


def _draw_worst(folder: Path, task: Any, data: Any, wrong: np.ndarray, logits: Tensor) -> bool:
    """The images with their true and predicted classes; with Grad-CAM for the latter, where the network has maps."""
    loader: Any = data.undivided_loader(data.evaluation_sets[0]) if hasattr(data, "undivided_loader") else None
    if not hasattr(loader, "batch_of") or not hasattr(data, "mean"):
        return False
    batch = loader.batch_of(wrong)
    if "images" not in batch or batch["images"].ndim != 4:
        return False  # of features that were computed before
    names = [str(name) for name in task.data_info.classes]
    classes = [names[label] for label in batch["labels"].tolist()]
    sure = logits.softmax(1).amax(1).tolist()
    said = [f"{names[label]} {p:.0%}" for label, p in zip(logits.argmax(1).tolist(), sure, strict=True)]
    pictures = to_pictures(batch["images"], data.mean, data.std)
    caption = "Wrong predictions with the highest probability, at most two per confusion."
    try:
        maps, layer = explain_classes(task, batch["images"], logits.argmax(1))
        sheet = draw_grad_cam({_ANSWER: maps}, pictures, classes, {_ANSWER: said})
        caption += f" Above: true class. Below: predicted class; bright: evidence for it at {layer} (Grad-CAM)."
    except UserError:
        sheet = draw_mistakes(list(zip(pictures, said, classes, strict=True)))
    write_index(folder, [("mistakes.png", sheet, "The worst mistakes", caption)], keep=False)
    return True


def draw_mistakes(mistakes: Sequence[Mistake]) -> Image.Image:
    """Tiles in rows of four, below each the predicted and the true class."""
    tiles = []
    for image, said, truth in mistakes:
        wide = blank(_WIDTH, TILE)
        wide.paste(tile(image), ((_WIDTH - TILE) // 2, 0))
        tiles.append(captioned(captioned(wide, f"predicted: {said}", MORE), f"true: {truth}"))
    rows, height = -(-len(mistakes) // _COLUMNS), max((each.height for each in tiles), default=0) + GAP
    sheet = blank(2 * MARGIN + _COLUMNS * (_WIDTH + GAP) - GAP, 2 * MARGIN + rows * height - GAP)
    for k, each in enumerate(tiles):
        sheet.paste(each, (MARGIN + k % _COLUMNS * (_WIDTH + GAP), MARGIN + k // _COLUMNS * height))
    return sheet


def mistakes_of(task: Any, data: Any, trainer: Any) -> dict[str, Any]:
    """Pictures of what the task confuses most, in the folder `mistakes` of the run; no entry of result.json."""
    if mistakes := task.mistakes(data):
        caption = "One image of each of the most frequent confusions on the test set."
        made = [("mistakes.png", draw_mistakes(mistakes), "Misclassified images", caption)]
        write_index(Path(trainer.default_root_dir) / "mistakes", made, keep=False)
    return {}


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
    if pictures and _draw_boxes(Path(trainer.default_root_dir) / FOLDER, task, data, trainer, limit):
        found["pictures"] = FOLDER
    return {"failures": found}


def _draw_boxes(folder: Path, task: Any, data: Any, trainer: Any, limit: float) -> bool:
    if not hasattr(data, "undivided_loader") or not hasattr(data, "mean"):
        return False
    examined, names, made = (
        _examined_images(task, data, trainer, limit),
        [str(name) for name in task.data_info.classes],
        [],
    )
    for kind, (title, caption) in _KINDS.items():
        there = [one for one in examined if len(one[kind]["labels"])]
        worst = sorted(there, key=lambda one: _severity(one[kind]), reverse=True)[:_DRAWN]
        if not worst:
            continue
        tiles = []
        for one in worst:
            boxes, picture = one[kind], to_pictures(one["pixels"], data.mean, data.std)[0]
            drawn = draw_boxes(picture, boxes["boxes"] * one["scale"], boxes["labels"], names, boxes.get("scores"))
            tiles.append(captioned(tile(drawn, _SIDE), f"{len(boxes['labels'])} {kind}"))
        told = f"{caption} Of {len(examined)} images, evenly spaced in the set."
        made.append((f"{kind}.png", _beside(tiles), title, told))
    if made:
        write_index(folder, made, keep=False)
    return bool(made)


def _severity(boxes: dict[str, Any]) -> float:
    """Of false alarms the highest score, of misses their number."""
    return max(boxes["scores"]) if "scores" in boxes else len(boxes["labels"])


def _examined_images(task: Any, data: Any, trainer: Any, limit: float) -> list[dict[str, Any]]:
    """Some images with the objects that were missed and the boxes that are wrong, in pixels of the original image."""
    loader, count = data.undivided_loader(getattr(data, "evaluate_on", "val")), data.test_images
    chosen = np.unique(np.linspace(0, count - 1, min(EXAMINED, count)).round().astype(int))
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
