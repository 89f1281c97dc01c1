"""The same images through several trained detectors: what is annotated, what each finds, where the batch looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from batchformer.analysis.detection_pictures import (
    BOXES_CAPTION,
    MASKS_CAPTION,
    batch_attention_picture,
    draw_side_by_side,
)
from batchformer.analysis.drawing import to_pictures
from batchformer.analysis.picture_files import write_index
from batchformer.errors import UserError


@dataclass
class Seen:
    """Images as files have them, the batch a detector gets of them, and what is annotated (None: nothing known)."""

    pictures: list[Image.Image]
    batch: dict[str, Any]
    truth: list[dict[str, Any]] | None


def scenes_of(data: Any, part: str = "val", count: int = 4) -> Seen:
    """The first images of a part ("train" or "val") of a detection data module that have an object."""
    samples: list[tuple[torch.Tensor, dict[str, Any]]] = []
    truth: list[dict[str, Any]] = []
    for batch in data.evaluation_loader(part):
        for k, label in enumerate(batch["labels"]):
            if len(label["class_labels"]) and len(samples) < count:
                height, width = label["size"].tolist()
                samples.append((batch["pixel_values"][k, :, :height, :width], _without_masks(label)))
                truth.append(_annotated(label["truth"], masks="masks" in label))
        if len(samples) == count:
            break
    if not samples:
        raise UserError(f"there is no image with an object in the {part} part of the data.")
    pictures = [
        to_pictures(pixels[None], data.mean, data.std)[0].resize(tuple(label["orig_size"].tolist()[::-1]))
        for pixels, label in samples
    ]
    return Seen(pictures, _collated(samples), truth)


def scenes_from(photos: Sequence[Image.Image], data: Any) -> Seen:
    """Images of one's own, prepared as the data module prepares those it evaluates on."""
    samples = []
    for photo in photos:
        pixels = data.predict_transform(photo)
        sizes = {"orig_size": torch.tensor(photo.size[::-1]), "size": torch.tensor(pixels.shape[-2:])}
        samples.append((pixels, sizes))
    return Seen([photo.convert("RGB") for photo in photos], _collated(samples), None)


def write_comparison(
    folder: Path | str,
    seen: Seen,
    tasks: Mapping[str, Any],
    names: Sequence[str],
    *,
    threshold: float = 0.5,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[list[Path], str | None]:
    """What is annotated and what each task (by the heading of its column) finds, and the batch attention of the last.

    Tasks are `Detection` or `Panoptic` with their weights. Writes PNG files and the index `batchformer report` reads;
    returns their paths and the caption of the attention, which says how much is on objects (None: no module attached,
    or one image).
    """
    columns: dict[str, Sequence[Mapping[str, Any]]] = {} if seen.truth is None else {"annotated": seen.truth}
    for heading, task in tasks.items():
        task.eval()
        with torch.inference_mode():
            batch = {name: _to(value, task.device) for name, value in seen.batch.items()}
            columns[heading] = [_on_host(one) for one in task.predict_step(batch, 0)]
    masks = any("segmentation" in one for found in columns.values() for one in found)
    file, title = ("masks.png", "Segments") if masks else ("boxes.png", "Boxes")
    caption = MASKS_CAPTION if masks else BOXES_CAPTION.format(threshold=threshold)
    made = [(file, draw_side_by_side(seen.pictures, columns, names, threshold), f"{title}, before and after", caption)]
    attached = [task for task in tasks.values() if task.attachment is not None]
    told = None
    if attached and len(seen.pictures) > 1:
        task = attached[-1]
        batch = {name: _to(value, task.device) for name, value in seen.batch.items()}
        kinds = task.is_thing or None
        picture, told, _ = batch_attention_picture(task.net, batch, mean=mean, std=std, is_thing=kinds)
        made.append(("batch-attention.png", picture, "Where the images of a batch look", told))
    return write_index(folder, made), told


def _collated(samples: Sequence[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    from batchformer.data.sets.boxes import collate_detection

    return collate_detection(list(samples))


def _without_masks(label: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in label.items() if name != "masks"}


def _annotated(truth: Mapping[str, Any], masks: bool) -> dict[str, Any]:
    if masks:
        return {name: truth[name] for name in ("segmentation", "segments_info")}
    return {name: truth[name] for name in ("boxes", "labels")}


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _on_host(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
