"""Scenes with objects and detections of them, generated or from real annotations, and pycocotools as their judge."""

import contextlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

#: the unpacked sample of COCO, for those who have it
REAL = os.environ.get("BATCHFORMER_COCO128", "")
needs_real_data = pytest.mark.skipif(not REAL, reason="BATCHFORMER_COCO128 does not name the unpacked coco128")


def real_annotations(name: str) -> dict:
    return json.loads((Path(REAL) / "annotations" / name).read_text())


def generated_annotations(
    rng: np.random.Generator, images: int = 12, classes: int = 5, whole_pixels: bool = False
) -> dict:
    """Objects of every size, a sixth of them crowds; some images without any."""
    annotations = []
    for image in range(images):
        for _ in range(rng.integers(0, 9)):
            size = rng.choice([12, 50, 200]) * rng.uniform(0.5, 1.5, 2)
            box = np.concatenate([rng.uniform(0, 300, 2), size])
            box = np.round(box) if whole_pixels else box
            area = box[2] * box[3] * rng.uniform(0.4, 1)  # as of a mask, smaller than its box
            entry = {"category_id": int(rng.integers(classes)) * 3 + 1, "iscrowd": int(rng.random() < 1 / 6)}
            annotations.append(
                {"id": len(annotations) + 1, "image_id": 100 - image, "bbox": box.tolist(), "area": area, **entry}
            )
    shapes = [{"id": 100 - image, "width": 600, "height": 600} for image in range(images)]
    categories = [{"id": c * 3 + 1, "name": f"class {c}"} for c in range(classes)]
    return {"images": shapes, "annotations": annotations, "categories": categories}


def detections(truth: dict, rng: np.random.Generator, per_image: int, whole_pixels: bool = False) -> list[dict]:
    """Objects moved by little and by much, some with another category, some found nowhere; many scores are equal."""
    categories = [category["id"] for category in truth["categories"]]
    made = []
    for image in truth["images"]:
        objects = [entry for entry in truth["annotations"] if entry["image_id"] == image["id"]]
        for _ in range(rng.integers(per_image + 1)):
            if objects and rng.random() < 0.7:
                entry = objects[rng.integers(len(objects))]
                box = np.array(entry["bbox"])
                box[:2] += rng.normal(size=2) * box[2:] * rng.choice([0, 0.02, 0.1, 0.3])
                box[2:] *= np.exp(rng.normal(size=2) * rng.choice([0, 0.05, 0.2]))
                category = entry["category_id"] if rng.random() < 0.8 else int(rng.choice(categories))
            else:
                box = np.concatenate([rng.uniform(0, 300, 2), rng.uniform(1, 300, 2)])
                category = int(rng.choice(categories))
            box = np.round(box) if whole_pixels else box.astype(np.float32).astype(float)
            score = float(np.float32(rng.integers(1, 20) / 20 if rng.random() < 0.5 else rng.random()))
            made.append({"image_id": image["id"], "category_id": category, "bbox": box.tolist(), "score": score})
    return made


def as_tensors(truth: dict, found: list[dict]) -> tuple[list[dict], list[dict]]:
    """What `CocoAP.update` takes: corners, labels from 0 in the order of the category ids."""
    label = {c: i for i, c in enumerate(sorted(category["id"] for category in truth["categories"]))}
    predictions, targets = [], []
    for image in truth["images"]:
        of_image = [entry for entry in found if entry["image_id"] == image["id"]]
        objects = [entry for entry in truth["annotations"] if entry["image_id"] == image["id"]]
        predictions.append(
            {
                "boxes": _corners(of_image),
                "scores": torch.tensor([entry["score"] for entry in of_image], dtype=torch.float64),
                "labels": torch.tensor([label[entry["category_id"]] for entry in of_image], dtype=torch.int64),
            }
        )
        target = {
            "boxes": _corners(objects),
            "labels": torch.tensor([label[entry["category_id"]] for entry in objects], dtype=torch.int64),
            "area": torch.tensor([entry["area"] for entry in objects], dtype=torch.float64),
            "iscrowd": torch.tensor([entry["iscrowd"] for entry in objects], dtype=torch.bool),
        }
        targets.append({"image_id": torch.tensor([image["id"]]), "truth": target})
    return predictions, targets


def judged(truth: dict, found: list[dict]) -> np.ndarray:
    """The twelve numbers of pycocotools, nan for its -1."""
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    with contextlib.redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        reference.dataset = json.loads(json.dumps(truth))
        reference.createIndex()
        judge = evaluation.COCOeval(reference, reference.loadRes(json.loads(json.dumps(found))), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return np.where(judge.stats == -1, np.nan, judge.stats)


def _corners(entries: list[dict]) -> torch.Tensor:
    boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float64).reshape(-1, 4)
    return torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
