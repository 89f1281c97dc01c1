"""``result.json``: one file that says what was trained, on what, with which versions, and how well it does."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

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


def build_result(*, recipe: str, data: Any, trainer: Any, recorder: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Everything but the gradient influence, which costs a pass over the test set and is added by the caller."""
    from batchformer.runs.recorder import epochs_done

    streams = {"streams": recorder.streams} if recorder.streams else {}
    return {
        "recipe": recipe,
        "method": config["model"]["method"],
        "seed": config["model"]["seed"],
        "protocol": "last",
        "metrics": recorder.metrics,
        "per_class": recorder.per_class,
        "class_counts": [int(count) for count in data.class_counts],
        "class_names": [str(name) for name in data.class_names],
        "history": recorder.history,
        **streams,
        "epochs": epochs_done(trainer),
        "steps": trainer.global_step,
        "images_per_s": round(recorder.images_per_s, 1),
        "data": {
            "fingerprint": data.fingerprint,
            "train_images": data.train_images,
            "test_images": data.test_images,
        },
        "versions": versions(),
        "device": device_name(trainer.strategy.root_device),
        "wall_s": round(recorder.wall_s, 1),
        "config": config,
    }
