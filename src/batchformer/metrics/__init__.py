"""Metrics: one per file. The borders of the splits (`shots`) need no torch; what does is imported when asked for."""

from typing import TYPE_CHECKING, Any

from batchformer.metrics.shots import count_shots, shot_of

if TYPE_CHECKING:
    from batchformer.metrics.shot_accuracy import ShotAccuracy

__all__ = ["ShotAccuracy", "count_shots", "shot_of"]


def __getattr__(name: str) -> Any:
    if name == "ShotAccuracy":
        from batchformer.metrics.shot_accuracy import ShotAccuracy

        return ShotAccuracy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
