"""COCO's panoptic segmentation: every pixel belongs to a thing, to stuff, or to nothing."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from batchformer.data.boxes import Categories, Scenes, make_scenes
from batchformer.data.coco_json import (
    numbers,
    places,
    read_boxes,
    read_categories,
    read_images,
    read_json,
    same_categories,
    values,
)
from batchformer.data.detection import DetectionData, Part
from batchformer.errors import UserError


@dataclass(frozen=True)
class PanopticScenes(Scenes):
    """A box for each segment, and the files with the segments."""

    segment_ids: Int[np.ndarray, " boxes"]
    segmentations: np.ndarray  # paths as bytes


class CocoPanoptic(DetectionData):
    """CocoDetection's folders and annotations/panoptic_{train,val}2017.json with panoptic_{train,val}2017/*.png.

    133 categories, 80 of things and 53 of stuff, each segment an object to detect. With `masks`, labels also hold
    `masks`, one for each box, padded to the canvas of the batch, for `DetrForSegmentation`; without, only the boxes, to
    train the detector that comes first. After a crop, boxes are those of what is left of the segments.

    When evaluating, `truth` also holds `segmentation`, a map of the segments in the original image (0 is void), and
    `segments_info`: what `PanopticQuality` wants. Crowds are not trained on (DETR's released code does train on those
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
        self.places = {
            "train": (train_annotations, train_images, train_segmentations),
            "val": (val_annotations, val_images, val_segmentations),
        }

    def _read_scenes(self, root: str) -> tuple[Scenes, Scenes, Categories]:
        for part in ("train", "val"):
            for name, folder in zip(("images", "segmentations"), self.places[part][1:], strict=True):
                if not (Path(root) / folder).is_dir():
                    raise UserError(
                        f"there is no folder {Path(root) / folder}: set data.root to the folder that holds {folder}, "
                        f"or data.{part}_{name} to the folder of the {name}."
                    )
        train, categories = read_panoptic(root, *self.places["train"])
        val, _ = read_panoptic(root, *self.places["val"], known=categories)
        return train, val, categories

    def _samples(self, part: Part, training: bool) -> Any:
        from batchformer.data.panoptic_samples import PanopticSamples

        scenes = self._scenes[part]
        assert isinstance(scenes, PanopticScenes)
        return PanopticSamples(
            scenes,
            self._transform(training),
            seed=self.seed if training else None,
            truth=not training,
            pad_multiple=self.pad_multiple,
            masks=self.masks,
        )


def read_panoptic(
    root: str, annotations: str, images: str, segmentations: str, known: Categories | None = None
) -> tuple[PanopticScenes, Categories]:
    """The images that have a segmentation, in the order of their ids."""
    path = Path(root) / annotations
    content = read_json(path)
    own = read_categories(content, path)
    categories = own if known is None else same_categories(own, known, path)
    entries = content["annotations"]
    files = values(entries, "file_name", "annotation", path)
    listed = values(entries, "segments_info", "annotation", path)
    for file, segments in zip(files, listed, strict=True):
        if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
            raise UserError(f"{path}: 'segments_info' of {file} is not a list of segments.")
    all_images = read_images(content, path)
    image_ids = values(entries, "image_id", "annotation", path)
    of_image = places(image_ids, [image[0] for image in all_images], "image", files, path)
    order = np.argsort(of_image, kind="stable")
    if len(np.unique(of_image)) != len(of_image):
        raise UserError(f"{path}: an image has two annotations: leave one of them.")

    segments = [segment for k in order for segment in listed[k]]
    owner = np.repeat(np.arange(len(order)), [len(listed[k]) for k in order])
    names = [
        f"{segment.get('id', '?')} of {files[order[place]]}" for segment, place in zip(segments, owner, strict=True)
    ]
    boxes = read_boxes(values(segments, "bbox", "segment", path), names, path)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    label_of = np.array([categories.ids.index(identity) for identity in own.ids])
    scenes = make_scenes(
        str(path),
        str(Path(root) / images),
        [all_images[of_image[k]] for k in order],
        owner,
        names,
        boxes=corners,
        labels=label_of[places(values(segments, "category_id", "segment", path), own.ids, "category", names, path)],
        area=numbers(values(segments, "area", "segment", path), "area", names, path),
        crowd=np.array([bool(segment.get("iscrowd", 0)) for segment in segments], dtype=bool),
        ignore=np.zeros(len(segments), dtype=bool),
    )
    return PanopticScenes(
        **{field.name: getattr(scenes, field.name) for field in fields(scenes)},
        segment_ids=numbers(values(segments, "id", "segment", path), "id", names, path).astype(np.int64),
        segmentations=np.array([os.fsencode(Path(root) / segmentations / files[k]) for k in order]),
    ), categories
