"""Metrics. `measures` needs no torch; what does is imported lazily."""

from typing import TYPE_CHECKING

from batchformer.lazy import lazy_names
from batchformer.metrics.measures import Measure, count_shots, shot_of

if TYPE_CHECKING:
    from batchformer.metrics.accuracy import DomainScores, ShotAccuracy, TopAccuracy
    from batchformer.metrics.coco_ap import CocoAP, ThingsAP
    from batchformer.metrics.compositional import CompositionalScores
    from batchformer.metrics.panoptic_quality import PanopticQuality
    from batchformer.metrics.voc_ap import VocAP

__all__ = ["CocoAP", "CompositionalScores", "DomainScores", "Measure", "PanopticQuality", "ShotAccuracy", "ThingsAP",
           "TopAccuracy", "VocAP", "count_shots", "shot_of"]  # fmt: skip
__getattr__ = lazy_names(__name__)
