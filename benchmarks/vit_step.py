"""What a training step of the recipe `vit-cifar100-32` costs in every variant of the V2 study, alone on the card.

    python -m benchmarks.vit_step [--only baseline stable] [--profile] [--out DIR]

The step is the task's own (forward, loss of both streams, backward, AdamW; compiled, in one CUDA graph) on a batch that
lies on the device. The variants compile side by side, each in a process of its own; when all are ready they are timed
one after the other. The ratio to the baseline says how many epochs of it cost as much as the variant: those of `long`
and `long-block8` of the study.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from batchformer.recipes import find_recipe, read_recipe
from benchmarks._common import milliseconds, write
from benchmarks.studies import STUDIES

STUDY = STUDIES["vit-cifar100-32"]
BATCH = 512
SHOWN = ["baseline", "published", "published-block8", "stable", "stable-block8", "stable-split", "stable-single"]


def options(variant: str) -> dict[str, Any]:
    """The recipe's model options with those of the variant."""
    model: dict[str, Any] = read_recipe(find_recipe(STUDY.recipe)[1])["model"]
    for key, value in STUDY.settings(variant):
        *_, section, name = key.split(".")
        (model["batchformer"] if section == "batchformer" else model)[name] = yaml.safe_load(value)
    return model


def measure(variant: str, out: Path, profile: bool) -> None:
    """Says when it is ready, and waits for its turn."""
    from batchformer.data.info import DataInfo
    from batchformer.tasks import Classification
    from batchformer.training.captured_step import CapturedStep

    model = options(variant)
    task = Classification(**{key: model[key] for key in ("backbone", "backbone_args", "method", "batchformer")})
    task.construct(DataInfo(classes=[str(k) for k in range(100)], class_counts=[500] * 100))
    net = task.net.cuda().train()
    net.compile(dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-4, device="cuda"), fused=True, capturable=True)
    images = torch.randn(BATCH, 3, 32, 32, device="cuda")
    targets = torch.randn(BATCH, 100, device="cuda").softmax(1)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, targets = batch
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.stream_criterion(net(images), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = CapturedStep(step)
    for _ in range(5):
        graphed((images, targets))
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(20):
        graphed((images, targets))
    ms = milliseconds(lambda: graphed((images, targets)), repeats=30)
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
            for _ in range(3):
                graphed((images, targets))
            torch.cuda.synchronize()
        table = record.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=90)
        (out / f"{variant}.profile.txt").write_text(table)
    peak = torch.cuda.max_memory_allocated() / 2**30
    (out / f"{variant}.json").write_text(json.dumps({"variant": variant, "ms": ms, "peak_gib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(STUDY.variants), default=SHOWN)
    parser.add_argument("--profile", action="store_true", help="also write the kernels of each step beside the result")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # variant and folder: one process each
    args = parser.parse_args()
    if args.measure:
        variant, out = args.measure
        return measure(variant, Path(out), args.profile)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.out is None else args.out
        folder.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "benchmarks.vit_step", *(["--profile"] if args.profile else []), "--measure"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [subprocess.Popen([*words, variant, str(folder)], **pipes) for variant in args.only]
        for process in running:
            assert process.stdout is not None
            while process.stdout.readline() not in ("ready\n", ""):  # the end, where a variant fails
                pass
        for process in running:
            process.communicate("your turn\n")
        found = [folder / f"{variant}.json" for variant in args.only]
        rows = [json.loads(file.read_text()) for file in found if file.is_file()]
        for file in found:
            file.unlink(missing_ok=True)
    base = next((row["ms"] for row in rows if row["variant"] == "baseline"), None)
    for row in rows:
        row["of_baseline"] = row["ms"] / base if base else None
    write("vit_step", {"benchmark": "vit_step", "batch": BATCH, "recipe": STUDY.recipe, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
