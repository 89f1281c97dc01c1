"""Unseen domains in docs/results.md and docs/domains.md.

    python -m benchmarks.domains_section results docs/domains.md

Every method with and without the module, target by target; SWAD is the averaged weights of the runs of `erm`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from batchformer.errors import UserError
from batchformer.metrics.measures import Measure
from batchformer.recipes import about, recipe_names
from batchformer.report.comparison import Comparison, compare_runs, format_difference, format_summary, signed
from batchformer.report.provenance import caveats, facts
from batchformer.report.runs import Run, by_recipe, load_runs
from batchformer.report.statistics import PairedDifference, paired_difference
from benchmarks._markdown import between_markers, markdown
from benchmarks.paper import CITED_OF_DOMAINS, DOMAIN_ROWS, MAIN
from benchmarks.studies import STUDIES

BEGIN, END = "<!-- results -->", "<!-- /results -->"
MODULE = "+batchformer"
SWAD, OF_SWAD = "accuracy_swad", "erm"
READ_AS = {-1: "worse", 0: "no clear difference", 1: "better"}


class Side(NamedTuple):
    """A measure of a variant, and what the tables call it."""

    name: str
    measure: Measure
    variant: str

    def values(self, table: Comparison, target: str | None = None) -> dict[int, float]:
        return table.by_seed(self.measure, self.variant, target)


def is_domain_study(recipe: str, runs: Sequence[Run]) -> bool:
    """Whether several methods were trained for targets; a row of a paper has a section of its own."""
    return recipe not in MAIN and all(run.target for run in runs) and len({run.variant for run in runs}) > 1


def sides(table: Comparison) -> list[Side]:
    """The variants in the order of their recipe, SWAD's readings last."""
    known = list(STUDIES[table.recipe].variants) if table.recipe in STUDIES else []
    ordered = sorted(table.shown, key=lambda each: known.index(each) if each in known else len(known))
    found = [Side(variant, table.primary, variant) for variant in ordered]
    for reading in (measure for measure in table.measures if measure.key == SWAD and not measure.primary):
        names = [side.variant for side in found if side.variant in (OF_SWAD, OF_SWAD + MODULE)]
        found += [Side(name.replace(OF_SWAD, "swad", 1), reading, name) for name in names]
    return found


def difference(table: Comparison, before: Side, after: Side) -> PairedDifference | None:
    """Over matched seeds, each the mean over its targets."""
    first, second = before.values(table), after.values(table)
    seeds = [seed for seed in first if seed in second]
    return paired_difference([first[s] for s in seeds], [second[s] for s in seeds]) if seeds else None


def pairs(table: Comparison) -> Iterator[tuple[Side, Side]]:
    """Without and with the module, the released code's ways of using it too (`erm+batchformer-frozen`)."""
    named = {side.name: side for side in sides(table)}
    for name, side in named.items():
        method, module, _ = name.partition(MODULE)
        if module and method in named:
            yield named[method], side


def by_target(table: Comparison) -> str:
    every = sides(table)
    reference = next((side for side in every if side.variant == table.reference), every[0])
    header = [table.primary.title, *table.targets, "mean", "seeds", f"difference to {reference.name}"]
    rows = []
    for side in every:
        cells = [format_summary(table.cell(side.measure, side.variant, each)) for each in (*table.targets, None)]
        held = "the reference" if side is reference else format_difference(difference(table, reference, side))
        rows.append([f"`{side.name}`", *cells, str(len(side.values(table))), held])
    return markdown(header, rows)


def with_and_without(table: Comparison) -> str:
    """The gain of the module with each method, over all targets, and beside it the paper's."""
    papers = DOMAIN_ROWS.get(table.recipe, {})
    header = ["method", "without", "with BatchFormer", "difference, 95 % interval", "seeds", "read as"]
    header += ["paper's gain"] if papers else []
    rows = []
    for before, after in pairs(table):
        gain = difference(table, before, after)
        shared = len(before.values(table).keys() & after.values(table).keys())
        cells = [format_summary(table.cell(side.measure, side.variant)) for side in (before, after)]
        name = before.name + after.name.removeprefix(before.name + MODULE).replace("-", ", ", 1)
        row = [name, *cells, format_difference(gain), str(shared), read_as(gain, table.primary)]
        rows.append([*row, _paper(papers.get(before.name))] if papers else row)
    return markdown(header, rows) if rows else ""


def read_as(gain: PairedDifference | None, measure: Measure) -> str:
    """Better or worse where the interval leaves out zero."""
    if gain is None:
        return "no seed in common"
    if gain.low is None or gain.high is None:
        return "one seed: may be chance"
    side = (gain.low > 0) - (gain.high < 0)
    return READ_AS[int(measure.gain(side))]


def _paper(recipe: str | None) -> str:
    row = MAIN.get(recipe or "")
    if row is None or row.baseline is None or row.batchformer is None:
        return "–"
    key = next(iter(row.baseline))
    return f"{signed(row.batchformer[key] - row.baseline[key], 1)} (`{recipe}`)"


def domains_sections(recipes: Mapping[str, Sequence[Run]]) -> str:
    """The part of docs/results.md about all these studies."""
    told = (
        "Accuracy on the target after the last step, which was chosen by nothing; a column for each target, their mean "
        "last. A seed's mean over the targets is one value of the intervals. `swad`: the averaged weights of the runs "
        "of `erm`. Trained by `python -m benchmarks.study`."
    )
    parts = ["## Unseen domains", "", told, ""]
    for recipe, runs in recipes.items():
        table = _compared(recipe, runs)
        parts += [f"### {recipe}", ""]
        parts += [f"{about(recipe).title}.", ""] if recipe in recipe_names() else []
        parts += [by_target(table), ""]
        parts += [paired, ""] if (paired := with_and_without(table)) else []
        shown = ("Settings", "Length", "Seeds", "Device", "Wall time per run")
        parts += [f"- {question}: {answer}" for question, answer in facts(runs) if question in shown]
        parts += [f"- Read with care: {text}" for text in caveats(runs)]
        parts.append("")
    parts += [
        "### Cited, not trained here",
        "",
        markdown(("where", "what", "reported"), CITED_OF_DOMAINS, right=False),
        "",
    ]
    return "\n".join(parts)


def _compared(recipe: str, runs: Sequence[Run]) -> Comparison:
    """With the targets in the order of the study."""
    order = list(STUDIES[recipe].targets) if recipe in STUDIES else []
    place = {target: number for number, target in enumerate(order)}
    return compare_runs([run.raw for run in sorted(runs, key=lambda run: place.get(run.target or "", len(order)))])


def short_tables(results: Path) -> str:
    """For docs/domains.md: what the module gains in each study; all of it is in docs/results.md."""
    parts = []
    for recipe, runs in by_recipe(load_runs([results])).items():
        if is_domain_study(recipe, runs):
            table = _compared(recipe, runs)
            parts += [f"**`{recipe}`** ({', '.join(table.targets)})", "", with_and_without(table), ""]
    if not parts:
        raise UserError(f"{results} holds no study of domains: there is nothing to show.")
    return "\n".join(parts).rstrip()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m benchmarks.domains_section RESULTS_FOLDER docs/domains.md", file=sys.stderr)
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
