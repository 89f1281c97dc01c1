"""Small tables for the terminal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from batchformer.metrics.shots import count_shots

SPLITS = {"all": "All", "many": "Many (> 100 images)", "medium": "Medium (20 to 100)", "few": "Few (< 20)"}


def program() -> str:
    """How to call this program again from here: by its name where the shell finds it, else by the way it was called."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "batchformer" and shutil.which("batchformer") is None else "batchformer"


def metrics_table(result: dict[str, Any]) -> str:
    """Accuracy over all classes and over those with many, medium and few training images."""
    counts = result.get("class_counts", [])
    classes: dict[str, int] = {"all": len(counts), **count_shots(counts)}
    lines = [f"{result['recipe']}, {result['method']}, seed {result['seed']}: test accuracy after the last epoch, %"]
    for split, label in SPLITS.items():
        value = result["metrics"].get(split)
        number = "–" if value is None else f"{value:.2f}"
        lines.append(f"  {label:<20} {number:>6}   {classes[split]} {'class' if classes[split] == 1 else 'classes'}")
    if result.get("images_per_s"):
        lines.append(
            f"  trained in {result['wall_s']:.0f} s at {result['images_per_s']:,.0f} images/s ({result['device']})"
        )
    return "\n".join(lines)
