"""Small tables for the terminal."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

from batchformer.metrics.measures import Measure, count_shots, measures_of, with_current_names


def program() -> str:
    """How to call this program again from here: by its name where the shell finds it, else by the way it was called."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "batchformer" and shutil.which("batchformer") is None else "batchformer"


def name_of(result: dict[str, Any]) -> str:
    """Recipe, variant, target and seed in one line."""
    parts = [result["recipe"], result["variant"], result.get("target"), f"seed {result['seed']}"]
    return ", ".join(str(part) for part in parts if part)


def weights_of(result: dict[str, Any]) -> str:
    """Of which epoch the numbers of a run are."""
    if chosen := result.get("chosen"):
        return f"after epoch {chosen['epoch'] + 1} of {result['epochs']}, the best on the {chosen['set']} images"
    return "after the last epoch"


def metrics_table(result: dict[str, Any]) -> str:
    """The measures of a run, each with its unit; for splits of the classes how many classes are in them."""
    result = with_current_names(result)
    shown, counts = _shown(result), result.get("class_counts", [])
    if not shown:
        return "\n".join([f"{name_of(result)}: not evaluated", *_speed(result)])
    data = result.get("data", {})
    images = f" on {data['test_images']:,} images" if data.get("test_images") else ""
    if data.get("evaluate_on") == "train":
        images += " that it was trained on"
    when = weights_of(result)
    lines = [f"{name_of(result)}: {when}{',' if ',' in when and images else ''}{images}"]
    width, units = max(20, *(len(label) for _, label, _ in shown)), max(len(measure.unit) for measure, *_ in shown)
    shots = count_shots(counts) if len(set(counts)) > 1 else {}
    for measure, label, number in shown:
        classes = shots.get(measure.key)
        line = f"  {label:<{width}} {number:>6} {measure.unit:<{units}}"
        if classes is not None:
            line += f"   {classes} {'class' if classes == 1 else 'classes'}"
        lines.append(line.rstrip())
    return "\n".join([*lines, *_speed(result)])


def metrics_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The measures of a run in words, and their values with units."""
    return [(label, f"{number} {m.unit}".strip()) for m, label, number in _shown(with_current_names(result))]


def _shown(result: dict[str, Any]) -> list[tuple[Measure, str, str]]:
    """The measures of tables that a run has, each with its label and its number in words."""
    found = [(m, result["metrics"][m.key]) for m in measures_of(result) if m.key in result["metrics"] and not m.detail]
    return [(m, f"{m.label} ({m.note})" if m.note else m.label, _number(value)) for m, value in found]


def _number(value: float | None) -> str:
    """Two decimals; of what would be zero then the first two digits."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.005 else f"{value:.2g}"


def _speed(result: dict[str, Any]) -> list[str]:
    if not result.get("images_per_s"):
        return []
    return [f"  trained in {result['wall_s']:.0f} s at {result['images_per_s']:,.0f} images/s ({result['device']})"]
