"""Unseen classes in docs/results.md and docs/zero-shot.md.

python -m benchmarks.zero_shot_section results docs/zero-shot.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchformer.errors import UserError
from batchformer.recipes import about, recipe_names
from batchformer.report.comparison import Comparison, compare_runs, format_difference, format_summary
from batchformer.report.provenance import caveats, facts
from batchformer.report.runs import Run, by_recipe, load_runs
from benchmarks._markdown import between_markers, markdown
from benchmarks.domains_section import BEGIN, END, MODULE, Side, difference, read_as
from benchmarks.paper import CITED_PAIRS
from benchmarks.studies import STUDIES


def is_zero_shot_study(recipe: str) -> bool:
    return recipe in STUDIES and about(STUDIES[recipe].recipe).group.startswith("Unseen classes")


def sides(table: Comparison) -> list[Side]:
    """The variants that were trained, in the order of their study."""
    return [Side(name, table.primary, name) for name in STUDIES[table.recipe].variants if name in table.shown]


def every_measure(table: Comparison) -> str:
    """A row for each variant: all measures of the tables, and the difference to the reference."""
    found = sides(table)
    reference = next((side for side in found if side.variant == table.reference), found[0])
    header = ["", *(measure.label for measure in table.measures), "seeds", f"difference to {reference.name}"]
    rows = []
    for side in found:
        cells = [format_summary(table.cell(measure, side.variant)) for measure in table.measures]
        held = "the reference" if side is reference else format_difference(difference(table, reference, side))
        rows.append([f"`{side.name}`", *cells, str(len(side.values(table))), held])
    return markdown(header, rows)


def with_and_without(table: Comparison) -> str:
    """The gain of the module with each method."""
    named = {side.name: side for side in sides(table)}
    header = [table.primary.title, "without", "with BatchFormer", "difference, 95 % interval", "seeds", "read as"]
    rows = []
    for name, before in named.items():
        if (after := named.get(name + MODULE)) is not None:
            gain = difference(table, before, after)
            cells = [format_summary(table.cell(side.measure, side.variant)) for side in (before, after)]
            shared = len(before.values(table).keys() & after.values(table).keys())
            rows.append([f"`{name}`", *cells, format_difference(gain), str(shared), read_as(gain, table.primary)])
    return markdown(header, rows) if rows else ""


def zero_shot_sections(recipes: Mapping[str, Sequence[Run]]) -> str:
    """The part of docs/results.md about these studies."""
    told = (
        "In percent, on the test set after the last epoch, which was chosen by nothing; `best on val` is the epoch "
        "with the best AUC on the validation set, `oracle` the best one on the test set. Trained by "
        "`python -m benchmarks.study`."
    )
    parts = ["## Unseen classes", "", told, ""]
    for recipe, runs in recipes.items():
        table = compare_runs([run.raw for run in runs])
        parts += [f"### {recipe}", ""]
        parts += [f"{about(recipe).title}.", ""] if recipe in recipe_names() else []
        parts += [every_measure(table), "", with_and_without(table), ""]
        shown = ("Settings", "Length", "Seeds", "Device", "Wall time per run")
        parts += [f"- {question}: {answer}" for question, answer in facts(runs) if question in shown]
        parts += [f"- Read with care: {text}" for text in caveats(runs)]
        parts.append("")
    header = ("where", "what", "reported")
    parts += ["### Cited for pairs, not trained here", "", markdown(header, CITED_PAIRS, right=False), ""]
    return "\n".join(parts)


def short_tables(results: Path) -> str:
    """For docs/zero-shot.md: all measures and what the module gains in each study."""
    parts = []
    for recipe, runs in by_recipe(load_runs([results])).items():
        if is_zero_shot_study(recipe):
            table = compare_runs([run.raw for run in runs])
            parts += [f"**`{recipe}`**", "", every_measure(table), "", with_and_without(table), ""]
    if not parts:
        raise UserError(f"{results} holds no study of unseen classes: there is nothing to show.")
    return "\n".join(parts).rstrip()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m benchmarks.zero_shot_section RESULTS_FOLDER docs/zero-shot.md", file=sys.stderr)
        return 2
    results, target = map(Path, arguments)
    try:
        text = target.read_text(encoding="utf-8")
        written = between_markers(text, short_tables(results), BEGIN, END, target.name)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    target.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
