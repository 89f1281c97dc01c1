"""Does the GPU wait in the recipes? The loop of `batchformer fit` against its bare step, and the share it idles.

    python -m benchmarks.loop_rate --data-root DIR [--only cifar100-lt-100 vit-cifar100-32] [--out DIR]

A few epochs of each recipe without validation, alone on the card, one after the other. `ms` is a step of the loop, with
its part of what an epoch's beginning and end take, `bare_ms` the replay of its CUDA graph alone, `busy_ms` the time the
device works in a step of the loop (augmentation included): see `Busy`. Each row is written when it is there, beside
those of other recipes that an earlier call measured with the same versions on the same kind of device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from batchformer.data.loading.epoch_loader import as_batch, samples_in
from benchmarks._common import RESULTS, machine, milliseconds, write

RECIPES: dict[str, list[str]] = {
    "cifar100-lt-100": ["cifar100-lt-100", "--model.schedule.warmup_epochs", "1"],
    "vit-cifar100-32": ["vit-cifar100-32", "--model.schedule.warmup_epochs", "1"],
    "vit-cifar100-32, baseline": ["vit-cifar100-32", "--method", "baseline", "--model.schedule.warmup_epochs", "1"],
    "vit-cifar100-32-transmix": ["vit-cifar100-32-transmix", "--model.schedule.warmup_epochs", "1"],
    "resnet56-cifar100-cutmix": ["resnet56-cifar100-cutmix", "--model.schedule.warmup_epochs", "1"],
    "deit-ti-cifar100-100, baseline": [
        "deit-ti-cifar100-100", "--method", "baseline", "--model.schedule.warmup_epochs", "1",
    ],
    "deit-ti-cifar100-100": ["deit-ti-cifar100-100", "--model.schedule.warmup_epochs", "1"],
    **{f"pacs-128, {each}": ["pacs-128", "--init-from", "scratch", "--variant", each] for each in ("erm", *(
        f"{name}+batchformer" for name in ("erm", "coral", "irm", "vrex", "mixstyle")))},
    **{f"plantvillage-czsl-trained, {each}": ["plantvillage-czsl-trained", "--variant", each]
       for each in ("visual-product", "compcos+batchformer", "cge", "cge+batchformer")},
    **{f"{recipe}, {method}": [recipe, "--method", method, "--model.schedule.warmup_epochs", "1"]
       for recipe in ("moco-v2-cifar100", "moco-v3-cifar100", "mae-cifar100", "hands-rendered")
       for method in ("baseline", "batchformer")},
}  # fmt: skip


class Busy(Callback):
    """How long a training step takes in the loop, and how long and on what the device works in it.

    From the second epoch on: whole epochs timed for `seconds`, one profiled (its first `most` steps), and the bare
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


def measure(name: str, words: list[str], args: argparse.Namespace) -> dict[str, Any] | None:
    """A training in a process of its own, with the callback in its trainer; `words` are what `fit` is given."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        callback = [
            {"class_path": "benchmarks.loop_rate.Busy", "init_args": {"out": str(found), "seconds": args.seconds}}
        ]
        command = [sys.executable, "-m", "batchformer.cli", "fit", *words, "--data-root", args.data_root]
        command += ["--out", f"{scratch}/run", "--no-analysis", "--trainer.max_epochs", "1000"]
        command += ["--trainer.check_val_every_n_epoch", "1000"]
        command += ["--trainer.callbacks", json.dumps(callback), *args.extra]
        here = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": here}  # for the callback
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if not found.is_file():
            print(f"{name}: nothing measured\n{done.stdout.decode()[-2000:]}", flush=True)
            return None
        row = {"recipe": name, **json.loads(found.read_text())}
    row["images_per_s"] = 1e3 * row["images"] / row["ms"]
    row["of_bare"] = row["bare_ms"] / row["ms"] if "bare_ms" in row else None
    row["idle"] = max(0.0, 1 - row["busy_ms"] / row["ms"]) if "busy_ms" in row else None
    print({key: value for key, value in row.items() if key != "longest"}, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=3.0, help="of whole epochs, at least")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    rows, missing = earlier_rows(args.out or RESULTS), 0
    for name in args.only:
        row = measure(name, RECIPES[name], args)
        if row is None:
            missing += 1
            continue
        rows[name] = row
        ordered = [rows[recipe] for recipe in RECIPES if recipe in rows]
        write("loop_rate", {"benchmark": "loop_rate", "rows": ordered}, args.out, show=False)
    return 1 if missing else 0


def earlier_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """By recipe; none where they were measured elsewhere or with other versions."""
    file = folder / "loop_rate.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    same = {key: known.get(key) for key in machine()} == machine()
    return {row["recipe"]: row for row in known["rows"]} if same else {}


if __name__ == "__main__":
    raise SystemExit(main())
