"""One LightningModule per task."""

from batchformer.tasks.classification.options import (
    AdamWOptions,
    CosineOptions,
    DistillationOptions,
    InsertionOptions,
    MixOptions,
)
from batchformer.tasks.classification.task import Classification
from batchformer.tasks.detection.options import DetectorModuleOptions, DetectorOptimizerOptions
from batchformer.tasks.detection.panoptic import Panoptic
from batchformer.tasks.detection.task import Detection
from batchformer.tasks.long_tailed.task import LongTailed
from batchformer.training.image_task import ImageTask
from batchformer.training.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions

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
