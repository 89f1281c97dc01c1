"""Does panoptic training work from end to end? DETR on the first 32 COCO128 images with panoptic labels, at 384 px.

    python -m benchmarks.panoptic_study --data-root DIR --backbone-weights mobilenet_v2-b0353104.pth [--jobs 2]

For each method, with and without BatchFormerV2: the recipe `coco128-panoptic-boxes` (a detector of 133 categories),
then `coco128-panoptic` (the mask head on it, frozen), each `batchformer fit` in a process of its own, `--jobs` methods
at a time (then with one thread each, unless OMP_NUM_THREADS is set). Finished runs are kept, stopped ones go on. PQ and
its parts on the images trained on and, as it is too little to learn from, for comparison on the validation images;
goal: PQ above 40 on the former. Writes the result files to `results/`, `benchmarks/results/panoptic_study.json`, and
pictures into the run folder of the head.

After `--`: more overrides for every run, such as `--trainer.precision bf16-mixed`. A quick look on a CPU:

    python -m benchmarks.panoptic_study --data-root DIR --backbone-weights FILE --images 4 --size 160 \\
        --box-epochs 60 --head-epochs 20 --results look --out look --runs look/runs \\
        -- --data.batch_size 4 --data.workers 0
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

METHODS = ("baseline", "batchformer")
BOXES, HEAD = "coco128-panoptic-boxes", "coco128-panoptic"
GOAL = 40.0
SHOWN = ("pq", "sq", "rq", "pq_things", "pq_stuff", "ap")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--backbone-weights", required=True, help="ImageNet weights of MobileNetV2, a local file")
    parser.add_argument("--runs", type=Path, default=Path("runs") / HEAD)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--box-epochs", type=int, help="of the detector; left out: those of the recipe")
    parser.add_argument("--head-epochs", type=int, help="of the head; left out: those of the recipe")
    parser.add_argument("extra", nargs="*", help="after --: more overrides for every run")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        worked = list(pool.map(lambda method: both_stages(method, args), args.only))
    finished = [method for method in METHODS if (folder_of(HEAD, method, args) / "result.json").is_file()]
    numbers = {method: numbers_of(method, args) for method in finished}
    for method, found in numbers.items():
        for part, metrics in found.items():
            print(f"{method:12} {part:6}" + "".join(f"  {name} {metrics[name]:5.1f}" for name in SHOWN), flush=True)
    rows = [
        {"method": method, "evaluated_on": part, **{name: value for name, value in metrics.items() if name != "all"}}
        for method, found in numbers.items()
        for part, metrics in found.items()
    ]
    settings = {"goal_pq": GOAL, "size": args.size, "seed": args.seed}
    content = {**trained_on(rows), **settings, "rows": rows}
    write("panoptic_study", content, args.out, show=False)
    draw(args)
    reached = all(worked) and all(found["train"]["pq"] > GOAL for found in numbers.values())
    print(f"PQ above {GOAL:g} on the {args.images} images trained on: {'yes' if reached else 'no'}", flush=True)
    return 0 if reached else 1


def both_stages(method: str, args: argparse.Namespace) -> bool:
    weights = ["--init-from", f"backbone={args.backbone_weights}"]
    detector = fit(BOXES, method, args, args.box_epochs, weights)
    return (
        detector is not None
        and fit(HEAD, method, args, args.head_epochs, ["--init-from", f"detector={detector}"]) is not None
    )


def folder_of(recipe: str, method: str, args: argparse.Namespace) -> Path:
    return args.runs / recipe / f"{method}-seed{args.seed}"


def fit(recipe: str, method: str, args: argparse.Namespace, epochs: int | None, more: list[str]) -> Path | None:
    """The run folder, or None where training failed."""
    out = folder_of(recipe, method, args)
    if (out / "result.json").is_file():
        return out
    command = [sys.executable, "-m", "batchformer.cli", "fit", recipe, "--method", method, "--seed", str(args.seed)]
    command += ["--data-root", args.data_root, "--out", str(out), "--resume", *more]
    command += ["--data.limit_train", str(args.images), "--data.image_size", str(args.size)]
    command += ["--data.max_size", str(round(args.size * 5 / 3))]
    if epochs is not None:
        drop = f"[{round(0.8 * epochs)}]"
        command += ["--trainer.max_epochs", str(epochs), "--model.schedule.milestones", drop]
        command += ["--trainer.check_val_every_n_epoch", str(max(1, epochs // 4))]
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.parent / f"{out.name}.log"
    began = time.perf_counter()
    print(f"{recipe} {method}: begins", flush=True)
    with open(log, "w") as stream:
        code = subprocess.call(
            [*command, *args.extra], stdout=stream, stderr=subprocess.STDOUT, env=environment(args.jobs)
        )
    ended = "done" if code == 0 else f"failed, see {log}"
    print(f"{recipe} {method}: {ended} after {time.perf_counter() - began:.0f} s", flush=True)
    return out if code == 0 else None


def numbers_of(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of the head: on the images trained on, from its result file, which is kept; on the validation images, anew."""
    for recipe in (BOXES, HEAD):
        kept = args.results / recipe / f"{method}-seed{args.seed}.json"
        keep_result(folder_of(recipe, method, args), kept)
    result = json.loads(kept.read_text())
    machine = {name: result[name] for name in ("device", "versions")}
    train = {"images": result["data"]["test_images"], **result["metrics"]}
    return {"train": {**train, **machine}, "val": {**evaluate(folder_of(HEAD, method, args)), **machine}}


def evaluate(run: Path) -> dict[str, Any]:
    from batchformer.cli import quiet_libraries
    from batchformer.cli.finished_run import load_run
    from batchformer.runs.recorder import RunRecorder
    from batchformer.runs.train import make_trainer

    with quiet_libraries():
        found = load_run(str(run), [("data.init_args.evaluate_on", "val")])
        recorder = RunRecorder()
        trainer = make_trainer(found.folder, {**found.trainer_keywords, "logger": False}, [recorder], None)
        trainer.validate(found.task, datamodule=found.data, verbose=False)
    return {"images": found.data.test_images, **{name: float(value) for name, value in recorder.metrics.items()}}


def draw(args: argparse.Namespace) -> None:
    runs = [folder_of(HEAD, method, args) for method in METHODS]
    if all((run / "result.json").is_file() for run in runs):
        example = Path(__file__).parents[1] / "examples" / "detection_pictures.py"
        subprocess.call([sys.executable, str(example), *map(str, runs), "--part", "train"])


if __name__ == "__main__":
    raise SystemExit(main())
