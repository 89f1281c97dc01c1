"""Tables of the detectors trained on 32 images of COCO, evaluated on these images and on the validation images.

    python -m benchmarks.study coco128-detr --data-root DIR --weights backbone=mobilenet_v2-b0353104.pth --jobs 3
    ... the same of coco128-conditional-detr, -smca-detr, -deformable-detr, -deformable-detr-refine, -panoptic-boxes
    python -m benchmarks.study coco128-panoptic --data-root DIR
    python -m benchmarks.coco128 [--runs runs] [--seed 0] [--out DIR]

The last command evaluates every finished run of these studies on the validation images, which is too little to learn
from, for comparison, and writes `detection_study.json` and `panoptic_study.json` into `benchmarks/results/`. The goal
of panoptic training is a PQ above 40 on the images trained on; `examples/detection_pictures.py RUN RUN --part train`
draws them. A quick look on a CPU: more overrides for the studies, such as `-- --data.limit_train 4 --data.image_size
160 --data.max_size 267 --data.batch_size 4 --trainer.max_epochs 20 --model.schedule.milestones [16]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, write
from benchmarks.studies import DETECTORS, STUDIES, Run

GOAL = 40.0
TRAINED = ("ap", "ap50", "ap75", "ap_batch", "ap50_batch")
EVALUATED = TRAINED[:3]
PANOPTIC = "coco128-panoptic"


def evaluate(run: Path) -> dict[str, Any]:
    """The numbers of a finished run on the validation images."""
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


def finished(study: str, args: argparse.Namespace) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The runs of a study by their variants, and their results."""
    runs = {name: args.runs / f"{study}-study" / Run(name, "", args.seed).name for name in STUDIES[study].variants}
    files = {name: run / "result.json" for name, run in runs.items()}
    return {name: (runs[name], json.loads(file.read_text())) for name, file in files.items() if file.is_file()}


def detection_rows(detector: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for variant, (run, result) in finished(f"coco128-{detector}", args).items():
        metrics, val = result["metrics"], evaluate(run)
        rows.append(
            {
                "detector": detector,
                "variant": variant,
                **{f"train_{name}": metrics.get(name) for name in TRAINED},
                "val_images": val["images"],
                **{f"val_{name}": val.get(name) for name in EVALUATED},
                "loss": result["history"][-1].get("train_loss"),
                **{name: result[name] for name in ("epochs", "steps", "wall_s", "device", "versions")},
            }
        )
        print(" ".join(f"{name} {value}" for name, value in rows[-1].items() if name != "versions"), flush=True)
    return rows


def panoptic(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    settings, rows = dict[str, Any](goal_pq=GOAL), []
    for method, (run, result) in finished(PANOPTIC, args).items():
        machine = {name: result[name] for name in ("device", "versions")}
        trained = {"images": result["data"]["test_images"], **result["metrics"]}
        for part, metrics in (("train", trained), ("val", evaluate(run))):
            rows.append({"method": method, "evaluated_on": part, **metrics, **machine})
            print(f"{method:12} {part:6} PQ {metrics['pq']:.1f}", flush=True)
        settings["size"] = result["config"]["data"]["init_args"]["image_size"]
    reached = rows and all(row["pq"] > GOAL for row in rows if row["evaluated_on"] == "train")
    print(f"PQ above {GOAL:g} on the images trained on: {'yes' if reached else 'no'}", flush=True)
    return settings, rows


def trained_on(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The machine of the runs, which need not be the one that makes the table: moved out of the rows if one for all."""
    machines = [{name: row[name] for name in ("device", "versions")} for row in rows]
    if not machines or any(found != machines[0] for found in machines):
        return {}
    for row in rows:
        del row["device"], row["versions"]
    return machines[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the folders of the studies are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    detection = dict[str, Any](), [row for detector in DETECTORS for row in detection_rows(detector, args)]
    for name, (told, rows) in (("detection", detection), ("panoptic", panoptic(args))):
        if rows:
            write(f"{name}_study", {**trained_on(rows), **told, "seed": args.seed, "rows": rows}, args.out, show=False)


if __name__ == "__main__":
    main()
