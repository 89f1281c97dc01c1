"""Boxes or masks with and without BatchFormerV2 side by side, and where the images of a batch look (V2's Figs. 5, 6).

    python examples/detection_pictures.py                        rectangles of stripes, detectors trained for seconds
    python examples/detection_pictures.py BASELINE_RUN BATCHFORMER_RUN --data-root DIR [--part train]
    python examples/detection_pictures.py BASELINE_RUN BATCHFORMER_RUN --photos FOLDER

Runs are folders that `batchformer fit` has written, of the task detection or panoptic. The pictures go to the folder
`detection` of the second run, where `batchformer report` finds them, or to --out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from batchformer.analysis.detection_pictures import FOLDER, Scenes, scenes_from, scenes_of, write_comparison
from batchformer.data import CocoDetection
from batchformer.data.images import images_in, open_image
from batchformer.data.sets import write_miniature
from batchformer.errors import UserError
from batchformer.metrics import CocoAP
from batchformer.tasks import Detection

HEADINGS = {"baseline": "without BatchFormerV2", "batchformer": "with BatchFormerV2"}
TINY = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 12, "dropout": 0.0}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="two run folders; left out: a miniature")
    parser.add_argument("--data-root", help="where the data of the runs is; left out: as in the run")
    parser.add_argument("--part", choices=("train", "val"), default="val", help="of that data (val)")
    parser.add_argument("--photos", type=Path, help="a folder of own images instead")
    parser.add_argument("--images", type=int, default=4, help="how many (4)")
    parser.add_argument("--threshold", type=float, default=0.5, help="score from which a box is drawn (0.5)")
    parser.add_argument("--steps", type=int, default=50, help="of training on the miniature (50)")
    parser.add_argument("--out", type=Path, help="folder to write to")
    given = parser.parse_args()
    if given.runs and len(given.runs) != 2:
        raise UserError("give two run folders, the baseline's and BatchFormer's, or none for the miniature.")
    if not given.runs and (given.photos or given.data_root):
        raise UserError("--photos and --data-root go with two run folders: name them first.")
    if given.images < 1:
        raise UserError(f"--images {given.images}: one or more are drawn.")
    if not 0 <= given.threshold <= 1:
        raise UserError(f"--threshold {given.threshold:g}: a score lies between 0 and 1.")
    if given.runs:
        tasks, data, names = trained_runs(given)
        scenes = (
            photos_of(given.photos, given.images, data) if given.photos else scenes_of(data, given.part, given.images)
        )
        out = given.out or given.runs[1] / FOLDER
    else:
        tasks, data, scenes = stripes(given.images, given.steps)
        names, out = data.class_names, given.out or Path(FOLDER)
    files, attention = write_comparison(
        out, scenes, tasks, names, threshold=given.threshold, mean=data.mean, std=data.std
    )
    if attention:
        print(attention)
    for file in files:
        print(file)


def trained_runs(given: argparse.Namespace) -> tuple[dict[str, Any], Any, list[str]]:
    from batchformer.cli.finished_run import load_run

    root = [("data.init_args.root", given.data_root)] if given.data_root else []
    found = [load_run(str(run), root) for run in given.runs]
    if any(run.config.get("task") not in ("detection", "panoptic") for run in found):
        raise UserError("these are not runs of a detector: give runs of the task detection or panoptic.")
    headings = [HEADINGS[run.config["model"]["method"]] for run in found]
    if headings[0] == headings[1]:  # two runs of one method: by their folders
        headings = [f"{number}: {run.folder.path.name}" for number, run in enumerate(found, 1)]
    tasks = dict(zip(headings, (run.task for run in found), strict=True))
    return tasks, found[1].data, list(found[1].task.data_info.classes)


def photos_of(folder: Path, count: int, data: Any) -> Scenes:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give one with images in it.")
    paths = [Path(path) for path in images_in(folder)][:count]
    if not paths:
        raise UserError(f"there is no image in {folder}.")
    return scenes_from([open_image(path, upright=True) for path in paths], data)


def stripes(count: int, steps: int) -> tuple[dict[str, Any], Any, Scenes]:
    """Two small Deformable DETRs that learn a few generated images by heart."""
    root = write_miniature("coco", Path(tempfile.mkdtemp()) / "data")
    data = CocoDetection(str(root), image_size=64, max_size=96, augment="none", limit_train=count + 1, workers=0,
                         batch_size=count + 1, eval_batch_size=count + 1)  # fmt: skip
    data.setup()
    tasks = {}
    for method, heading in HEADINGS.items():
        task = Detection("deformable-detr-single-scale", TINY, backbone="test_resnet", method=method)
        task.build(data.num_classes, data.class_counts)
        learn(task, next(iter(data.train_dataloader())), steps)
        metric = CocoAP(data.num_classes)
        with torch.inference_mode():
            for batch in data.evaluation_loader("train"):
                metric.update(task.eval().predict_step(batch, 0), batch["labels"])
        print(f"{heading}: accuracy on the images trained on (AP50) {float(metric.compute()['ap50']):.2f}")
        tasks[heading] = task
    return tasks, data, scenes_of(data, "train", count)


def learn(task: Detection, batch: dict[str, Any], steps: int) -> None:
    task.train()
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(steps):
        loss = task.net(**batch).loss  # the mean over both streams
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.net.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
