"""COCO in its official layout, and anybody's data in its format."""

from pathlib import Path
from typing import Any

from batchformer.data.boxes import Categories, Scenes
from batchformer.data.coco_json import read_instances
from batchformer.data.detection import DetectionData
from batchformer.errors import UserError


class CocoDetection(DetectionData):
    """root/train2017/*.jpg, root/val2017/*.jpg and root/annotations/instances_{train,val}2017.json.

    Own data: name the folders of images and the files of annotations, all relative to `root`; a `bbox` is x, y, width,
    height in pixels. Categories are those of the training annotations, sorted by id. What the other keywords do and
    what batches are: see `DetectionData`. As in DETR, crowds are not trained on, boxes are cut at the edges of the
    image and those of no area left out; evaluation knows all boxes as they are annotated.
    """

    def __init__(
        self,
        root: str | None = None,
        train_images: str = "train2017",
        train_annotations: str = "annotations/instances_train2017.json",
        val_images: str = "val2017",
        val_annotations: str = "annotations/instances_val2017.json",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.places = {"train": (train_annotations, train_images), "val": (val_annotations, val_images)}

    def _read_scenes(self, root: str) -> tuple[Scenes, Scenes, Categories]:
        train_file, train_folder = self._place(root, "train")
        val_file, val_folder = self._place(root, "val")
        train, categories = read_instances(train_file, train_folder)
        val, _ = read_instances(val_file, val_folder, categories)
        return train, val, categories

    def _place(self, root: str, part: str) -> tuple[Path, Path]:
        file, folder = (Path(root) / name for name in self.places[part])
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}: set data.root to the folder that holds {self.places[part][1]}, "
                f"or data.{part}_images to the folder of the images."
            )
        return file, folder
