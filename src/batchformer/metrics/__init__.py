"""Metrics: one per file. The borders of the splits (`shots`) need no torch; what does is imported when asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchformer.metrics.shots import count_shots, shot_of

if TYPE_CHECKING:
    from batchformer.metrics.coco_ap import CocoAP
    from batchformer.metrics.panoptic_quality import PanopticQuality
    from batchformer.metrics.shot_accuracy import ShotAccuracy
    from batchformer.metrics.top_accuracy import TopAccuracy

__all__ = ["CocoAP", "PanopticQuality", "ShotAccuracy", "TopAccuracy", "count_shots", "shot_of"]
_HOME = {
    "CocoAP": "batchformer.metrics.coco_ap",
    "PanopticQuality": "batchformer.metrics.panoptic_quality",
    "ShotAccuracy": "batchformer.metrics.shot_accuracy",
    "TopAccuracy": "batchformer.metrics.top_accuracy",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
