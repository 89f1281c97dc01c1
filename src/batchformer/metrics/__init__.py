"""Metrics: one per file."""

from batchformer.metrics.shot_accuracy import ShotAccuracy, shot_of

__all__ = ["ShotAccuracy", "shot_of"]
