"""What every benchmark shares: which machine this is, timing by events, writing the result file."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    import torch

    names = ("torch", "torchvision", "timm", "lightning", "triton")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "versions": versions}


def milliseconds(step: Callable[[], Any], repeats: int, rounds: int = 5) -> float:
    """Time of one call: median over rounds of `repeats` calls each, between device events."""
    import torch

    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times)[len(times) // 2]


def in_turns(steps: Mapping[str, Callable[[], Any]], repeats: int, rounds: int = 5) -> dict[str, float]:
    """Time of each: the median over rounds through all of them, so that the clock of the card treats all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, repeats, rounds=1))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def peak_gib(step: Callable[[], Any]) -> float:
    """What a step needs above what is there before it."""
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Through a temporary file beside it, so that a benchmark stopped at any moment leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def write(name: str, result: dict[str, Any], folder: Path | None = None, show: bool = True) -> Path:
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**machine(), **result}, indent=1) + "\n")
    if show:
        print(json.dumps(result, indent=1))
    return path
