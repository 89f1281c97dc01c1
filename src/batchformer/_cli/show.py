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


def program() -> str:
    """How to call this program again from here: by its name where the shell finds it, else by the way it was called."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "batchformer" and shutil.which("batchformer") is None else "batchformer"


def metrics_table(result: dict[str, Any]) -> str:
    """Accuracy over all classes and over those with many, medium and few training images, as far as the run has them.

    Top-1 and All are one number: where there is a top-1 it stands for both.
    """
    counts, metrics = result.get("class_counts", []), result["metrics"]
    shots = count_shots(counts)
    names = [name for name in LABELS if name in metrics and not (name == "all" and "top1" in metrics)]
    width = max(20, *(len(LABELS[name]) for name in names))
    lines = [f"{result['recipe']}, {result['method']}, seed {result['seed']}: test accuracy after the last epoch, %"]
    for name in names:
        value, classes = metrics[name], shots.get(name, len(counts))
        number = "–" if value is None else f"{value:.2f}"
        lines.append(f"  {LABELS[name]:<{width}} {number:>6}   {classes} {'class' if classes == 1 else 'classes'}")
    if result.get("images_per_s"):
        lines.append(
            f"  trained in {result['wall_s']:.0f} s at {result['images_per_s']:,.0f} images/s ({result['device']})"
        )
    return "\n".join(lines)
