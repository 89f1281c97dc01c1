"""V2's Tables 1 to 5, 11 and 12: COCO's average precision of boxes, and panoptic quality, in percent."""

from __future__ import annotations

from dataclasses import dataclass

Row = dict[str, float]  # by the keys of measures in result files


@dataclass(frozen=True)
class PaperResult:
    """Two rows of a table of the papers: without and with BatchFormer."""

    table: str
    setting: str
    baseline: Row | None
    batchformer: Row | None


_BOXES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
_SEGMENTS = ("pq", "sq", "rq", "pq_things", "sq_things", "rq_things", "pq_stuff", "sq_stuff", "rq_stuff", "ap")


def _boxes(*values: float) -> Row:
    return dict(zip(_BOXES, values, strict=True))


def _segments(*values: float) -> Row:
    return dict(zip(_SEGMENTS, values, strict=True))


_DEFORMABLE = _boxes(43.8, 62.6, 47.7, 26.4, 47.1, 58.0)


def _at(layers: str, batchformer: Row, table: str = "V2, Table 3", and_: str = "") -> PaperResult:
    """Deformable DETR with the module elsewhere; the paper counts layers from 1. The baseline is that of Table 1."""
    setting = f"COCO, Deformable DETR, ResNet-50, 50 epochs, the module after {layers}{and_}"
    return PaperResult(table, setting, _DEFORMABLE, batchformer)


DETECTION = {
    "detr-coco": PaperResult(
        "V2, Table 1",
        "COCO, DETR, ResNet-50, 50 epochs",
        _boxes(34.8, 55.6, 35.8, 14.0, 37.2, 54.6),
        _boxes(36.9, 57.9, 38.5, 15.6, 40.0, 55.9),
    ),
    "conditional-detr-coco": PaperResult(
        "V2, Table 1",
        "COCO, Conditional DETR, ResNet-50, 50 epochs",
        _boxes(40.9, 61.8, 43.3, 20.8, 44.6, 59.2),
        _boxes(42.3, 63.2, 45.1, 21.9, 46.0, 60.7),
    ),
    "smca-detr-coco": PaperResult(
        "V2, Table 1",
        "COCO, SMCA (single scale), ResNet-50, 50 epochs",
        {"ap": 41.0, "ap_small": 21.9, "ap_medium": 44.3, "ap_large": 59.1},
        _boxes(42.3, 63.5, 45.4, 22.5, 45.7, 60.1),
    ),
    "deformable-detr-coco": PaperResult(
        "V2, Table 1",
        "COCO, Deformable DETR, ResNet-50, 50 epochs",
        _DEFORMABLE,
        _boxes(45.5, 64.3, 49.8, 28.3, 48.6, 59.4),
    ),
    "deformable-detr-refine-coco": PaperResult(
        "V2, Table 1",
        "COCO, Deformable DETR with box refinement, ResNet-50, 50 epochs",
        _boxes(45.4, 64.7, 49.0, 26.8, 48.3, 61.7),
        _boxes(46.7, 65.6, 50.5, 28.8, 49.7, 61.8),
    ),
    "deformable-detr-r101-coco": PaperResult(
        "V2, Table 1",
        "COCO, Deformable DETR, ResNet-101, 50 epochs",
        _boxes(44.5, 63.7, 48.3, 25.8, 48.6, 59.6),
        _boxes(46.0, 65.2, 50.5, 28.4, 49.8, 60.7),
    ),
    "deformable-detr-coco-l6-batch16": _at(
        "layer 6", _boxes(44.7, 63.5, 48.9, 27.3, 48.1, 59.1), "V2, Table 2", and_=", batch 16"
    ),
    "deformable-detr-coco-l6-batch32": _at(
        "layer 6", _boxes(44.9, 63.8, 48.8, 27.7, 48.3, 60.0), "V2, Table 2", and_=", batch 32"
    ),
    "deformable-detr-coco-l1-2": _at("layers 1 to 2", {"ap": 45.2}),
    "deformable-detr-coco-l1-3": _at("layers 1 to 3", {"ap": 44.9}),
    "deformable-detr-coco-l3-6": _at(
        "layers 3 to 6", _boxes(45.4, 64.3, 49.5, 28.6, 48.5, 59.9), "V2, Tables 3 and 4", and_=", not shared"
    ),
    "deformable-detr-coco-l4-6": _at("layers 4 to 6", {"ap": 44.9}),
    "deformable-detr-coco-l5-6": _at("layers 5 to 6", {"ap": 45.0}),
    "deformable-detr-coco-l2": _at("layer 2", {"ap": 45.3}),
    "deformable-detr-coco-l3": _at("layer 3", {"ap": 45.2}),
    "deformable-detr-coco-l4": _at("layer 4", {"ap": 45.2}),
    "deformable-detr-coco-l5": _at("layer 5", {"ap": 45.2}),
    "deformable-detr-coco-l6": _at(
        "layer 6", _boxes(45.1, 64.1, 49.3, 28.5, 48.4, 59.4), "V2, Tables 2 and 3", and_=", batch 24"
    ),
    "deformable-detr-coco-l3-6-shared": _at(
        "layers 3 to 6", _boxes(44.9, 63.6, 49.1, 27.7, 47.9, 59.6), "V2, Table 4", and_=", one module for all"
    ),
    "detr-coco-panoptic": PaperResult(
        "V2, Table 5",
        "COCO panoptic, DETR with its mask head, ResNet-50, 300 + 25 epochs",
        _segments(43.4, 79.3, 53.8, 48.2, 79.8, 59.5, 36.3, 78.5, 45.3, 31.1),
        _segments(45.1, 80.3, 55.3, 50.5, 81.1, 61.5, 37.1, 79.1, 46.0, 33.4),
    ),
    "deformable-detr-coco-single-stream": _at(
        "layer 1", _boxes(12.3, 33.9, 6.3, 5.3, 21.1, 14.6), "V2, Table 11", and_=", without two streams"
    ),
    "deformable-detr-coco-batch-inference": _at(
        "layer 1",
        {**_boxes(45.6, 64.5, 49.8, 28.3, 48.8, 59.7), "ap_batch": 45.6},
        "V2, Table 12",
        and_=", evaluated without and with it",
    ),
}
