"""The four results in README.md: `python -m benchmarks.readme_table results README.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchformer.errors import UserError
from batchformer.report.comparison import format_difference, signed
from batchformer.report.runs import by_recipe, load_runs
from batchformer.report.statistics import PairedDifference
from benchmarks._markdown import between_markers, markdown
from benchmarks.paper import MAIN
from benchmarks.studies import Study, Variant

BEGIN, END = "<!-- results -->", "<!-- /results -->"
HEADER = ("accuracy, %", "without", "with", "difference, 95 % interval", "seeds", "paper", "read as")


class Shown(NamedTuple):
    """A row: the two sides it compares, each by recipe and variant."""

    title: str
    without: tuple[str, str]
    with_it: tuple[str, str]


ROWS = (
    Shown(
        "BatchFormer, CIFAR-100-LT (imbalance 100), ResNet-32, Balanced Softmax",
        ("cifar100-lt-100", "baseline"),
        ("cifar100-lt-100", "batchformer"),
    ),
    Shown(
        "BatchFormerV2 after all blocks of a small ViT, CIFAR-100, equal epochs",
        ("vit-cifar100-32-baseline", "baseline"),
        ("vit-cifar100-32-published", "batchformer"),
    ),
    Shown(
        "the same, equal GPU time",
        ("vit-cifar100-32-long", "baseline"),
        ("vit-cifar100-32-published", "batchformer"),
    ),
    Shown(
        "TransMix instead of CutMix, the same ViT",
        ("mix-vit-cifar100-32-cutmix", "baseline"),
        ("mix-vit-cifar100-32-transmix", "baseline"),
    ),
)


def readme_table(results: Path) -> str:
    """The rows of `ROWS` that were trained, from their result files."""
    variants = {
        (recipe, method): Variant("", recipe, method, [run for run in runs if run.variant == method])
        for recipe, runs in by_recipe(load_runs([results])).items()
        for method in {run.variant for run in runs}
    }
    sides = [(shown.title, variants.get(shown.without), variants.get(shown.with_it)) for shown in ROWS]
    lines = [_row(title, before, after) for title, before, after in sides if before and after]
    if not lines:
        raise UserError(f"{results} holds both sides of no row of the README: there is nothing to show.")
    return markdown(HEADER, lines)


def _row(title: str, before: Variant, after: Variant) -> list[str]:
    study = Study("", [before, after], before)
    difference = study.difference(after)
    seeds = len(before.by_seed(study.primary).keys() & after.by_seed(study.primary).keys())
    ours = [before.summary(study.primary), after.summary(study.primary), format_difference(difference), str(seeds)]
    return [title, *ours, _paper(before, after), _read(difference)]


def _paper(before: Variant, after: Variant) -> str:
    """What the paper gained, where the two sides are the two sides of one of its rows."""
    row = MAIN.get(after.recipe) if before.recipe == after.recipe else None
    if row is None or row.baseline is None or row.batchformer is None:
        return "–"
    key = after.runs[0].primary.key
    return signed(row.batchformer[key] - row.baseline[key], 1)


def _read(difference: PairedDifference | None) -> str:
    if difference is None:
        return "no seed in common"
    if difference.low is None or difference.high is None:
        return "one seed: may be chance"
    if difference.low <= 0 <= difference.high:
        return "no clear difference"
    return "higher" if difference.mean > 0 else "lower"


def with_table(text: str, table: str, name: str = "README.md") -> str:
    return between_markers(text, table, BEGIN, END, name)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m benchmarks.readme_table RESULTS_FOLDER README.md", file=sys.stderr)
        return 2
    results, target = map(Path, arguments)
    try:
        if not target.is_file():
            raise UserError(f"there is no file {target}.")
        text = with_table(target.read_text(encoding="utf-8"), readme_table(results), target.name)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
