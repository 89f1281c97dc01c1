"""The numbers of the papers beside ours in docs/results.md (V2: BatchFormerV2): from the recipes, and what has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchformer.recipes import about, recipe_names

Row = Mapping[str, float]  # by the keys of measures in result files


@dataclass(frozen=True)
class PaperResult:
    """Two rows of a table of the papers: without and with BatchFormer."""

    table: str
    setting: str
    baseline: Row | None
    batchformer: Row | None


def _row(accuracy: float, many: float, medium: float, few: float) -> Row:
    return {"accuracy": accuracy, "many": many, "medium": medium, "few": few}


def _main_results() -> dict[str, PaperResult]:
    """The rows that recipes train, as their files say; those of TransMix have no baseline of their own."""
    found = {}
    for name in recipe_names():
        row = about(name).paper
        if row is not None and not row.table.startswith("TransMix"):
            found[name] = PaperResult(row.table, row.row, row.numbers.get("baseline"), row.numbers.get("batchformer"))
    return found


MAIN = _main_results()


# studies of unseen domains: the recipe of the paper's row for each of their methods
DOMAIN_ROWS = {
    "pacs-128": {name: f"pacs-r18-{name}" for name in ("erm", "coral", "irm", "vrex", "mixstyle", "swad")},
    "pacs-128-adapt": {"mdd": "visda-r101-mdd"},
}
# rows of other papers and code bases, which no recipe trains: where, what, and what they report
CITED_OF_DOMAINS = (
    ("TLL, its README", "PACS, ResNet-50, average", "ERM 86.4, MixStyle 87.4, IRM 86.9, V-REx 87.0, CORAL 86.4"),
    ("DomainBed", "PACS, ResNet-50, average, BatchNorm frozen", "ERM 85.5, CORAL 86.2"),
    ("SWAD (Cha et al., 2021)", "PACS, ResNet-50, average", "88.1"),
    ("TLL, its README", "VisDA-2017, ResNet-101, MDD", "mean of the classes 82.0, overall 79.8"),
)
# rows of Table 5 that the paper cites for CGE as published; those of its own run of CGE are in the recipes
CITED_PAIRS = (
    ("CGE (Naeem et al., 2021)", "MIT-States", "AUC 6.5, HM 21.4, S 32.8, U 28.0, s 30.1, o 34.7"),
    ("CGE (Naeem et al., 2021)", "UT-Zappos50K", "AUC 33.5, HM 60.5, S 64.5, U 71.5, s 48.7, o 76.2"),
    ("CGE (Naeem et al., 2021)", "C-GQA", "AUC 3.6, HM 14.5, S 31.4, U 14.0, s 15.2, o 30.4"),
)


@dataclass(frozen=True)
class Ablation:
    """A table of the paper that varies one thing; `suffix` begins what our recipe names carry after the main name."""

    title: str
    suffix: str
    reference: str
    paper: dict[str, Row]


def _row_of(recipe: str) -> Row:
    """What the paper reports for a recipe, with BatchFormer."""
    row = MAIN[recipe].batchformer
    assert row is not None
    return row


ABLATIONS = (
    Ablation(
        "Without the shared classifier",
        "single",
        "Table 10 (ImageNet-LT, ResNet-50, Balanced Softmax)",
        {
            "shared classifier": _row(50.9, 60.7, 47.7, 34.1),  # 51.1 in Table 2, of the same setting
            "without shared classifier": _row_of("imagenet-lt-r50-single"),
        },
    ),
    Ablation(
        "Number of layers",
        "layers",
        "appendix, Table 9 (arXiv: 19; ImageNet-LT, ResNet-10, Balanced Softmax)",
        {
            "1 layer": _row(43.2, 52.8, 40.4, 25.6),  # Medium 40.7 and Few 24.9 in Table 2, of the same setting
            **{f"{layers} layers": _row_of(f"imagenet-lt-r10-layers{layers}") for layers in (2, 4, 8, 16)},
        },
    ),
    Ablation(
        "Batch size",
        "batch",
        "Table 9 (ImageNet-LT, ResNet-10, Balanced Softmax, learning rate scaled with the batch)",
        {
            f"batch {size}": _row_of("imagenet-lt-r10" if size == 128 else f"imagenet-lt-r10-batch{size}")
            for size in (16, 32, 64, 128, 256, 512)
        },
    ),
)

# Rows of BatchFormer's tables that are cited there and not trained here, by table and method.
CITED: Mapping[str, Mapping[str, Row]] = {
    "Table 2, ImageNet-LT, ResNet-10": {"OLTR": _row(35.6, 43.2, 35.1, 18.5), "LFME": _row(38.8, 47.0, 37.9, 19.2)},
    "Table 3, iNaturalist 2018": {"BBN": _row(66.3, 49.4, 70.8, 65.3), "cRT": _row(65.2, 69.0, 66.0, 63.2)},
    "Table 4, Places-LT, ResNet-152": {
        "OLTR": _row(35.9, 44.7, 37.0, 25.3),
        "tau-normalised": _row(37.9, 37.8, 40.7, 31.8),
    },
}
