"""One LightningModule per task."""

from batchformer.tasks.classification import Classification
from batchformer.tasks.classification_options import (
    AdamWOptions,
    CosineOptions,
    DistillationOptions,
    InsertionOptions,
    MixOptions,
)
from batchformer.tasks.image_task import ImageTask
from batchformer.tasks.long_tailed import LongTailed
from batchformer.tasks.options import BatchFormerOptions, LossOptions, OptimizerOptions, ScheduleOptions

#: what a recipe may name under `task:`
TASKS: dict[str, type[ImageTask]] = {"long_tailed": LongTailed, "classification": Classification}

__all__ = [
    "TASKS",
    "AdamWOptions",
    "BatchFormerOptions",
    "Classification",
    "CosineOptions",
    "DistillationOptions",
    "ImageTask",
    "InsertionOptions",
    "LongTailed",
    "LossOptions",
    "MixOptions",
    "OptimizerOptions",
    "ScheduleOptions",
]
