"""Detections in the format COCO's evaluation server and pycocotools take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchformer.metrics.box_processes import as_array


def coco_results(
    predictions: Iterable[Mapping[str, Any]], targets: Iterable[Mapping[str, Any]], category_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """A dict for each box, with the id of its image, the official id of its category, and x, y, width, height.

    `predictions` and `targets` are what `CocoAP.update` takes; `category_ids` is that of `DetectionData`. What comes
    back can be written with `json.dump` and read with pycocotools' `loadRes`.
    """
    results = []
    for prediction, target in zip(predictions, targets, strict=True):
        boxes = as_array(prediction["boxes"], float).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]
        columns = (
            boxes.tolist(),
            as_array(prediction["labels"], int).tolist(),
            as_array(prediction["scores"], float).tolist(),
        )
        results += [
            {"image_id": int(target["image_id"]), "category_id": category_ids[label], "bbox": box, "score": score}
            for box, label, score in zip(*columns, strict=True)
        ]
    return results
