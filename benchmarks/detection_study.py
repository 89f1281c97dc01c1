"""Does everything learn? Five detectors with and without BatchFormerV2 on 32 images of COCO, and one stream alone.

    python -m benchmarks.detection_study --data-root DIR --weights mobilenet_v2-b0353104.pth [--jobs 3] [--minutes 3]
        [--detectors detr smca-detr] [--variants baseline single-all] [--results DIR] [-- more overrides]

Each run is a recipe `coco128-*` in a process of its own, `--jobs` side by side on a card (then with one thread each,
unless OMP_NUM_THREADS is set), stopped after `--minutes` of training; finished ones are kept. "single" is V2's Table
11, the failure of ports of the method: all rows go through the module, there is no plain stream, and the detector is
tested without the module (and, beside it, with it). "all" and "single-all" have a module after each encoder layer, not
the first alone. Every run is evaluated on its 32 training images and on the validation images. Result files go to
`results/coco128-<detector>*/`, the table of both evaluations to `benchmarks/results/detection_study.json`: it has every
finished run of this seed in `--runs`, those of earlier calls too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, keep_result, write
from benchmarks._study import environment, trained_on

DETECTORS = ("detr", "conditional-detr", "smca-detr", "deformable-detr", "deformable-detr-refine")
VARIANTS = {
    "baseline": ["--method", "baseline"],
    "batchformer": [],
    "single": ["--model.batchformer.streams", "single", "--model.evaluate_with_batch", "true"],
}
EACH_LAYER = ["--model.batchformer.encoder_layers", "[0, 1, 2]"]  # the recipes' detectors have three
VARIANTS |= {
    "all": [*EACH_LAYER, "--model.evaluate_with_batch", "true"],
    "single-all": [*EACH_LAYER, *VARIANTS["single"]],
}
ALL_DETECTORS = ("baseline", "batchformer")
SINGLE = ("detr", "deformable-detr")  # V2's Table 11 has the second
SHOWN = ("ap", "ap50", "ap75", "ap_batch", "ap50_batch")
VAL = "val.json"


def name_of(detector: str, variant: str) -> str:
    return f"coco128-{detector}" + ("" if variant in ALL_DETECTORS else f"-{variant}")


def fit(detector: str, variant: str, args: argparse.Namespace) -> int:
    """Train and evaluate one run in processes of their own; what they say goes into a log file."""
    out = folder_of(detector, variant, args)
    command = [
        sys.executable,
        "-m",
        "batchformer.cli",
        "fit",
        f"coco128-{detector}",
        "--name",
        name_of(detector, variant),
    ]
    command += ["--data-root", args.data_root, "--seed", str(args.seed), "--out", str(out), "--resume"]
    command += ["--init-from", f"backbone={args.weights}", *VARIANTS[variant]]
    command += ["--trainer.max_time", f"00:00:{int(args.minutes):02d}:{round(args.minutes % 1 * 60):02d}", *args.extra]
    out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    print(f"{detector} {variant}: begins", flush=True)
    with open(out.parent / f"{out.name}.log", "w") as log:
        code = 0
        said: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "env": environment(args.jobs)}
        if not (out / "result.json").is_file():
            code = subprocess.call(command, **said)
        if code == 0 and not (out / VAL).is_file():
            code = subprocess.call([sys.executable, "-m", "benchmarks.detection_study", "--evaluate", str(out)], **said)
    ended = "done" if code == 0 else f"failed, see {log.name}"
    print(f"{detector} {variant}: {ended} after {time.perf_counter() - began:.0f} s", flush=True)
    return code


def folder_of(detector: str, variant: str, args: argparse.Namespace) -> Path:
    return args.runs / f"{detector}-{variant}-seed{args.seed}"


def evaluate(run: Path) -> None:
    """COCO's numbers of a finished run on the validation images, in percent."""
    import torch

    from batchformer.cli.finished_run import best_device, load_run

    found = load_run(str(run))
    task, device = found.task.to(best_device()).eval(), best_device()
    metric = task.make_metric()
    images = 0
    for batch in found.data.evaluation_loader("val"):
        inputs = {name: batch[name].to(device) for name in ("pixel_values", "pixel_mask")}
        with torch.inference_mode():
            task.update_metrics(metric, task(inputs), batch)
        images += len(batch["labels"])
    numbers = {"images": images, **task.compute_metrics(metric)}
    (run / VAL).write_text(json.dumps({k: v for k, v in numbers.items() if v == v}, indent=1) + "\n")


def row(detector: str, variant: str, args: argparse.Namespace) -> dict[str, Any] | None:
    out = folder_of(detector, variant, args)
    if not (out / "result.json").is_file() or not (out / VAL).is_file():
        return None
    result, val = json.loads((out / "result.json").read_text()), json.loads((out / VAL).read_text())
    kept = args.results / name_of(detector, variant) / f"{result['method']}-seed{args.seed}.json"
    keep_result(out, kept)
    metrics = result["metrics"]
    return {
        "detector": detector,
        "variant": variant,
        **{f"train_{name}": metrics.get(name) for name in SHOWN},
        "val_images": val["images"],
        **{f"val_{name}": val.get(name) for name in SHOWN if not name.endswith("_batch")},
        "loss": result["history"][-1].get("train_loss"),
        "epochs": result["epochs"],
        "steps": result["steps"],
        "wall_s": result["wall_s"],
        "device": result["device"],
        "versions": result["versions"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--weights", help="ImageNet weights of MobileNetV2, of torchvision or timm")
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, for each run")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "detection-study")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    if args.evaluate is not None:
        evaluate(args.evaluate)
        return 0
    if args.weights is None:
        parser.error("--weights: a file with the ImageNet weights of MobileNetV2")
    everything = [(d, v) for v in VARIANTS for d in DETECTORS if v in ALL_DETECTORS or d in SINGLE]
    pairs = [(d, v) for d, v in everything if d in args.detectors and v in args.variants]
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = sum(code != 0 for code in pool.map(lambda pair: fit(pair[0], pair[1], args), pairs))
    rows = [made for pair in everything if (made := row(*pair, args)) is not None]
    for made in rows:
        line = f"{made['detector']:24} {made['variant']:12} training: AP {made['train_ap']:5.1f} "
        line += f"AP50 {made['train_ap50']:5.1f}   validation: AP {made['val_ap']:5.1f} AP50 {made['val_ap50']:5.1f}"
        with_module = made["train_ap50_batch"]
        line += "" if with_module is None else f"   training, with the module: AP50 {with_module:.1f}"
        print(f"{line}   {made['wall_s']:.0f} s", flush=True)
    write("detection_study", {**trained_on(rows), "seed": args.seed, "rows": rows}, args.out, show=False)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
