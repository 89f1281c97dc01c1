"""Does a change of the code move a single bit of a training? Hashes of weights and measures of ten small trainings.

    python -m benchmarks.unchanged                       beside benchmarks/results/unchanged.json
    python -m benchmarks.unchanged --out before.json     on another machine: before the change,
    python -m benchmarks.unchanged --against before.json   and after it

The file in results/ was made by the code before the training layer was opened for any task (commit 59952b6): a change
that moves its weights by a bit, its losses by a digit or its measures by 1e-6 changes what earlier runs are worth. Bits
depend on the processor and on torch, which the file names; where they are others, make a file of your own first.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads both when it is imported
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from benchmarks._common import RESULTS, machine, write_json

RECORD = RESULTS / "unchanged.json"
FILES = "--data.image_size 32 --data.batch_size 8 --data.eval_batch_size 32 --data.workers 0"
ARRAYS = "--data.batch_size 16 --data.eval_batch_size 150"
NARROW = "--model.backbone_args.img_size 32 --model.backbone_args.patch_size 16 --model.backbone_args.embed_dim 24"
DETECTOR = (
    "--model.backbone test_resnet --model.backbone_weights null --model.detector_args.d_model 32 "
    "--model.detector_args.encoder_ffn_dim 8 --model.detector_args.decoder_ffn_dim 8 "
    "--model.detector_args.num_queries 6 "
    "--model.detector_args.encoder_attention_heads 2 --model.detector_args.decoder_attention_heads 2 "
    "--model.detector_args.decoder_layers 2 --data.image_size 48 --data.max_size 64 --data.batch_size 4 "
    "--data.eval_batch_size 3 --data.limit_val 6 --data.workers 0"
)
HEADS = "--model.detector_args.encoder_attention_heads 8"  # what the mask head can divide
CASES = {
    "digits-lt": ("digits-lt", None, "--data.batch_size 16"),
    "vit-digits": ("vit-digits", None, "--data.batch_size 16"),
    "cifar100-lt-100": ("cifar100-lt-100", "cifar100", f"{ARRAYS} --model.backbone_args.widths [4,8,16]"),
    "deit-ti-cifar100-100": ("deit-ti-cifar100-100", "cifar100", f"{ARRAYS} {NARROW} --data.image_size 32"),
    "transmix": ("vit-cifar100-32-transmix", "cifar100", f"{ARRAYS} {NARROW} --data.image_size 32"),
    "puzzlemix": ("vit-cifar100-32-puzzlemix", "cifar100", f"{ARRAYS} {NARROW} --data.image_size 32"),
    "coco128-detr": ("coco128-detr", "coco", DETECTOR),
    "coco128-deformable-detr": ("coco128-deformable-detr", "coco", DETECTOR),
    "panoptic": ("coco128-panoptic", "coco-panoptic", f"{DETECTOR} {HEADS} --model.train joint --data.limit_train 8"),
    "imagenet-lt-r10": ("imagenet-lt-r10", "imagenet-lt", FILES),
}
SHORT = (
    "--trainer.max_epochs 2 --trainer.limit_train_batches 4 --trainer.accelerator cpu "
    "--trainer.check_val_every_n_epoch 1 "
    "--model.compile false --model.schedule.warmup_epochs 0 --seed 3 --no-analysis"
)


def measure(name: str, method: str, data: Path) -> dict[str, Any]:
    from batchformer.cli import main

    recipe, layout, small = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        root = [] if layout is None else ["--data-root", str(data / layout)]
        out = Path(folder) / "run"
        words = [recipe, "--method", method, *root, *small.split(), *SHORT.split(), "--out", str(out)]
        if main(["fit", *words]):
            raise SystemExit(f"{name}: the training failed")
        result = json.loads((out / "result.json").read_text())
        with open(out / "metrics.csv", newline="") as file:
            losses = {
                column: row[column]
                for row in csv.DictReader(file)
                for column in ("train/loss", "val/loss")
                if row.get(column)
            }
        state = torch.load(out / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].flatten().numpy().tobytes())
    return {"weights": digest.hexdigest(), "measures": result["metrics"], "losses": losses}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = []
    if before["weights"] != now["weights"]:
        found.append("other weights")
    if before["losses"] != now["losses"]:
        found.append(f"losses were {before['losses']}, are {now['losses']}")
    for key, value in before["measures"].items():
        other = now["measures"].get(key)
        if key == "all":  # what the primary measure was called before measures had names of their own
            other = next(iter(now["measures"].values()))
        if (value is None) != (other is None) or (value is not None and abs(value - other) > 1e-6):
            found.append(f"{key} was {value}, is {other}")
    return found


def main_() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the hashes to this file, and compare with none")
    parser.add_argument("--against", type=Path, default=RECORD)
    parser.add_argument("--only", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    given = parser.parse_args()
    from batchformer.data.sets import write_miniature
    from batchformer.runs.result import device_name

    here = {**machine(), "processor": device_name(torch.device("cpu"))}
    before = {} if given.out else json.loads(given.against.read_text())
    for key in here if before else ():
        if before[key] != here[key]:
            print(f"made with {key} {before[key]}, here {here[key]}: bits may differ", file=sys.stderr)
    runs: dict[str, Any] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for layout in sorted({CASES[name][1] or "" for name in given.only} - {""}):
            write_miniature(layout, Path(folder) / layout)
        for name in given.only:
            for method in ("baseline", "batchformer"):
                key = f"{name} {method}"
                runs[key] = measure(name, method, Path(folder))
                if given.out:
                    write_json(given.out, {**here, "runs": runs})
                    continue
                found = differences(before["runs"][key], runs[key])
                failed += bool(found)
                print(f"{key}: {'; '.join(found) or 'the same'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main_())
