"""COCO's average precision by our metrics and by the libraries that have it: the same numbers, and in what time?

    python -m benchmarks.coco_evaluators --data COCO [--voc VOCdevkit/VOC2007] [--rounds 3] [--out benchmarks/results]

`--data` is a folder in COCO's layout (annotations/instances_val2017.json; with panoptic_val2017.json and its PNGs the
masks are compared too). True boxes are moved, renamed and lost by seeded noise, with random scores and boxes from
nowhere, so that the numbers are far from 0 and 1; a tenth of COCO's objects are made crowds, and VOC's difficult
objects are to be ignored. Timed are `update` and `compute` from tensors of each image to the twelve numbers and the AP
of each class; of the libraries themselves, also writing the dicts they read. Evaluators that are not installed are
left out. Rounds go through all evaluators in turn, and the shortest counts; on a machine that others use too, compare
the processor time.

pycocotools and what is built on it overwrite `ignore` with `iscrowd`, which may be found any number of times and by
other overlaps. The ignored objects are given to them with an area outside of every range, which has the same effect.
torchmetrics is given its recalls in double precision: its own are in single precision, which moves AP by up to 2e-4.
Of masks, its numbers differ in classes with crowds even so; ours are those of pycocotools (tests/metrics).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
import warnings
import xml.etree.ElementTree as xml
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from torch import Tensor

from batchformer.metrics import CocoAP, ThingsAP
from batchformer.metrics.coco_ap import AP_NAMES
from benchmarks._common import write

OUT_OF_RANGE = 1e11  # COCO's largest range ends at 1e10
PER_IMAGE = 100
TORCHMETRICS_NAMES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large",
                      "mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large")  # fmt: skip

Images = list[dict[str, Any]]
Values = dict[str, Any]  # AP_NAMES and per_class
Scene = tuple[Images, Images, int]  # predictions, targets, number of classes


def coco_boxes(root: Path, rng: np.random.Generator) -> tuple[Images, int]:
    listing = json.loads((root / "annotations" / "instances_val2017.json").read_text())
    label = {identity: k for k, identity in enumerate(sorted(entry["id"] for entry in listing["categories"]))}
    targets = []
    for image in listing["images"]:
        entries = [entry for entry in listing["annotations"] if entry["image_id"] == image["id"]]
        boxes = np.array([entry["bbox"] for entry in entries]).reshape(-1, 4)
        targets.append(
            target(
                image["id"],
                np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1),
                [label[entry["category_id"]] for entry in entries],
                area=[entry["area"] for entry in entries],
                crowd=rng.random(len(entries)) < 0.1,
            )
        )
    return targets, len(label)


def voc_boxes(root: Path) -> tuple[Images, int]:
    targets: Images = []
    labels: dict[str, int] = {}
    for k, file in enumerate(sorted((root / "Annotations").glob("*.xml"))):
        objects = xml.parse(file).getroot().findall("object")
        corners = [
            [float(o.findtext(f"bndbox/{side}") or "nan") for side in ("xmin", "ymin", "xmax", "ymax")] for o in objects
        ]
        names = [labels.setdefault(o.findtext("name") or "", len(labels)) for o in objects]
        difficult = [o.findtext("difficult") == "1" for o in objects]
        targets.append(target(k, np.array(corners).reshape(-1, 4), names, ignore=difficult))
    return targets, len(labels)


def target(image: int, boxes: np.ndarray, labels: Any, area: Any = None, crowd: Any = None, ignore: Any = None) -> dict:
    none = np.zeros(len(boxes), dtype=bool)
    sides = boxes[:, 2:] - boxes[:, :2]
    return {
        "image_id": image,
        "boxes": torch.from_numpy(boxes).double(),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "area": torch.as_tensor(sides.prod(1) if area is None else area, dtype=torch.float64),
        "iscrowd": torch.as_tensor(none if crowd is None else crowd),
        "ignore": torch.as_tensor(none if ignore is None else ignore),
    }


def found_boxes(targets: Images, classes: int, rng: np.random.Generator) -> Images:
    """Most objects several times, moved by little or much, a fifth of them renamed, and boxes from nowhere."""
    predictions = []
    for one in targets:
        count = len(one["labels"])
        pick = rng.integers(count, size=PER_IMAGE * 3 // 4) if count else np.zeros(0, dtype=int)
        boxes = one["boxes"].numpy()[pick]
        sides = boxes[:, 2:] - boxes[:, :2]
        low = boxes[:, :2] + rng.normal(size=sides.shape) * sides * rng.choice([0.01, 0.05, 0.2], (len(pick), 1))
        boxes = np.concatenate([low, low + sides * np.exp(rng.normal(size=sides.shape) * 0.1)], 1)
        corner = rng.uniform(0, 300, (PER_IMAGE - len(pick), 2))
        boxes = np.concatenate([boxes, np.concatenate([corner, corner + rng.uniform(1, 300, corner.shape)], 1)])
        labels = np.concatenate([one["labels"].numpy()[pick], rng.integers(classes, size=len(corner))])
        renamed = rng.random(len(labels)) < 0.2
        labels[renamed] = rng.integers(classes, size=renamed.sum())
        made = {"boxes": torch.from_numpy(boxes).float(), "labels": torch.from_numpy(labels)}
        predictions.append(made | {"scores": torch.from_numpy(rng.random(len(labels))).float()})
    return predictions


def coco_segments(root: Path, rng: np.random.Generator) -> tuple[Images, Images, list[bool]]:
    """Panoptic maps of COCO, and the same maps moved by some pixels with lost and renamed segments."""
    listing = json.loads((root / "annotations" / "panoptic_val2017.json").read_text())
    categories = sorted(listing["categories"], key=lambda entry: entry["id"])
    label = {entry["id"]: k for k, entry in enumerate(categories)}
    predictions, targets = [], []
    for entry in listing["annotations"]:
        png = np.asarray(Image.open(root / "panoptic_val2017" / entry["file_name"]).convert("RGB"))
        drawn = png.astype(np.int64) @ [1, 256, 65536]
        infos = [{"id": info["id"], "label_id": label[info["category_id"]], "iscrowd": info["iscrowd"]}
                 for info in entry["segments_info"]]  # fmt: skip
        targets.append({"image_id": entry["image_id"], "segmentation": drawn, "segments_info": infos})
        moved = np.roll(drawn, rng.integers(-8, 9, 2), (0, 1))
        kept = [{"id": info["id"], "score": float(rng.random()),
                 "label_id": info["label_id"] if rng.random() < 0.8 else int(rng.integers(len(categories)))}
                for info in infos if rng.random() < 0.9]  # fmt: skip
        predictions.append({"segmentation": moved, "segments_info": kept})
    return predictions, targets, [bool(entry["isthing"]) for entry in categories]


def ours(scene: Scene) -> Values:
    predictions, targets, classes = scene
    metric = CocoAP(classes)
    metric.update(predictions, targets)
    return {name: value.numpy() for name, value in metric.compute().items()}


def by_library(coco_class: Any, eval_class: Any, scene: Scene) -> Values:
    """pycocotools, or a library with the same classes: lists of dicts in, twelve numbers out."""
    predictions, targets, classes = scene
    annotations: list[dict] = []
    results: list[dict] = []
    for image, (prediction, one) in enumerate(zip(predictions, targets, strict=True)):
        area = torch.where(one["ignore"], OUT_OF_RANGE, one["area"]).tolist()
        columns = (_sizes(one["boxes"]), one["labels"].tolist(), area, one["iscrowd"].int().tolist())
        for box, label, size, crowd in zip(*columns, strict=True):
            entry = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "bbox": box}
            annotations.append(entry | {"area": size, "iscrowd": crowd})
        found = (_sizes(prediction["boxes"].double()), prediction["labels"].tolist(), prediction["scores"].tolist())
        results += [{"image_id": image, "category_id": label, "bbox": box, "score": score}
                    for box, label, score in zip(*found, strict=True)]  # fmt: skip
    images, categories = ([{"id": k, "name": k} for k in range(count)] for count in (len(targets), classes))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco_class()
        truth.dataset = {"images": images, "annotations": annotations, "categories": categories, "info": {}}
        truth.createIndex()
        judge = eval_class(truth, truth.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    precision = judge.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes
    per_class = np.where((precision > -1).all((0, 1)), precision.mean((0, 1)), np.nan)
    return dict(zip(AP_NAMES, _nan(judge.stats[:12]), strict=True)) | {"per_class": per_class}


def by_torchmetrics(backend: str, scene: Scene) -> Values:
    predictions, targets, classes = scene
    given = [{"boxes": one["boxes"].float(), "labels": one["labels"], "iscrowd": one["iscrowd"].long(),
              "area": torch.where(one["ignore"], OUT_OF_RANGE, one["area"])} for one in targets]  # fmt: skip
    return _torchmetrics("bbox", backend, predictions, given, classes)


def ours_for_masks(predictions: Images, targets: Images, is_thing: list[bool]) -> Values:
    metric = ThingsAP(is_thing)
    metric.update(predictions, targets)
    return {name: value.numpy() for name, value in metric.compute().items()}


def masks_by_torchmetrics(backend: str, predictions: Images, targets: Images, is_thing: list[bool]) -> Values:
    made, given = [], []
    for prediction, one in zip(predictions, targets, strict=True):
        made.append(_masks(prediction, is_thing, ("scores", "score", torch.float32)))
        given.append(_masks(one, is_thing, ("iscrowd", "iscrowd", torch.int64)))
    return _torchmetrics("segm", backend, made, given, len(is_thing))


def _masks(side: dict[str, Any], is_thing: list[bool], flag: tuple[str, str, torch.dtype]) -> dict[str, Tensor]:
    drawn = torch.as_tensor(side["segmentation"])
    there = set(drawn.unique().tolist())
    infos = [info for info in side["segments_info"] if is_thing[info["label_id"]] and info["id"] in there]
    ids = torch.tensor([info["id"] for info in infos], dtype=torch.int64)
    labels = torch.tensor([info["label_id"] for info in infos], dtype=torch.int64)
    name, key, dtype = flag
    return {
        "masks": drawn == ids[:, None, None],
        "labels": labels,
        name: torch.tensor([info[key] for info in infos], dtype=dtype),
    }


def _torchmetrics(kind: Any, backend: Any, predictions: Images, targets: Images, classes: int) -> Values:
    from torchmetrics.detection import MeanAveragePrecision

    recalls = np.linspace(0, 1, 101).tolist()
    metric = MeanAveragePrecision(iou_type=kind, backend=backend, rec_thresholds=recalls, class_metrics=True)
    metric.warn_on_many_detections = False
    with contextlib.redirect_stdout(io.StringIO()):
        metric.update(predictions, targets)
        values = metric.compute()
    per_class = np.full(classes, np.nan)
    per_class[values["classes"].numpy()] = _nan(values["map_per_class"].numpy())
    numbers = [float(values[name]) for name in TORCHMETRICS_NAMES]
    return dict(zip(AP_NAMES, _nan(np.array(numbers)), strict=True)) | {"per_class": per_class}


def box_evaluators() -> dict[str, Callable[[Scene], Values]]:
    """Those that are installed, ours first."""
    found: dict[str, Callable[[Scene], Values]] = {"batchformer": ours}
    if util.find_spec("pycocotools"):
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        found["pycocotools"] = lambda scene: by_library(COCO, COCOeval, scene)
        found["torchmetrics, pycocotools"] = lambda scene: by_torchmetrics("pycocotools", scene)
    if util.find_spec("faster_coco_eval"):
        from faster_coco_eval import COCO as FasterCOCO
        from faster_coco_eval import COCOeval_faster

        found["faster_coco_eval"] = lambda scene: by_library(FasterCOCO, COCOeval_faster, scene)
        found["torchmetrics, faster_coco_eval"] = lambda scene: by_torchmetrics("faster_coco_eval", scene)
    return found


def compare(evaluators: dict[str, Callable[[], Values]], rounds: int) -> dict[str, Any]:
    """Values of ours; of each: the shortest times, and how far its numbers are from ours at most (nan equals nan)."""
    seconds: dict[str, float] = {}
    processor: dict[str, float] = {}
    values: dict[str, Values] = {}
    for _ in range(rounds):
        for name, evaluate in evaluators.items():
            begin, begin_processor = time.perf_counter(), time.process_time()
            values[name] = evaluate()
            seconds[name] = min(seconds.get(name, np.inf), time.perf_counter() - begin)
            processor[name] = min(processor.get(name, np.inf), time.process_time() - begin_processor)
    own = values["batchformer"]
    rows = {}
    for name, theirs in values.items():
        numbers = max(_distance(theirs[key], own[key]) for key in AP_NAMES)
        per_class = _distance(theirs["per_class"], own["per_class"])
        rows[name] = {
            "seconds": round(seconds[name], 3),
            "processor_seconds": round(processor[name], 3),
            "numbers_apart": numbers,
            "per_class_apart": per_class,
        }
    return {"ours": {name: round(float(own[name]), 6) for name in AP_NAMES}, "evaluators": rows}


def two_processes(scene: Scene, evaluator: str) -> Values:
    """Each process has every second image; with an odd number the second has the first image too, as samplers fill up.

    torchmetrics gathers image by image: with unequal numbers of images in the processes it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "values.pt")
        mp.start_processes(
            _one_process, (os.path.join(folder, "store"), out, scene, evaluator), nprocs=2, start_method="fork"
        )
        return torch.load(out, weights_only=False)


def _one_process(rank: int, store: str, out: str, scene: Scene, evaluator: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    predictions, targets, classes = scene
    mine = list(range(rank, len(targets), 2)) + [0] * (rank * len(targets) % 2)
    begin = time.perf_counter()
    part = ([predictions[k] for k in mine], [targets[k] for k in mine], classes)
    values = box_evaluators()[evaluator](part)
    if rank == 1:
        torch.save({**values, "seconds": time.perf_counter() - begin}, out)
    dist.destroy_process_group()


def _sizes(boxes: Tensor) -> list[list[float]]:
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()


def _nan(values: Any) -> np.ndarray:
    return np.where(np.asarray(values) == -1, np.nan, values)


def _distance(one: Any, two: Any) -> float:
    one, two = np.atleast_1d(one).astype(float), np.atleast_1d(two).astype(float)
    if (np.isnan(one) != np.isnan(two)).any():
        return float("inf")
    return float(np.nan_to_num(np.abs(one - two)).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--voc", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=40, help="COCO's images so many times, for a set of real size")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    evaluators = box_evaluators()
    rows: dict[str, Any] = {}

    def compare_boxes(name: str, targets: Images, classes: int, rounds: int = arguments.rounds) -> Scene:
        scene = found_boxes(targets, classes, rng), targets, classes
        row = compare({key: lambda one=one: one(scene) for key, one in evaluators.items()}, rounds)
        rows[name] = {"images": len(targets), "objects": sum(len(one["labels"]) for one in targets), **row}
        return scene

    targets, classes = coco_boxes(arguments.data, rng)
    scene = compare_boxes("coco boxes, a tenth crowds", targets, classes)
    processes = {}
    odd = len(targets) - 1 + len(targets) % 2
    scene = scene[0][:odd], scene[1][:odd], classes
    for name in ("batchformer", *(key for key in evaluators if key.startswith("torchmetrics"))):
        alone, together = evaluators[name](scene), two_processes(scene, name)
        apart = max(_distance(alone[key], together[key]) for key in AP_NAMES)
        processes[name] = {"seconds": round(together["seconds"], 3), "from_one_process": apart}
    rows["coco boxes, two processes that share an image"] = {"evaluators": processes}
    many = [{**one, "image_id": k * len(targets) + i} for k in range(arguments.repeat) for i, one in enumerate(targets)]
    compare_boxes("coco boxes, many images", many, classes, rounds=1)
    if arguments.voc:
        compare_boxes("voc boxes, difficult ones ignored", *voc_boxes(arguments.voc))
    if (arguments.data / "annotations" / "panoptic_val2017.json").is_file():
        maps = coco_segments(arguments.data, rng)
        of_masks: dict[str, Callable[[], Values]] = {"batchformer": lambda: ours_for_masks(*maps)}
        for key in evaluators:
            if key.startswith("torchmetrics"):
                of_masks[key] = lambda backend=key.split()[-1]: masks_by_torchmetrics(backend, *maps)
        rows["coco panoptic things, masks"] = {"images": len(maps[1]), **compare(of_masks, arguments.rounds)}
    names = ("numpy", "pycocotools", "torchmetrics", "faster-coco-eval")
    versions = {name: metadata.version(name) for name in names if util.find_spec(name.replace("-", "_"))}
    write("coco_evaluators", {"evaluator_versions": versions, "threads": 1, "settings": rows}, arguments.out)


if __name__ == "__main__":
    main()
