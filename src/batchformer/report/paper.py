"""The numbers of the BatchFormer paper that docs/results.md puts beside ours: the only ones typed in by hand."""

from __future__ import annotations

from dataclasses import dataclass

Row = dict[str, float]


def _row(all_: float, many: float, medium: float, few: float) -> Row:
    return {"all": all_, "many": many, "medium": medium, "few": few}


@dataclass(frozen=True)
class PaperResult:
    """One row pair of a table: without and with BatchFormer."""

    table: str
    setting: str
    baseline: Row | None
    batchformer: Row | None


MAIN = {
    "cifar100-lt-100": PaperResult(
        "Table 1",
        "CIFAR-100-LT, imbalance 100, ResNet-32, Balanced Softmax",
        _row(50.7, 68.0, 49.7, 31.9),
        _row(51.7, 68.4, 49.3, 34.3),
    ),
    "cifar100-lt-200": PaperResult(
        "Table 1",
        "CIFAR-100-LT, imbalance 200, ResNet-32, Balanced Softmax",
        _row(46.4, 70.0, 51.5, 24.3),
        _row(47.5, 70.2, 53.3, 25.5),
    ),
    "imagenet-lt-r10": PaperResult(
        "Table 2",
        "ImageNet-LT, ResNet-10, Balanced Softmax",
        _row(41.0, 52.6, 38.3, 18.0),
        _row(43.2, 52.8, 40.7, 24.9),
    ),
    "imagenet-lt-r50": PaperResult(
        "Table 2",
        "ImageNet-LT, ResNet-50, Balanced Softmax",
        _row(50.1, 61.1, 47.5, 27.6),
        _row(51.1, 61.4, 47.8, 33.6),
    ),
    "places-lt": PaperResult(
        "Table 4",
        "Places-LT, ResNet-152, BALMS (Balanced Softmax with its meta sampler)",
        _row(37.8, 41.4, 38.8, 29.1),
        _row(38.2, 39.5, 38.3, 35.7),
    ),
}


@dataclass(frozen=True)
class Ablation:
    """A table of the paper that varies one thing; `suffix` begins what our recipe names carry after the main name."""

    title: str
    suffix: str
    reference: str
    paper: dict[str, Row]


ABLATIONS = (
    Ablation(
        "Without the shared classifier",
        "single",
        "Table 10 (ImageNet-LT, ResNet-50, Balanced Softmax)",
        {
            "shared classifier": _row(50.9, 60.7, 47.7, 34.1),
            "without shared classifier": _row(42.4, 41.3, 43.3, 42.2),
        },
    ),
    Ablation(
        "Number of layers",
        "layers",
        "appendix, Table 19 (ImageNet-LT, ResNet-10, Balanced Softmax)",
        {
            "1 layer": _row(43.2, 52.8, 40.4, 25.6),
            "2 layers": _row(43.2, 52.8, 40.3, 26.0),
            "4 layers": _row(42.7, 52.1, 40.1, 25.4),
            "8 layers": _row(43.3, 53.3, 40.2, 26.1),
            "16 layers": _row(43.1, 52.9, 40.0, 26.6),
        },
    ),
    Ablation(
        "Batch size",
        "batch",
        "Table 9 (ImageNet-LT, ResNet-10, Balanced Softmax, learning rate scaled with the batch)",
        {
            "batch 16": _row(43.2, 53.8, 40.2, 23.9),
            "batch 32": _row(43.6, 53.7, 40.7, 24.9),
            "batch 64": _row(43.3, 52.9, 40.8, 25.3),
            "batch 128": _row(43.2, 52.8, 40.7, 24.9),
            "batch 256": _row(42.4, 52.2, 39.5, 25.2),
            "batch 512": _row(42.5, 52.0, 39.6, 25.8),
        },
    ),
)
