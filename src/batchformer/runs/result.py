"""``result.json``: one file that says what was trained, on what, with which versions, and how well it does."""

import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from batchformer.errors import UserError
from batchformer.runs.recorder import epochs_done

_PACKAGES = ("batchformer", "torch", "lightning", "timm", "torchvision", "transformers")


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: Any) -> str:
    """The name of the card, or of the processor."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def variant_of(config: dict[str, Any]) -> str:
    """The name of a run's variant: run.variant, else model.method, else "default"."""
    return config["run"].get("variant") or config["model"].get("method") or "default"


def build_result(*, task: Any, data: Any, trainer: Any, recorder: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Collect result.json, except the analyses, which the caller adds: they may need a pass over the test set."""
    info = task.data_info
    optional = {
        "streams": recorder.streams,
        "per_class": recorder.per_class,
        "class_counts": [int(count) for count in info.get("class_counts", ())],
        "class_names": [str(name) for name in info.get("classes", ())],
        "sections": task.sections(),
        "main_picture": dict(task.main_picture),
        "lengthened": recorder.lengthened,
    }
    reported = ("fingerprint", "train_images", "test_images", "evaluate_on")
    known = {name: getattr(data, name) for name in reported if hasattr(data, name)}
    return {
        "recipe": config["run"]["recipe"],
        "variant": variant_of(config),
        "target": getattr(data, "target", None),
        "reference": config["run"].get("reference", "baseline"),
        "seed": task.seed,
        "protocol": "last",
        "measures": recorder.measures,
        "metrics": recorder.metrics,
        "history": recorder.history,
        **{name: value for name, value in optional.items() if value},
        **task.result_entries(),
        "epochs": epochs_done(trainer),
        "steps": trainer.global_step,
        "images_per_s": round(recorder.images_per_s, 1),
        "data": known,
        "versions": versions(),
        "device": device_name(trainer.strategy.root_device),
        "wall_s": round(recorder.wall_s, 1),
        "config": config,
    }


def add_analyses(result: dict[str, Any], task: Any, data: Any, trainer: Any) -> None:
    """Run the task's analyses and add what they find; one that cannot be measured is left out with a warning."""
    from batchformer.analysis.after_training import ANALYSES

    for analysis in task.analyses:
        measure = ANALYSES[analysis] if isinstance(analysis, str) else analysis
        try:
            found = measure(task, data, trainer)
        except UserError as obstacle:
            warnings.warn(f"an analysis after this run is left out: {obstacle}", UserWarning, stacklevel=1)
            continue
        add_findings(result, found)


def add_findings(result: dict[str, Any], found: dict[str, Any]) -> None:
    """Add the entries that an analysis returned.

    Its `sections` come after those that are there; `measured` are (measure, value) that the evaluations along the
    training do not have.
    """
    sections, measured = found.pop("sections", []), found.pop("measured", [])
    result.update(found)
    result["measures"] = [*result["measures"], *(measure.as_dict() for measure, _ in measured)]
    result["metrics"] = {**result["metrics"], **{measure.key: value for measure, value in measured}}
    if sections:
        result["sections"] = [*result.get("sections", []), *sections]
