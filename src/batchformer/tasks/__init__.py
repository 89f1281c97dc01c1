"""One folder per family of tasks; each task is a LightningModule that follows the contract in `training.task`."""

from batchformer.tasks.classification.options import DistillationOptions, InsertionOptions, MixOptions
from batchformer.tasks.classification.task import Classification
from batchformer.tasks.detection.options import DetectorModuleOptions, DetectorOptimizerOptions
from batchformer.tasks.detection.panoptic import Panoptic
from batchformer.tasks.detection.task import Detection
from batchformer.tasks.domains.adaptation import DomainAdaptation
from batchformer.tasks.domains.generalization import DomainGeneralization
from batchformer.tasks.domains.options import AdaptOptions, AlgorithmOptions, DomainOptimizerOptions
from batchformer.tasks.long_tailed.task import LongTailed, LossOptions
from batchformer.tasks.zero_shot.generalized import GeneralizedZeroShot
from batchformer.training.optimizers import AdamWOptions, OptimizerOptions
from batchformer.training.options import BatchFormerOptions
from batchformer.training.schedules import CosineOptions, ScheduleOptions
from batchformer.training.task import Task

#: names that a recipe may give under `task:`, besides the class path of a user's own task
TASKS: dict[str, type[Task]] = {
    "long_tailed": LongTailed,
    "classification": Classification,
    "detection": Detection,
    "panoptic": Panoptic,
    "domain_generalization": DomainGeneralization,
    "domain_adaptation": DomainAdaptation,
    "generalized_zero_shot": GeneralizedZeroShot,
}

__all__ = ["TASKS", "AdamWOptions", "AdaptOptions", "AlgorithmOptions", "BatchFormerOptions", "Classification",
           "CosineOptions", "Detection", "DetectorModuleOptions", "DetectorOptimizerOptions", "DistillationOptions",
           "DomainAdaptation", "DomainGeneralization", "DomainOptimizerOptions", "GeneralizedZeroShot",
           "InsertionOptions", "LongTailed", "LossOptions", "MixOptions", "OptimizerOptions", "Panoptic",
           "ScheduleOptions", "Task"]  # fmt: skip
