"""The results in README.md: `python -m benchmarks.readme_table results README.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batchformer.errors import UserError
from batchformer.report.comparison import DEFAULT_PAIR, compare_runs, format_difference, format_summary
from batchformer.report.provenance import caveats
from batchformer.report.runs import by_recipe, load_runs
from batchformer.report.tables import verdict
from benchmarks._markdown import between_markers, one_digit
from benchmarks.paper import MAIN, STUDIES
from benchmarks.studies import WANTED_SEEDS, Study, Variant, find_studies, held_to, missing_from
from benchmarks.study_section import CAPTION, picture_name

BEGIN, END = "<!-- results -->", "<!-- /results -->"
HEADER = ("recipe", "accuracy, %", "paper: without", "paper: with", "ours: without", "ours: with", "ours: difference")
RULE = ("---", "---", "---:", "---:", "---:", "---:", "---:")
SHOWN_STUDIES = ("deit-ti-cifar100-100", "vit-cifar100-32", "mix-vit-cifar100-32", "mix-resnet56-cifar100")
STUDY_HEADER = ("variant", "seeds", "accuracy, %", "difference to the baseline", "held to", "difference to it")
STUDY_RULE = ("---", "---:", "---:", "---:", "---", "---:")


def readme_table(results: Path) -> str:
    """The row pairs of the paper that were run with and without the method, and one sentence about each."""
    recipes = by_recipe(load_runs([results]))
    lines: list[list[str]] = []
    sentences: list[str] = []
    warnings: dict[str, list[str]] = {}
    for recipe, paper in MAIN.items():
        runs = recipes.get(recipe, [])
        if {run.variant for run in runs} != set(DEFAULT_PAIR):
            continue
        table = compare_runs([run.raw for run in runs])
        for measure in table.measures:
            theirs = [one_digit((side or {}).get(measure.key)) for side in (paper.baseline, paper.batchformer)]
            ours = [format_summary(table.cell(measure, variant)) for variant in DEFAULT_PAIR]
            difference = format_difference(table.difference(measure, DEFAULT_PAIR[1]))
            name = f"`{recipe}`" if measure is table.primary else ""
            lines.append([name, measure.label, *theirs, *ours, difference])
        sentences.append(f"- `{recipe}` ({paper.setting}). {verdict(table).sentence}")
        for text in caveats(runs):
            warnings.setdefault(text, []).append(f"`{recipe}`")
    if not lines:
        raise UserError(f"{results} holds no recipe of the paper with both methods: there is nothing to show.")
    sentences += [f"- Read with care {', '.join(named)}: {text}" for text, named in warnings.items()]
    studies = [_study_part(study) for study in find_studies(recipes) if study.base in SHOWN_STUDIES]
    return "\n\n".join([_table(HEADER, RULE, *lines), "\n".join(sentences), *studies])


def _study_part(study: Study) -> str:
    """The variants of a study, each held to its baseline and, where it is compared with another one, to that."""
    others = {variant.recipe: other for variant, other in held_to(study)}
    rows = [
        [
            f"`{variant.name or variant.method}`",
            str(len(variant.runs)),
            variant.summary(study.primary),
            "the baseline" if variant is study.reference else format_difference(study.difference(variant)),
            *(_held(study, variant, others.get(variant.recipe)) if others else ()),
        ]
        for variant in study.variants
    ]
    columns = len(rows[0])
    setting = (MAIN.get(study.base) or STUDIES[study.base]).setting
    parts = [f"`{study.base}`: {setting}.", _table(STUDY_HEADER[:columns], STUDY_RULE[:columns], *rows)]
    if others:
        parts.append(STUDIES[study.base].held_to_words)
    if missing := missing_from(study):
        parts.append(f"This study is not finished: {'; '.join(missing)}.")
    if all(len(variant.runs) >= WANTED_SEEDS for variant in study.variants):
        parts.append(f"![Every seed of every variant](docs/{picture_name(study)})")
        parts.append(CAPTION)
    return "\n\n".join(parts)


def _held(study: Study, variant: Variant, other: Variant | None) -> list[str]:
    return [f"`{other.name}`", format_difference(study.difference(variant, other))] if other else ["", ""]


def _table(*rows: Sequence[str]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


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
