"""A Lightning callback: how long a training step takes in the loop, and how long and on what the device works in it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from batchformer.data.loading.epoch_loader import as_batch, samples_in
from benchmarks._common import milliseconds


class Busy(Callback):
    """From the second epoch on: whole epochs timed for `seconds`, one profiled (its first `most` steps), and the bare
    step, where there is one.

    Whole epochs, as a loader may prepare many batches at once, and an epoch has an end. The bare step is the replay of
    the task's CUDA graph on the batch it holds, or the same step called as it is where the recipe has no graph: no
    loader, no augmentation, no loop. Profiling slows the host down, so the time of the loop is taken before it: the
    device idles for what is left of a step when the union of its kernels' times is taken away.
    """

    def __init__(self, out: str, seconds: float = 3.0, most: int = 50) -> None:
        self.out, self.seconds, self.most = Path(out), seconds, most
        self.found: dict[str, Any] = {}
        self._began: float | None = None
        self._first_step = 0
        self._profiler: Any = None
        self._batch: Any = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0 or trainer.should_stop:
            return
        if self._began is None:
            self._first_step, self._began = trainer.global_step, self._now()
        elif "ms" not in self.found:
            if time.perf_counter() - self._began > self.seconds:  # waits for the device only where it is the end
                self.found["steps"] = trainer.global_step - self._first_step
                self.found["ms"] = 1e3 * (self._now() - self._began) / self.found["steps"]
                self._profile(trainer, pl_module)
        else:
            self._finish(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.found.setdefault("images", samples_in(batch))
        self._batch = batch
        if self._profiler is not None and trainer.global_step - self._first_step == self.most:
            self._finish(trainer, pl_module)

    def _profile(self, trainer: Any, task: Any) -> None:
        self._first_step = trainer.global_step
        if not torch.cuda.is_available():
            self._finish(trainer, task)
            return
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()

    def _finish(self, trainer: Any, task: Any) -> None:
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.__exit__(None, None, None)
            profiler, self._profiler = self._profiler, None
            steps = trainer.global_step - self._first_step
            kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            ranges = [(e.time_range.start, e.time_range.end) for e in kernels]
            self.found["busy_ms"] = union(ranges) / 1e3 / steps
            by_name: Counter[str] = Counter()
            for event in kernels:
                by_name[event.name] += event.time_range.end - event.time_range.start
            self.found["kernels"] = len(kernels) / steps
            self.found["longest"] = [[name[:100], us / 1e3 / steps] for name, us in by_name.most_common(12)]
        if torch.cuda.is_available() and (bare := self._bare_step(trainer, task)) is not None:
            self.found["bare_ms"] = milliseconds(bare, repeats=20, rounds=3)
        self.out.write_text(json.dumps(self.found))
        trainer.should_stop = True

    def _bare_step(self, trainer: Any, task: Any) -> Callable[[], Any] | None:
        graphed = getattr(task, "_captured", None)
        if graphed is not None and graphed.captured:
            return graphed._graph.replay
        if not hasattr(task, "_train_on"):  # a detector's is not of tensors alone
            return None
        batch = task.prepare(as_batch(self._batch), 0)

        def step() -> None:
            with trainer.precision_plugin.train_step_context():
                task._train_on(batch)

        return step

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
