"""From the files to the numbers: what a data module and `CocoAP` make of them is what pycocotools makes of them."""

import json

import numpy as np
import pytest
import torch

from batchformer.data import CocoDetection
from batchformer.data.sets import write_miniature
from batchformer.metrics.coco_ap import AP_NAMES, CocoAP

from .coco_scenes import REAL, judged, needs_real_data


def coco_results(predictions, targets, category_ids):
    """A dict for each box, as pycocotools' `loadRes` reads them; what `CocoAP.update` takes."""
    results = []
    for prediction, target in zip(predictions, targets, strict=True):
        boxes = np.array(prediction["boxes"], dtype=float).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]
        columns = boxes.tolist(), prediction["labels"].tolist(), np.array(prediction["scores"], dtype=float).tolist()
        results += [
            {"image_id": int(target["image_id"]), "category_id": category_ids[label], "bbox": box, "score": score}
            for box, label, score in zip(*columns, strict=True)
        ]
    return results


def compare(root, labels, image_size):
    data = CocoDetection(str(root), labels=labels, image_size=image_size, workers=0)
    data.setup()
    rng = np.random.default_rng(0)
    possible = [label for label, identity in enumerate(data.category_ids) if identity >= 0]
    metric, results = CocoAP(data.num_classes), []
    for batch in data.val_dataloader():
        found = []
        for label in batch["labels"]:
            truth = label["truth"]
            pick = rng.integers(len(truth["labels"]), size=20) if len(truth["labels"]) else np.zeros(0, int)
            boxes = truth["boxes"][pick] + rng.normal(size=(len(pick), 4)) * rng.choice([0.5, 3, 10], (len(pick), 1))
            boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
            guessed = np.where(rng.random(len(pick)) < 0.2, rng.choice(possible, len(pick)), truth["labels"][pick])
            made = {"boxes": torch.from_numpy(boxes).float(), "scores": torch.rand(len(pick))}
            found.append(made | {"labels": torch.from_numpy(guessed)})
        metric.update(found, batch["labels"])
        results += coco_results(found, batch["labels"], data.category_ids)
    values = metric.compute()
    truth = json.loads((root / "annotations" / "instances_val2017.json").read_text())
    ours = np.array([values[name].item() for name in AP_NAMES])
    assert 0.05 < ours[0] < 0.95
    np.testing.assert_allclose(ours, judged(truth, json.loads(json.dumps(results))), atol=1e-6, rtol=0)


@pytest.mark.parametrize("labels", ["contiguous", "official"])
def test_a_miniature_gives_the_numbers_of_pycocotools(labels, tmp_path):
    compare(write_miniature("coco", tmp_path / "coco"), labels, 48)


@needs_real_data
@pytest.mark.parametrize("labels", ["contiguous", "official"])
def test_real_images_give_the_numbers_of_pycocotools(labels):
    from pathlib import Path

    compare(Path(REAL), labels, 64)
