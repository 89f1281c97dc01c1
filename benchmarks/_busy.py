"""A Lightning callback: how long a training step takes in the loop, and how long and on what the device works in it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _common import milliseconds
from lightning.pytorch.callbacks import Callback


class Busy(Callback):
    """After `skip` steps of the second epoch: `steps` timed, `steps` profiled, and the bare step, where there is one.

    The bare step is the replay of the task's CUDA graph on the batch it holds: no loader, no augmentation, no loop.
    Profiling slows the host down, so the time of the loop is taken before it: the device idles for what is left of a
    step when the union of its kernels' times is taken away.
    """

    def __init__(self, out: str, steps: int = 20, skip: int = 3) -> None:
        self.out, self.steps, self.first = Path(out), steps, skip
        self.seen = 0
        self.found: dict[str, Any] = {}
        self._began = 0.0
        self._profiler: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            return
        if self.seen == self.first:
            self._began = self._now()
        elif self.seen == self.first + self.steps:
            self.found["ms"] = 1e3 * (self._now() - self._began) / self.steps
            if torch.cuda.is_available():
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.__enter__()
        elif self.seen == self.first + 2 * self.steps:
            self._finish(pl_module, batch)
        self.seen += 1

    def _finish(self, task: Any, batch: Any) -> None:
        images = batch["pixel_values"] if isinstance(batch, dict) else batch[0]
        self.found["images"] = len(images)
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            kernels = [e for e in self._profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            ranges = [(e.time_range.start, e.time_range.end) for e in kernels]
            self.found["busy_ms"] = union(ranges) / 1e3 / self.steps
            by_name: Counter[str] = Counter()
            for event in kernels:
                by_name[event.name] += event.time_range.end - event.time_range.start
            self.found["kernels"] = len(kernels) / self.steps
            self.found["longest"] = [[name[:100], us / 1e3 / self.steps] for name, us in by_name.most_common(12)]
        graph = getattr(getattr(task, "_graphed", None), "_graph", None)
        if graph is not None:
            self.found["bare_ms"] = milliseconds(graph.replay, repeats=self.steps, rounds=3)
        self.out.write_text(json.dumps(self.found))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def union(ranges: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(ranges):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
