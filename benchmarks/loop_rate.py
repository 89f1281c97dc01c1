"""Does the GPU wait in the recipes? The loop of `batchformer fit` against its bare step, and the share it idles.

    python -m benchmarks.loop_rate --data-root DIR [--only cifar100-lt-100 vit-cifar100-32] [--out DIR]

A few epochs of each recipe without validation, alone on the card, one after the other. `ms` is a step of the loop, with
its part of what an epoch's beginning and end take, `bare_ms` the replay of its CUDA graph alone, `busy_ms` the time the
device works in a step of the loop (augmentation included): see `_busy.py`. Each row is written when it is there, beside
those of other recipes that an earlier call measured with the same versions on the same kind of device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, machine, write

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


def measure(name: str, words: list[str], args: argparse.Namespace) -> dict[str, Any] | None:
    """A training in a process of its own, with the callback in its trainer; `words` are what `fit` is given."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        callback = [{"class_path": "benchmarks._busy.Busy", "init_args": {"out": str(found), "seconds": args.seconds}}]
        command = [sys.executable, "-m", "batchformer.cli", "fit", *words, "--data-root", args.data_root]
        command += ["--out", f"{scratch}/run", "--no-analysis", "--trainer.max_epochs", "1000"]
        command += ["--trainer.check_val_every_n_epoch", "1000"]
        command += ["--trainer.callbacks", json.dumps(callback), *args.extra]
        here = Path(__file__).parents[1]
        done = subprocess.run(command, env=_environment(here), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if not found.is_file():
            print(f"{name}: nothing measured\n{done.stdout.decode()[-2000:]}", flush=True)
            return None
        row = {"recipe": name, **json.loads(found.read_text())}
    row["images_per_s"] = 1e3 * row["images"] / row["ms"]
    row["of_bare"] = row["bare_ms"] / row["ms"] if "bare_ms" in row else None
    row["idle"] = max(0.0, 1 - row["busy_ms"] / row["ms"]) if "busy_ms" in row else None
    print({key: value for key, value in row.items() if key != "longest"}, flush=True)
    return row


def _environment(folder: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


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
