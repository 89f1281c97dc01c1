"""Pictures of detectors: objects before and after (V2, Fig. 6), batch attention on objects and background (Fig. 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from batchformer.analysis.batch_attention import (
    ObjectsAndBackground,
    attention_over_scenes,
    inside_images,
    objects_and_background,
    on_objects,
)
from batchformer.analysis.drawing import (
    GAP,
    HEADING,
    INK,
    MARGIN,
    MUTED,
    blank,
    fit,
    heat_over,
    limit_of,
    scale_bar,
    text,
    to_pictures,
    write_index,
)
from batchformer.data.drawing import draw_boxes, draw_segments
from batchformer.errors import UserError

FOLDER = "detection"  # of the run folder; where `batchformer report` looks
WIDE = 380  # of one image on a sheet
MOST_IMAGES = 6
_HEADING_LETTERS = 28  # that fit over a column
Objects = Mapping[str, Any]

BOXES_CAPTION = "Boxes with a score of {threshold:g} or more, in the colours of their classes."
MASKS_CAPTION = "Segments in the colours of their classes; pixels without a tint belong to no segment."
ATTENTION_CAPTION = (
    "After {path!r}, mean over the heads, {n} images in one batch. Orange: the other images look here more than by "
    "chance (uniform attention); blue: less. Frames: annotated objects but for crowds."
)
ATTENTION_NUMBERS = " Mean on objects {objects:.3f}, on background {background:.3f} (1 is chance)."


def draw_objects(picture: Image.Image, objects: Objects, names: Sequence[str], threshold: float = 0.5) -> Image.Image:
    """Boxes (`boxes`, `labels` and perhaps `scores`) or segments (`segmentation`, `segments_info`), as they come."""
    if "segmentation" in objects:
        return draw_segments(picture, np.asarray(objects["segmentation"]), objects["segments_info"], names)
    boxes, labels = np.asarray(objects["boxes"]).reshape(-1, 4), np.asarray(objects["labels"]).reshape(-1)
    if "scores" not in objects:
        return draw_boxes(picture, boxes, labels.tolist(), names)
    scores = np.asarray(objects["scores"]).reshape(-1)
    sure = scores >= threshold
    return draw_boxes(picture, boxes[sure], labels[sure].tolist(), names, scores[sure].tolist())


def draw_side_by_side(
    pictures: Sequence[Image.Image],
    columns: Mapping[str, Sequence[Objects]],
    names: Sequence[str],
    threshold: float = 0.5,
) -> Image.Image:
    """A row for each image; a column for each set of objects (annotated, baseline, BatchFormer) under its heading.

    Objects are in pixels of the pictures: what `draw_objects` takes.
    """
    for heading, objects in columns.items():
        if len(objects) != len(pictures):
            raise UserError(f"{len(objects)} sets of objects in {heading!r} for {len(pictures)} images: one for each.")
    rows = [
        [_centred(_fitted(draw_objects(picture, objects[k], names, threshold))) for objects in columns.values()]
        for k, picture in enumerate(pictures[:MOST_IMAGES])
    ]
    return _sheet(list(columns), rows)


def draw_batch_attention(
    pictures: Sequence[Image.Image],
    maps: Sequence[Tensor],
    boxes: Sequence[Any],
) -> Image.Image:
    """Images in a row, their objects framed, and below where the other images of the batch look, at the same place.

    `maps` are those of `AttentionOverBatch.mass_map`, cut to the image; `boxes` are corners in pixels of the pictures.
    """
    limit = limit_of(torch.cat([each.reshape(-1) for each in maps]))
    shown = range(min(len(pictures), MOST_IMAGES))
    fitted = [_fitted(pictures[k]) for k in shown]
    heat = [heat_over(fitted[k], maps[k], limit) for k in shown]
    above, below = (
        [_centred(_framed(row[k], np.asarray(boxes[k]) * row[k].width / pictures[k].width)) for k in shown]
        for row in (fitted, heat)
    )
    high = max(each.height for each in above)
    width = 2 * MARGIN + len(above) * (WIDE + GAP) - GAP
    sheet = blank(max(width, 560), MARGIN + 2 * (HEADING + high + GAP) + 60)
    for k, (heading, tiles) in enumerate((("the batch", above), ("where the other images look", below))):
        top = MARGIN // 2 + k * (HEADING + high + GAP)
        text(sheet, (MARGIN, top + HEADING // 2), heading, 26, INK, "lm")
        for column, each in enumerate(tiles):
            sheet.paste(each, (MARGIN + column * (WIDE + GAP), top + HEADING))
    scale_bar(sheet, MARGIN, sheet.height - 56, 400, limit)
    return sheet


def batch_attention_picture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    place: int | str = 0,
    level: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    is_thing: Sequence[bool] | None = None,
) -> tuple[Image.Image, str, ObjectsAndBackground | None]:
    """The picture of an attached detector on a batch of its data module, a caption, and the numbers behind it.

    There are numbers where the batch has objects (`labels` with `boxes` as the network is trained with them) and
    something beside them. `is_thing` says which classes are objects: of panoptic data, things alone.
    """
    pixels, mask = batch["pixel_values"], batch["pixel_mask"]
    attention = attention_over_scenes(model, pixels, mask, place=place, level=level)
    sizes = [(int(one.any(1).sum()), int(one.any(0).sum())) for one in mask]
    maps, canvas = attention.mass_map(), pixels.shape[-2:]
    grid = (maps.shape[1], maps.shape[2])
    inside = inside_images(grid, canvas, sizes)
    boxes = [
        _corners(_of_things(label, is_thing), size)
        for label, size in zip(batch.get("labels") or [{}] * len(sizes), sizes, strict=True)
    ]
    whole = to_pictures(pixels.cpu(), mean, std)
    pictures = [picture.crop((0, 0, w, h)) for picture, (h, w) in zip(whole, sizes, strict=True)]
    cut = [each[: int(one.any(1).sum()), : int(one.any(0).sum())] for each, one in zip(maps, inside, strict=True)]
    caption = ATTENTION_CAPTION.format(path=attention.path, n=len(pixels))
    numbers = None
    objects = on_objects(grid, canvas, boxes)
    if (objects & inside).any() and (~objects & inside).any():
        numbers = objects_and_background(maps, objects, inside)
        caption += ATTENTION_NUMBERS.format(objects=numbers.objects, background=numbers.background)
    return draw_batch_attention(pictures, cut, boxes), caption, numbers


def _of_things(label: Mapping[str, Any], is_thing: Sequence[bool] | None) -> Tensor | None:
    if is_thing is None or "boxes" not in label:
        return label.get("boxes")
    things = torch.tensor(is_thing, dtype=torch.bool)[label["class_labels"].cpu()]
    return label["boxes"].cpu()[things]


def _corners(boxes: Tensor | None, size: tuple[int, int]) -> np.ndarray:
    """From centre, width and height in fractions of the image to corners in its pixels."""
    if boxes is None:
        return np.zeros((0, 4))
    x, y, w, h = boxes.detach().cpu().double().reshape(-1, 4).numpy().T * np.array([size[1], size[0]] * 2)[:, None]
    return np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], axis=1)


def _fitted(picture: Image.Image) -> Image.Image:
    """As wide as a column; upright images at most a quarter higher than that."""
    scale = min(WIDE / picture.width, 1.25 * WIDE / picture.height)
    return fit(picture, round(max(picture.size) * scale))


def _centred(picture: Image.Image) -> Image.Image:
    column = blank(WIDE, picture.height)
    column.paste(picture, ((WIDE - picture.width) // 2, 0))
    return column


def _framed(picture: Image.Image, boxes: np.ndarray) -> Image.Image:
    framed = picture.copy()
    pen = ImageDraw.Draw(framed)
    for box in boxes.reshape(-1, 4):
        x1, y1, x2, y2 = (round(float(value)) for value in box)
        pen.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=INK, width=2)
    return framed


def _sheet(headings: Sequence[str], rows: Sequence[Sequence[Image.Image]]) -> Image.Image:
    heights = [max(each.height for each in row) for row in rows]
    sheet = blank(2 * MARGIN + len(headings) * (WIDE + GAP) - GAP, MARGIN + HEADING + sum(heights) + GAP * len(rows))
    for column, heading in enumerate(headings):
        words = heading if len(heading) <= _HEADING_LETTERS else heading[: _HEADING_LETTERS - 1] + "…"
        text(sheet, (MARGIN + column * (WIDE + GAP), MARGIN), words, 24, INK if column else MUTED, "lm")
    top = MARGIN // 2 + HEADING
    for row, high in zip(rows, heights, strict=True):
        for column, each in enumerate(row):
            sheet.paste(each, (MARGIN + column * (WIDE + GAP), top))
        top += high + GAP
    return sheet


@dataclass
class Scenes:
    """Images as files have them, the batch a detector gets of them, and what is annotated (None: nothing known)."""

    pictures: list[Image.Image]
    batch: dict[str, Any]
    truth: list[dict[str, Any]] | None


def scenes_of(data: Any, part: str = "val", count: int = 4) -> Scenes:
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
    return Scenes(pictures, _collated(samples), truth)


def scenes_from(photos: Sequence[Image.Image], data: Any) -> Scenes:
    """Images of one's own, prepared as the data module prepares those it evaluates on."""
    samples = []
    for photo in photos:
        pixels = data.predict_transform(photo)
        sizes = {"orig_size": torch.tensor(photo.size[::-1]), "size": torch.tensor(pixels.shape[-2:])}
        samples.append((pixels, sizes))
    return Scenes([photo.convert("RGB") for photo in photos], _collated(samples), None)


def write_comparison(
    folder: Path | str,
    scenes: Scenes,
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
    columns: dict[str, Sequence[Mapping[str, Any]]] = {} if scenes.truth is None else {"annotated": scenes.truth}
    for heading, task in tasks.items():
        task.eval()
        with torch.inference_mode():
            batch = {name: _to(value, task.device) for name, value in scenes.batch.items()}
            columns[heading] = [_on_host(one) for one in task.predict_step(batch, 0)]
    masks = any("segmentation" in one for found in columns.values() for one in found)
    file, title = ("masks.png", "Segments") if masks else ("boxes.png", "Boxes")
    caption = MASKS_CAPTION if masks else BOXES_CAPTION.format(threshold=threshold)
    made = [
        (file, draw_side_by_side(scenes.pictures, columns, names, threshold), f"{title}, before and after", caption)
    ]
    attached = [task for task in tasks.values() if task.attachment is not None]
    told = None
    if attached and len(scenes.pictures) > 1:
        task = attached[-1]
        batch = {name: _to(value, task.device) for name, value in scenes.batch.items()}
        kinds = task.data_info.get("is_thing") or None
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
