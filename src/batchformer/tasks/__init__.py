"""One folder per family of tasks; each task is a LightningModule derived from `training.task.Task`."""

from batchformer.tasks.classification.options import DistillationOptions, InsertionOptions, MixOptions
from batchformer.tasks.classification.task import Classification
from batchformer.tasks.detection.faster_rcnn import RegionDetection
from batchformer.tasks.detection.panoptic import Panoptic
from batchformer.tasks.detection.task import Detection, DetectorModuleOptions, DetectorOptimizerOptions
from batchformer.tasks.domains.adaptation import DomainAdaptation
from batchformer.tasks.domains.generalization import DomainGeneralization
from batchformer.tasks.domains.options import AdaptOptions, AlgorithmOptions, DomainOptimizerOptions
from batchformer.tasks.hands.task import AdamOptions, GraphormerOptions, HandMesh, MeshModuleOptions
from batchformer.tasks.long_tailed.algorithm import LossOptions
from batchformer.tasks.long_tailed.task import LongTailed
from batchformer.tasks.self_supervised.mae import MAE, DecoderModuleOptions, DecoderOptions
from batchformer.tasks.self_supervised.moco import ContrastOptions, MoCo
from batchformer.tasks.self_supervised.probe import LinearProbe, ProbeOptimizerOptions
from batchformer.tasks.self_supervised.task import JudgeOptions
from batchformer.tasks.zero_shot.compositional import CompositionalZeroShot
from batchformer.tasks.zero_shot.compositional_options import PairMethodOptions, PairOptimizerOptions
from batchformer.tasks.zero_shot.generalized import GeneralizedZeroShot
from batchformer.training.optimizers import AdamWOptions, OptimizerOptions
from batchformer.training.options import BatchFormerOptions
from batchformer.training.schedules import CosineAfterWarmupOptions, CosineOptions, ScheduleOptions
from batchformer.training.task import Task

#: names that a recipe may give under `task:`, besides the class path of a user's own task
TASKS: dict[str, type[Task]] = {
    "long_tailed": LongTailed,
    "classification": Classification,
    "detection": Detection,
    "panoptic": Panoptic,
    "region_detection": RegionDetection,
    "domain_generalization": DomainGeneralization,
    "domain_adaptation": DomainAdaptation,
    "mae": MAE,
    "hand_mesh": HandMesh,
    "moco": MoCo,
    "linear_probe": LinearProbe,
    "compositional": CompositionalZeroShot,
    "generalized_zero_shot": GeneralizedZeroShot,
}

__all__ = ["MAE", "TASKS", "AdamOptions", "AdamWOptions", "AdaptOptions", "AlgorithmOptions", "BatchFormerOptions",
           "Classification", "CompositionalZeroShot", "ContrastOptions", "CosineAfterWarmupOptions", "CosineOptions",
           "DecoderModuleOptions", "DecoderOptions", "Detection", "DetectorModuleOptions", "DetectorOptimizerOptions",
           "DistillationOptions", "DomainAdaptation", "DomainGeneralization", "DomainOptimizerOptions",
           "GraphormerOptions", "HandMesh", "InsertionOptions", "JudgeOptions", "LinearProbe", "LongTailed",
           "LossOptions", "MeshModuleOptions", "MixOptions", "MoCo", "OptimizerOptions", "PairMethodOptions",
           "PairOptimizerOptions", "Panoptic", "ProbeOptimizerOptions", "ScheduleOptions", "Task"]  # fmt: skip
