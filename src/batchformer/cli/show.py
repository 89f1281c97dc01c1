"""Small tables for the terminal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from batchformer.metrics.shots import count_shots

LABELS = {
    "top1": "Top-1",
    "top5": "Top-5",
    "top1_ema": "Top-1, averaged weights",
    "top5_ema": "Top-5, averaged weights",
    "all": "All",
    "many": "Many (> 100 images)",
    "medium": "Medium (20 to 100)",
    "few": "Few (< 20)",
}
# of detectors: no number stands for the classes of a split
OBJECTS = {
    "pq": "PQ",
    "sq": "SQ",
    "rq": "RQ",
    "pq_things": "PQ, things",
    "pq_stuff": "PQ, stuff",
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP, small objects",
    "ap_medium": "AP, medium objects",
    "ap_large": "AP, large objects",
    "pq_batch": "PQ, module at test time",
    "ap_batch": "AP, module at test time",
    "ap50_batch": "AP50, module at test time",
}


def program() -> str:
    """How to call this program again from here: by its name where the shell finds it, else by the way it was called."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "batchformer" and shutil.which("batchformer") is None else "batchformer"


def metrics_table(result: dict[str, Any]) -> str:
    """Accuracy over all classes and over those with many, medium and few training images, as far as the run has them.

    Top-1 and All are one number: where there is a top-1 it stands for both.
    """
    counts, metrics = result.get("class_counts", []), result["metrics"]
    if any(name in metrics for name in ("ap", "pq")):
        return _objects_table(result)
    names = [name for name in LABELS if name in metrics and not (name == "all" and "top1" in metrics)]
    if not names:
        heading = f"{result['recipe']}, {result['method']}, seed {result['seed']}: not evaluated"
        return "\n".join([heading, *_speed(result)])
    shots = count_shots(counts)
    width = max(20, *(len(LABELS[name]) for name in names))
    lines = [f"{result['recipe']}, {result['method']}, seed {result['seed']}: test accuracy after the last epoch, %"]
    for name in names:
        value, classes = metrics[name], shots.get(name, len(counts))
        number = "–" if value is None or value != value else f"{value:.2f}"
        lines.append(f"  {LABELS[name]:<{width}} {number:>6}   {classes} {'class' if classes == 1 else 'classes'}")
    return "\n".join([*lines, *_speed(result)])


def _objects_table(result: dict[str, Any]) -> str:
    """COCO's numbers of a detector, in percent."""
    metrics, evaluated = result["metrics"], result.get("data", {}).get("test_images")
    images = f" on {evaluated:,} images" if evaluated else ""
    lines = [f"{result['recipe']}, {result['method']}, seed {result['seed']}: after the last epoch{images}, %"]
    for name, label in OBJECTS.items():
        if (value := metrics.get(name)) is not None and value == value:  # no object of that size: nan
            lines.append(f"  {label:<26} {value:>6.2f}")
    return "\n".join([*lines, *_speed(result)])


def _speed(result: dict[str, Any]) -> list[str]:
    if not result.get("images_per_s"):
        return []
    return [f"  trained in {result['wall_s']:.0f} s at {result['images_per_s']:,.0f} images/s ({result['device']})"]
