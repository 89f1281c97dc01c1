"""Segmentations and imperfect predictions of them."""

from pathlib import Path

import numpy as np
from PIL import Image

from .coco_scenes import REAL, real_annotations


def generated_truth(rng, height=48, width=64, classes=6, segments=9):
    """Rectangles over each other, void between them, a quarter of them crowds; ids as large as in COCO's files."""
    drawn = np.zeros((height, width), dtype=np.int64)
    infos = {}
    for _ in range(rng.integers(0, segments + 1)):
        top, left = rng.integers(height), rng.integers(width)
        identity = int(rng.integers(1, 2**24))
        drawn[top : top + rng.integers(4, 30), left : left + rng.integers(4, 40)] = identity
        infos[identity] = (int(rng.integers(classes)), bool(rng.random() < 0.25))
    return drawn, {k: info for k, info in infos.items() if (drawn == k).any()}


def real_truth(split):
    """Maps and segments of the real sample, and for each of its 133 classes whether it is a thing."""
    listing = real_annotations(f"panoptic_{split}.json")
    categories = sorted(listing["categories"], key=lambda category: category["id"])
    label = {category["id"]: place for place, category in enumerate(categories)}
    truths = []
    for entry in listing["annotations"]:
        png = np.asarray(Image.open(Path(REAL) / f"panoptic_{split}" / entry["file_name"]).convert("RGB"))
        drawn = png.astype(np.int64) @ [1, 256, 65536]
        segments = {info["id"]: (label[info["category_id"]], bool(info["iscrowd"])) for info in entry["segments_info"]}
        truths.append((drawn, segments))
    return truths, [bool(category["isthing"]) for category in categories]


def imperfect(truth, rng, classes):
    """Everything moved by some pixels; segments lost, merged, renamed and grown; rectangles from nowhere."""
    drawn, infos = truth
    shift = rng.integers(-4, 5, 2) * rng.integers(0, 2)
    moved = np.roll(drawn, shift, (0, 1))
    made, labels = np.zeros_like(drawn), {}
    for place, (identity, (label, _)) in enumerate(infos.items(), 1):
        fate = rng.random()
        if fate < 0.1:
            continue
        target = int(rng.integers(1, place + 1)) if fate < 0.2 else place  # into another one, or by itself
        made[moved == identity] = target
        labels.setdefault(target, int(rng.integers(classes)) if fate > 0.9 else label)
    for extra in range(rng.integers(0, 4)):
        top, left = rng.integers(drawn.shape[0]), rng.integers(drawn.shape[1])
        here = (slice(top, top + drawn.shape[0] // 4), slice(left, left + drawn.shape[1] // 4))
        made[here] = 1000 + extra
        near = infos.get(int(drawn[top, left]), (int(rng.integers(classes)), False))[0]
        labels[1000 + extra] = near  # often the label of what lies there, a crowd perhaps
    return made, {k: (label, False) for k, label in labels.items() if (made == k).any()}


def as_dict(side, rng=None, flags=False):
    drawn, infos = side
    listed = [
        {"id": k, "label_id": label} | ({"iscrowd": int(crowd)} if flags else {}) for k, (label, crowd) in infos.items()
    ]
    for info in listed if rng is not None else []:
        info["score"] = float(rng.integers(1, 30) / 30)
    return {"segmentation": drawn, "segments_info": listed}
