"""COCO's panoptic segmentation: every pixel belongs to a thing, to stuff, or to nothing.

Segmentations are stored as colour images whose pixels are the ids of segments.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from batchformer.data.images import open_image
from batchformer.data.sets import coco
from batchformer.data.sets.boxes import Categories, DetectionSamples, Sample, Scenes, Transform, box_target, make_scenes
from batchformer.data.sets.detection import DetectionData
from batchformer.data.sets.files import refuse_outside
from batchformer.data.sets.miniature import THINGS, TRAIN_SCENES, VAL_SCENES, GeneratedScene, draw_scene
from batchformer.errors import UserError

LAYOUT = "those of coco, panoptic_{train,val}2017/*.png and annotations/panoptic_{train,val}2017.json"
_MINIATURE_STUFF = {187: "sky-other-merged", 193: "grass-merged"}


@dataclass(frozen=True)
class PanopticScenes(Scenes):
    """`Scenes` with one box per segment, and the segmentation files."""

    segment_ids: Int[np.ndarray, " boxes"]
    segmentations: np.ndarray  # paths as bytes


class CocoPanoptic(DetectionData):
    """CocoDetection's folders and annotations/panoptic_{train,val}2017.json with panoptic_{train,val}2017/*.png.

    133 categories, 80 of things and 53 of stuff, each segment an object to detect. With `masks`, labels also hold
    `masks`, one for each box, padded to the canvas of the batch, for `DetrForSegmentation`; without, only the boxes, to
    train the detector that comes first. After a crop, boxes are those of what is left of the segments.

    When evaluating, `truth` also holds `segmentation`, a map of the segments in the original image (0 is void), and
    `segments_info`: the input of `PanopticQuality`. Crowds are not trained on (DETR's released code does train on those
    of the panoptic annotations). Batches and other keywords: see `DetectionData`.
    """

    def __init__(
        self,
        root: str | None = None,
        masks: bool = True,
        train_images: str = "train2017",
        train_annotations: str = "annotations/panoptic_train2017.json",
        train_segmentations: str = "panoptic_train2017",
        val_images: str = "val2017",
        val_annotations: str = "annotations/panoptic_val2017.json",
        val_segmentations: str = "panoptic_val2017",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.masks = masks
        self.files = {
            "train": (train_annotations, train_images, train_segmentations),
            "val": (val_annotations, val_images, val_segmentations),
        }

    def _read_scenes(self, root: str) -> tuple[dict[str, Scenes], Categories]:
        coco.check_folders(root, self.files)
        train, categories = read_panoptic(root, *self.files["train"])
        val, _ = read_panoptic(root, *self.files["val"], known=categories)
        return {"train": train, "val": val}, categories

    def _samples(self, part: str, training: bool) -> Any:
        return self._samples_of(PanopticSamples, part, training, masks=self.masks)


def read_panoptic(
    root: str, annotations: str, images: str, segmentations: str, known: Categories | None = None
) -> tuple[PanopticScenes, Categories]:
    """The images that have a segmentation, in the order of their ids."""
    path = Path(root) / annotations
    content = coco.read_coco_file(path)
    own = coco.read_categories(content, path)
    categories = own if known is None else coco.same_categories(own, known, path)
    entries = content["annotations"]
    files, listed, image_ids = (
        coco.values(entries, key, "annotation", path) for key in ("file_name", "segments_info", "image_id")
    )
    for file, segments, identity in zip(files, listed, image_ids, strict=True):
        if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
            raise UserError(f"{path}: 'segments_info' of {file} is not a list of segments.")
        refuse_outside(str(file), root, f"{path}, the annotation of image {identity},", segmentations)
    all_images = coco.read_images(content, path, root, images)
    of_image = coco.positions(image_ids, [image[0] for image in all_images], "image", files, path)
    order = np.argsort(of_image, kind="stable")
    if len(np.unique(of_image)) != len(of_image):
        raise UserError(f"{path}: an image has two annotations: leave one of them.")

    segments = [segment for k in order for segment in listed[k]]
    owner = np.repeat(np.arange(len(order)), [len(listed[k]) for k in order])
    names = [
        f"{segment.get('id', '?')} of {files[order[position]]}"
        for segment, position in zip(segments, owner, strict=True)
    ]
    coco.values(segments, "area", "segment", path)  # required: the area of a segment is not that of its box
    per_box = coco.read_per_box(segments, "segment", names, own, categories, path)
    chosen = [all_images[of_image[k]] for k in order]
    scenes = make_scenes(str(path), str(Path(root) / images), chosen, owner, names, True, **per_box)
    return PanopticScenes(
        **{field.name: getattr(scenes, field.name) for field in fields(scenes)},
        segment_ids=coco.numbers(coco.values(segments, "id", "segment", path), "id", names, path).astype(np.int64),
        segmentations=np.array([os.fsencode(Path(root) / segmentations / files[k]) for k in order]),
    ), categories


class PanopticSamples(DetectionSamples):
    """Samples with segments, transformed as one map of segment numbers and converted to masks afterwards."""

    scenes: PanopticScenes

    def __init__(self, scenes: PanopticScenes, transform: Transform, masks: bool = True, **options: Any) -> None:
        super().__init__(scenes, transform, **options)
        self.masks = masks

    def _decode(self, index: int) -> tuple[Any, np.ndarray]:
        return super()._decode(index), self._numbers(index)

    def _augment(self, index: int, stored: tuple[Any, np.ndarray], view: int) -> Sample:
        from torchvision import tv_tensors

        image, numbers = stored
        made = self.transform({"image": image, "segments": tv_tensors.Mask(torch.from_numpy(numbers)[None])})
        size = made["image"].shape[-2:]
        moved = made["segments"].as_subclass(Tensor)[0].numpy()
        rows = self.scenes.rows(index)
        there = np.bincount(moved.reshape(-1), minlength=rows.stop - rows.start + 1)[1:] > 0
        chosen = np.flatnonzero(there & ~self.scenes.crowd[rows])
        masks = moved == (chosen + 1)[:, None, None].astype(moved.dtype)
        target = box_target(_extents(masks), self.scenes.labels[rows][chosen], size)
        target["area"] = torch.from_numpy(masks.sum((1, 2))).float()
        if self.masks:
            target["masks"] = torch.from_numpy(masks)
        target = self._described(index, target, size)
        if self.truth:
            known = (column[rows].tolist() for column in (self.scenes.labels, self.scenes.crowd, self.scenes.area))
            infos = [
                {"id": number, "label_id": label, "iscrowd": int(crowd), "area": area}
                for number, (label, crowd, area) in enumerate(zip(*known, strict=True), 1)
            ]
            target["truth"] |= {"segmentation": numbers.astype(np.int32), "segments_info": infos}
        return made["image"].as_subclass(Tensor), target

    def _numbers(self, index: int) -> Int[np.ndarray, "height width"]:
        """For each pixel the number of its segment, from 1, in the order they are listed; 0 is void."""
        path = os.fsdecode(self.scenes.segmentations[index])
        ids = read_segment_ids(path)
        if ids.shape != tuple(self.scenes.sizes[index]):
            height, width = self.scenes.sizes[index]
            raise UserError(
                f"segmentation {path} is {ids.shape[1]} x {ids.shape[0]} pixels, but {self.scenes.source} says "
                f"{width} x {height}: unpack both again."
            )
        listed = self.scenes.segment_ids[self.scenes.rows(index)]
        known = np.concatenate([[0], listed])
        order = np.argsort(known)
        numbers = order[np.minimum(np.searchsorted(known[order], ids), len(known) - 1)]
        strange = ids[known[numbers] != ids]
        if len(strange):
            raise UserError(
                f"segmentation {path} has a segment {strange[0]} that {self.scenes.source} does not list: "
                f"unpack both again."
            )
        return numbers.astype(np.uint8 if len(known) < 256 else np.int32)


def _extents(masks: np.ndarray) -> np.ndarray:
    """x1, y1, x2, y2 around each mask, whole pixels."""
    height, width = masks.shape[1:]
    rows, columns = np.asarray(masks.any(2)), np.asarray(masks.any(1))
    low = np.stack([columns.argmax(1), rows.argmax(1)], axis=1)
    high = np.stack([width - columns[:, ::-1].argmax(1), height - rows[:, ::-1].argmax(1)], axis=1)
    return np.concatenate([low, high], axis=1).astype(np.float64)


def ids_of_colours(colours: UInt8[np.ndarray, "height width 3"]) -> Int[np.ndarray, "height width"]:
    """red + 256 green + 65536 blue."""
    parts = colours.astype(np.int32)
    return parts[..., 0] + (parts[..., 1] << 8) + (parts[..., 2] << 16)


def colours_of_ids(ids: Int[np.ndarray, "height width"]) -> UInt8[np.ndarray, "height width 3"]:
    return np.stack([ids & 255, ids >> 8 & 255, ids >> 16 & 255], axis=-1).astype(np.uint8)


def read_segment_ids(path: str | Path) -> Int[np.ndarray, "height width"]:
    return ids_of_colours(np.asarray(open_image(path)))


def write_segment_ids(path: str | Path, ids: Int[np.ndarray, "height width"]) -> None:
    Image.fromarray(colours_of_ids(np.asarray(ids, dtype=np.int64))).save(path, format="PNG")


def miniature(folder: Path) -> None:
    """24 and 8 images of five classes of things and two of stuff; beside them the instances, as in COCO's folder."""
    kinds = [{"id": identity, "name": name, "isthing": 1} for identity, name in THINGS.items()]
    kinds += [{"id": identity, "name": name, "isthing": 0} for identity, name in _MINIATURE_STUFF.items()]
    for part, scenes in (("train2017", TRAIN_SCENES), ("val2017", VAL_SCENES)):
        images = coco.write_scenes(folder, part, scenes)
        segments = [_write_segments(folder / f"panoptic_{part}", number, draw_scene(number)) for number in scenes]
        coco.write_coco_file(folder / f"annotations/panoptic_{part}.json", images, segments, kinds)


def _write_segments(folder: Path, number: int, scene: GeneratedScene) -> dict:
    """Write segment ids that need all three colour channels; a fully covered object has no segment."""
    folder.mkdir(parents=True, exist_ok=True)
    categories = [*_MINIATURE_STUFF, *(list(THINGS)[label] for label, _ in scene.objects)]
    infos = []
    ids = np.zeros_like(scene.segments)
    for position, category in enumerate(categories, 1):
        rows, columns = np.nonzero(scene.segments == position)
        if len(rows):
            identity = 70_000 * position + number + 1
            ids[rows, columns] = identity
            x, y = int(columns.min()), int(rows.min())
            box = [x, y, int(columns.max()) - x + 1, int(rows.max()) - y + 1]
            crowd = int(scene.crowded and position == 3)
            infos.append({"id": identity, "category_id": category, "iscrowd": crowd, "bbox": box, "area": len(rows)})
    write_segment_ids(folder / f"{number + 9:012d}.png", ids)
    return {"image_id": number + 9, "file_name": f"{number + 9:012d}.png", "segments_info": infos}
