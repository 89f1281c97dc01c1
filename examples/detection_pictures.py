"""Detectors with and without BatchFormerV2: boxes or masks, where images look, features (V2's Figs. 6, 5 and 8).

    python examples/detection_pictures.py                        rectangles of stripes, detectors trained for seconds
    python examples/detection_pictures.py BASELINE_RUN BATCHFORMER_RUN --data-root DIR [--part train]
    python examples/detection_pictures.py BASELINE_RUN BATCHFORMER_RUN --photos FOLDER

Runs are folders that `batchformer fit` has written, of the task detection or panoptic. The pictures go to the folder
`detection` of the second run, where `batchformer report` finds them, or to --out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from batchformer.analysis.batch_attention import attention_over_scenes, cell_centres, inside_images
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
from batchformer.analysis.features import features_over_scenes, relative_change
from batchformer.analysis.pictures import FEATURES_CAPTION, draw_features
from batchformer.data import CocoDetection
from batchformer.data.drawing import draw_boxes, draw_segments
from batchformer.data.images import images_in, open_image
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.metrics import CocoAP
from batchformer.tasks import Detection

HEADINGS = {"baseline": "without BatchFormerV2", "batchformer": "with BatchFormerV2"}
TINY = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 12, "dropout": 0.0}  # fmt: skip
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="two run folders; left out: a miniature")
    parser.add_argument("--data-root", help="where the data of the runs is; left out: as in the run")
    parser.add_argument("--part", choices=("train", "val"), default="val", help="of that data (val)")
    parser.add_argument("--photos", type=Path, help="a folder of own images instead")
    parser.add_argument("--images", type=int, default=4, help="how many (4)")
    parser.add_argument("--threshold", type=float, default=0.5, help="score from which a box is drawn (0.5)")
    parser.add_argument("--steps", type=int, default=50, help="of training on the miniature (50)")
    parser.add_argument("--out", type=Path, help="folder to write to")
    given = parser.parse_args()
    if given.runs and len(given.runs) != 2:
        raise UserError("give two run folders, the baseline's and BatchFormer's, or none for the miniature.")
    if not given.runs and (given.photos or given.data_root):
        raise UserError("--photos and --data-root go with two run folders: name them first.")
    if given.images < 1:
        raise UserError(f"--images {given.images}: one or more are drawn.")
    if not 0 <= given.threshold <= 1:
        raise UserError(f"--threshold {given.threshold:g}: a score lies between 0 and 1.")
    if given.runs:
        tasks, data, names = trained_runs(given)
        scenes = (
            photos_of(given.photos, given.images, data) if given.photos else scenes_of(data, given.part, given.images)
        )
        out = given.out or given.runs[1] / FOLDER
    else:
        tasks, data, scenes = stripes(given.images, given.steps)
        names, out = data.class_names, given.out or Path(FOLDER)
    files, attention = write_comparison(
        out, scenes, tasks, names, threshold=given.threshold, mean=data.mean, std=data.std
    )
    if attention:
        print(attention)
    for file in files:
        print(file)


def trained_runs(given: argparse.Namespace) -> tuple[dict[str, Any], Any, list[str]]:
    from batchformer.cli.finished_run import load_run

    root = [("data.init_args.root", given.data_root)] if given.data_root else []
    found = [load_run(str(run), root) for run in given.runs]
    if any(run.config.get("task") not in ("detection", "panoptic") for run in found):
        raise UserError("these are not runs of a detector: give runs of the task detection or panoptic.")
    headings = [HEADINGS[run.config["model"]["method"]] for run in found]
    if headings[0] == headings[1]:  # two runs of one method: by their folders
        headings = [f"{number}: {run.folder.path.name}" for number, run in enumerate(found, 1)]
    tasks = dict(zip(headings, (run.task for run in found), strict=True))
    return tasks, found[1].data, list(found[1].task.data_info.classes)


def photos_of(folder: Path, count: int, data: Any) -> Scenes:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one with images in it.")
    paths = [Path(path) for path in images_in(folder)][:count]
    if not paths:
        raise UserError(f"there is no image in {folder}.")
    return scenes_from([open_image(path, upright=True) for path in paths], data)


def stripes(count: int, steps: int) -> tuple[dict[str, Any], Any, Scenes]:
    """Two small Deformable DETRs that learn a few generated images by heart."""
    root = write_miniature("coco", Path(tempfile.mkdtemp()) / "data")
    data = CocoDetection(str(root), image_size=64, max_size=96, augment="none", limit_train=count + 1, workers=0,
                         batch_size=count + 1, eval_batch_size=count + 1)  # fmt: skip
    data.setup()
    tasks = {}
    for method, heading in HEADINGS.items():
        task = Detection("deformable-detr-single-scale", TINY, backbone="test_resnet", method=method)
        task.construct(data)
        learn(task, next(iter(data.train_dataloader())), steps)
        metric = CocoAP(data.num_classes)
        with torch.inference_mode():
            for batch in data.evaluation_loader("train"):
                metric.update(task.eval().predict_step(batch, 0), batch["labels"])
        print(f"{heading}: accuracy on the images trained on (AP50) {float(metric.compute()['ap50']):.2f}")
        tasks[heading] = task
    return tasks, data, scenes_of(data, "train", count)


def learn(task: Detection, batch: dict[str, Any], steps: int) -> None:
    task.train()
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(steps):
        loss = task.net(**batch).loss  # the mean over both streams
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.net.parameters(), 1.0)
        optimizer.step()


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


@dataclass(frozen=True)
class ObjectsAndBackground:
    """Attention of the other images to positions on objects and to the rest; 1 is uniform attention."""

    objects: float
    background: float

    @property
    def ratio(self) -> float:
        return self.objects / self.background


def on_objects(grid: tuple[int, int], canvas: Sequence[int], boxes: Sequence[np.ndarray]) -> Tensor:
    """The cells whose middle is in a box of the image; boxes are corners in pixels of the canvas."""
    y, x = cell_centres(grid, canvas)
    maps = []
    for each in boxes:
        left, top, right, bottom = torch.as_tensor(each, dtype=torch.float32).reshape(-1, 4).T[..., None]
        rows, columns = (top <= y) & (y < bottom), (left <= x) & (x < right)
        maps.append((rows[:, :, None] & columns[:, None, :]).any(0))
    return torch.stack(maps)


def objects_and_background(
    mass: Tensor,
    objects: Tensor,
    inside: Tensor,
) -> ObjectsAndBackground:
    """The mean of `mass` (what `AttentionOverBatch.mass_map` gives) on objects and on background, padding left out."""
    on, off = mass[objects & inside], mass[~objects & inside]
    return ObjectsAndBackground(on.mean().item(), off.mean().item())


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
    pictures, sizes = without_padding(batch, mean, std), _sizes(mask)
    maps, canvas = attention.mass_map(), pixels.shape[-2:]
    grid = (maps.shape[1], maps.shape[2])
    inside = inside_images(grid, canvas, sizes)
    boxes = [
        _corners(_of_things(label, is_thing), size)
        for label, size in zip(batch.get("labels") or [{}] * len(sizes), sizes, strict=True)
    ]
    cut = [each[: int(one.any(1).sum()), : int(one.any(0).sum())] for each, one in zip(maps, inside, strict=True)]
    caption = ATTENTION_CAPTION.format(path=attention.path, n=len(pixels))
    numbers = None
    objects = on_objects(grid, canvas, boxes)
    if (objects & inside).any() and (~objects & inside).any():
        numbers = objects_and_background(maps, objects, inside)
        caption += ATTENTION_NUMBERS.format(objects=numbers.objects, background=numbers.background)
    return draw_batch_attention(pictures, cut, boxes), caption, numbers


def features_picture(
    model: nn.Module, batch: Mapping[str, Any], mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> tuple[Image.Image, str]:
    """Fig. 8: a batch, and the largest feature map at the first insertion without and with the module; a caption."""
    features = features_over_scenes(model, batch["pixel_values"], batch["pixel_mask"])
    change = relative_change(features.related, features.without)
    told = f"{FEATURES_CAPTION} After {features.path!r}; the module changes the tokens by {change:.0%} of their norm."
    return draw_features(features, without_padding(batch, mean, std)), told


def without_padding(
    batch: Mapping[str, Any], mean: Sequence[float] | None, std: Sequence[float] | None
) -> list[Image.Image]:
    """The images of a batch as pictures, cut to what is image."""
    whole = to_pictures(batch["pixel_values"].cpu(), mean, std)
    return [picture.crop((0, 0, w, h)) for picture, (h, w) in zip(whole, _sizes(batch["pixel_mask"]), strict=True)]


def _sizes(mask: Tensor) -> list[tuple[int, int]]:
    return [(int(one.any(1).sum()), int(one.any(0).sum())) for one in mask]


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
    """What is annotated and what each task (by the heading of its column) finds; batch attention, features of the last.

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
        kinds = getattr(task, "is_thing", None) or None
        picture, told, _ = batch_attention_picture(task.net, batch, mean=mean, std=std, is_thing=kinds)
        made.append(("batch-attention.png", picture, "Where the images of a batch look", told))
        picture, caption = features_picture(task.net, batch, mean, std)
        made.append(("features.png", picture, "Features without and with the module", caption))
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


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
