"""Metrics. `shots`, the borders between many, medium and few, needs no torch; what does is imported when asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchformer.metrics.measures import Measure
from batchformer.metrics.shots import count_shots, shot_of

if TYPE_CHECKING:
    from batchformer.metrics.accuracy import ShotAccuracy, TopAccuracy
    from batchformer.metrics.coco_ap import CocoAP, ThingsAP
    from batchformer.metrics.panoptic_quality import PanopticQuality

__all__ = ["CocoAP", "Measure", "PanopticQuality", "ShotAccuracy", "ThingsAP", "TopAccuracy", "count_shots", "shot_of"]
_HOME = {
    "CocoAP": "batchformer.metrics.coco_ap",
    "PanopticQuality": "batchformer.metrics.panoptic_quality",
    "ShotAccuracy": "batchformer.metrics.accuracy",
    "ThingsAP": "batchformer.metrics.coco_ap",
    "TopAccuracy": "batchformer.metrics.accuracy",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
