"""Which settings of BatchFormer help on CIFAR-LT: tuned at imbalance 50 and seeds 10 to 12, which no result reports.

    python benchmarks/cifar_tuning.py --data-root DIR --runs runs/tuning [--epochs 260] [--jobs 4] [--only mean lr1]

Every variant is the recipe `cifar100-lt-100` with a few fields changed, trained by `batchformer fit` in a process of
its own, `--jobs` at a time: a ResNet-32 does not fill a large card (start NVIDIA's MPS for it to run them side by
side). Finished runs are kept, stopped ones go on. The result files are copied to `results/`, and the table of paired
differences to the baseline is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchformer.report.statistics import paired_difference, summarise

SEEDS = (10, 11, 12)
MEAN = ["--model.stream_loss", "mean"]
LR = "--model.optimizer.module_lr_factor"
VARIANTS: dict[str, list[str]] = {
    "baseline": ["--method", "baseline"],
    "released": [],  # the recipe as it is: stream_loss released, a tenth of the learning rate for the module
    "mean": MEAN,
    "released-lr1": [LR, "1.0"],
    "mean-lr1": [*MEAN, LR, "1.0"],
    "group128": ["--model.batchformer.group_size", "128"],
    "group32": ["--model.batchformer.group_size", "32"],
    "baseline-x3": ["--method", "baseline", "--model.loss_weight", "3"],  # the loss scale of "released", without us
    "released-x2": ["--model.loss_weight", "2"],
    "dropout01": ["--model.batchformer.dropout", "0.1"],
    "pre": ["--model.batchformer.norm", "pre"],
}


def recipe_name(variant: str) -> str:
    """The plain baseline and the variants of one recipe name differ in it, so that each is compared with the first."""
    return f"cifar100-lt-50-tuning-{variant}"


def train(variant: str, seed: int, args: argparse.Namespace) -> tuple[str, int, int]:
    out = args.runs / recipe_name(variant) / f"seed{seed}"
    if (out / "result.json").is_file():
        return variant, seed, 0
    command = [sys.executable, "-m", "batchformer.cli", "fit", "cifar100-lt-100", "--name", recipe_name(variant)]
    command += ["--data-root", args.data_root, "--data.imbalance", "50", "--seed", str(seed), "--out", str(out)]
    command += ["--trainer.max_epochs", str(args.epochs), "--model.schedule.warmup_epochs", str(args.epochs // 16)]
    command += ["--resume", "--no-analysis", *VARIANTS[variant], *args.extra]
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out.parent / f"seed{seed}.log", "w") as log:
        code = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)
    print(f"{variant} seed {seed}: {'done' if code == 0 else f'failed, see {log.name}'}", flush=True)
    return variant, seed, code


def accuracies(variant: str, args: argparse.Namespace) -> dict[int, float]:
    found = {}
    for seed in SEEDS:
        file = args.runs / recipe_name(variant) / f"seed{seed}" / "result.json"
        if file.is_file():
            result = json.loads(file.read_text())
            found[seed] = result["metrics"]["all"]
            kept = args.results / recipe_name(variant) / f"{result['method']}-seed{seed}.json"
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--runs", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--epochs", type=int, default=260, help="half of the full schedule at imbalance 50")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(train, variant, seed, args) for seed in SEEDS for variant in args.only]
    failed = [job.result()[:2] for job in pending if job.result()[2]]
    table = {variant: accuracies(variant, args) for variant in args.only}
    base = table.get("baseline", {})
    for variant, found in table.items():
        if found:
            mean, sd = summarise(list(found.values()))
            line = f"{variant:12} {mean:6.2f} ± {0.0 if sd is None else sd:.2f} ({len(found)} seeds)"
            seeds = [seed for seed in SEEDS if seed in found and seed in base]
            if variant != "baseline" and len(seeds) > 1:
                gain = paired_difference([base[s] for s in seeds], [found[s] for s in seeds])
                line += f"   {gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"
            print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
