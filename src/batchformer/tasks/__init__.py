"""One LightningModule per task."""

from batchformer.tasks.classification import Classification
from batchformer.tasks.classification_options import (
    AdamWOptions,
    CosineOptions,
    DistillationOptions,
    InsertionOptions,
    MixOptions,
)
from batchformer.tasks.detection import Detection
from batchformer.tasks.detection_options import DetectorModuleOptions, DetectorOptimizerOptions
from batchformer.tasks.image_task import ImageTask
from batchformer.tasks.long_tailed import LongTailed
from batchformer.tasks.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions
from batchformer.tasks.panoptic import Panoptic

#: what a recipe may name under `task:`
TASKS: dict[str, type[ImageTask]] = {
    "long_tailed": LongTailed,
    "classification": Classification,
    "detection": Detection,
    "panoptic": Panoptic,
}

__all__ = [
    "TASKS",
    "AdamWOptions",
    "BatchFormerOptions",
    "Classification",
    "CosineOptions",
    "Detection",
    "DetectorModuleOptions",
    "DetectorOptimizerOptions",
    "DistillationOptions",
    "ImageTask",
    "InsertionOptions",
    "LongTailed",
    "LossOptions",
    "MixOptions",
    "OptimizerOptions",
    "Panoptic",
    "ScheduleOptions",
]
