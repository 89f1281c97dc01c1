"""Studies of unseen domains, unseen classes and long tails in the docs: every method with and without the module.

SWAD is the averaged weights of the runs of `erm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from batchformer.errors import UserError
from batchformer.metrics.measures import Measure
from batchformer.recipes import about, recipe_names
from batchformer.report.comparison import Comparison, compare_runs, format_difference, format_summary, signed
from batchformer.report.provenance import caveats, facts
from batchformer.report.runs import Run, by_recipe, load_runs
from benchmarks._gain import HEADER, Gain
from benchmarks._markdown import markdown, with_results
from benchmarks.paper import CITED_OF_DOMAINS, CITED_PAIRS, DOMAIN_ROWS, MAIN
from benchmarks.studies import STUDIES

MODULE = "+batchformer"
SWAD, OF_SWAD = "accuracy_swad", "erm"


class Family(NamedTuple):
    """What docs/results.md says about the studies of a family."""

    title: str
    told: str
    cited_title: str
    cited: Sequence[Sequence[str]]

    def has(self, recipe: str, runs: Sequence[Run]) -> bool:
        """Of domains: several methods trained for targets; a row of a paper has a section of its own."""
        if self is CLASSES:
            return recipe in STUDIES and about(STUDIES[recipe].recipe).group.startswith(self.title)
        return recipe not in MAIN and all(run.target for run in runs) and len({run.variant for run in runs}) > 1


DOMAINS = Family(
    "Unseen domains",
    "Accuracy on the target after the last step, which was chosen by nothing; a column for each target, their mean "
    "last. A seed's mean over the targets is one value of the intervals. `swad`: the averaged weights of the runs "
    "of `erm`. Trained by `python -m benchmarks.study`.",
    "Cited, not trained here",
    CITED_OF_DOMAINS,
)
CLASSES = Family(
    "Unseen classes",
    "In percent, on the test set after the last epoch, which was chosen by nothing; `best on val` is the epoch "
    "with the best AUC on the validation set, `oracle` the best one on the test set. Trained by "
    "`python -m benchmarks.study`.",
    "Cited for pairs, not trained here",
    CITED_PAIRS,
)


class Side(NamedTuple):
    """A measure of a variant, and what the tables call it."""

    name: str
    measure: Measure
    variant: str


def sides(table: Comparison) -> list[Side]:
    """The variants in the order of their study, SWAD's readings last."""
    known = list(STUDIES[table.recipe].variants) if table.recipe in STUDIES else []
    ordered = sorted(table.shown, key=lambda each: known.index(each) if each in known else len(known))
    found = [Side(variant, table.primary, variant) for variant in ordered]
    for reading in (measure for measure in table.measures if measure.key == SWAD and not measure.primary):
        names = [side.variant for side in found if side.variant in (OF_SWAD, OF_SWAD + MODULE)]
        found += [Side(name.replace(OF_SWAD, "swad", 1), reading, name) for name in names]
    return found


def gain(table: Comparison, before: Side, after: Side) -> Gain:
    """Each seed's value is the mean over its targets."""
    return Gain(before.measure, *(table.by_seed(side.measure, side.variant) for side in (before, after)))


def pairs(table: Comparison) -> Iterator[tuple[Side, Side]]:
    """Without and with the module, the released code's ways of using it too (`erm+batchformer-frozen`)."""
    named = {side.name: side for side in sides(table)}
    for name, side in named.items():
        method, module, _ = name.partition(MODULE)
        if module and method in named:
            yield named[method], side


def every_variant(table: Comparison) -> str:
    """A row for each: its targets and their mean, or where there are none all measures; and the difference."""
    every, columns = sides(table), [*table.targets, "mean"] if table.targets else [m.label for m in table.measures]
    reference = next((side for side in every if side.variant == table.reference), every[0])
    header = [table.primary.title if table.targets else "", *columns, "seeds", f"difference to {reference.name}"]
    rows = []
    for side in every:
        where = [(side.measure, target) for target in (*table.targets, None)]
        cells = where if table.targets else [(measure, None) for measure in table.measures]
        means = [format_summary(table.cell(measure, side.variant, target)) for measure, target in cells]
        held = "the reference" if side is reference else format_difference(gain(table, reference, side).difference)
        rows.append([f"`{side.name}`", *means, str(len(table.by_seed(side.measure, side.variant))), held])
    return markdown(header, rows)


def with_and_without(table: Comparison) -> str:
    """The gain of the module with each method, over all targets, and beside it the paper's."""
    papers = DOMAIN_ROWS.get(table.recipe, {})
    header = ["method" if table.targets else table.primary.title, *HEADER, *(["paper's gain"] if papers else [])]
    rows = []
    for before, after in pairs(table):
        found = gain(table, before, after)
        name = before.name + after.name.removeprefix(before.name + MODULE).replace("-", ", ", 1)
        row = [name if table.targets else f"`{name}`", *found.cells, found.reading]
        rows.append([*row, _paper(papers.get(before.name))] if papers else row)
    return markdown(header, rows) if rows else ""


def _paper(recipe: str | None) -> str:
    row = MAIN.get(recipe or "")
    if row is None or row.baseline is None or row.batchformer is None:
        return "–"
    key = next(iter(row.baseline))
    return f"{signed(row.batchformer[key] - row.baseline[key], 1)} (`{recipe}`)"


def family_section(family: Family, recipes: Mapping[str, Sequence[Run]]) -> str:
    """The part of docs/results.md about all these studies."""
    parts = [f"## {family.title}", "", family.told, ""]
    for recipe, runs in recipes.items():
        table = _compared(recipe, runs)
        parts += [f"### {recipe}", ""]
        parts += [f"{about(recipe).title}.", ""] if recipe in recipe_names() else []
        parts += [every_variant(table), ""]
        parts += [paired, ""] if (paired := with_and_without(table)) else []
        shown = ("Settings", "Length", "Seeds", "Device", "Wall time per run")
        parts += [f"- {question}: {answer}" for question, answer in facts(runs) if question in shown]
        parts += [f"- Read with care: {text}" for text in caveats(runs)]
        parts.append("")
    header = ("where", "what", "reported")
    parts += [f"### {family.cited_title}", "", markdown(header, family.cited, right=False), ""]
    return "\n".join(parts)


def _compared(recipe: str, runs: Sequence[Run]) -> Comparison:
    """With the targets in the order of the study."""
    order = list(STUDIES[recipe].targets) if recipe in STUDIES else []
    place = {target: number for number, target in enumerate(order)}
    return compare_runs([run.raw for run in sorted(runs, key=lambda run: place.get(run.target or "", len(order)))])


def short_tables(family: Family, results: Path) -> str:
    """For the page of the family: what the module gains in each study, and all measures where there are no targets."""
    parts = []
    for recipe, runs in by_recipe(load_runs([results])).items():
        if family.has(recipe, runs):
            table = _compared(recipe, runs)
            whole = [] if table.targets else [every_variant(table), ""]
            targets = f" ({', '.join(table.targets)})" if table.targets else ""
            parts += [f"**`{recipe}`**{targets}", "", *whole, with_and_without(table), ""]
    if not parts:
        raise UserError(f"{results} holds no study of {family.title.lower()}: there is nothing to show.")
    return "\n".join(parts).rstrip()


_LONG_TAILED = {  # the methods of docs/long-tail.md -> their results, without and with the module
    "softmax": ("on-softmax-baseline", "on-softmax-batchformer"),
    "softmax, then tau-norm": ("on-softmax-tau-norm", "on-softmax-tau-norm-batchformer"),
    "softmax, then LWS": ("on-softmax-lws", "on-softmax-lws-batchformer"),
    "softmax, then cRT": ("on-softmax-crt", "on-softmax-crt-batchformer"),
    "softmax, then BALMS": ("on-softmax-balms", "on-softmax-balms-batchformer"),
    "softmax, then Balanced Softmax": ("on-softmax-decoupled", "on-softmax-decoupled-batchformer"),
    "Balanced Softmax, in one stage": ("", ""),
}


def long_tailed_table(results: Path) -> str:
    """Every method with all its measures, and what the module adds to the accuracy over all images."""
    trained = {
        recipe: compare_runs([run.raw for run in runs]) for recipe, runs in by_recipe(load_runs([results])).items()
    }
    rows: list[list[str]] = []
    labels: list[str] = []
    for method, suffixes in _LONG_TAILED.items():
        plain, module = (trained.get("-".join(filter(None, ("imagenette-lt", suffix)))) for suffix in suffixes)
        if plain is None or module is None:
            continue
        labels = [measure.label for measure in plain.measures]
        cells = [format_summary(plain.cell(measure, "baseline")) for measure in plain.measures]
        added = Gain(
            plain.primary, plain.by_seed(plain.primary, "baseline"), module.by_seed(plain.primary, "batchformer")
        )
        rows.append([method, *cells, *added.cells[1:], added.reading])
    if not rows:
        raise UserError(f"{results} holds no study of long tails: there is nothing to show.")
    return markdown(["accuracy, %", *labels, f"{labels[0]}, {HEADER[1]}", *HEADER[2:]], rows)


def pages(root: Path) -> dict[Path, str]:
    """The pages of the families with their tables."""
    docs, results = root / "docs", root / "results"
    tables = {"domains.md": short_tables(DOMAINS, results), "zero-shot.md": short_tables(CLASSES, results)}
    tables["long-tail.md"] = long_tailed_table(results)
    return {docs / name: with_results(docs / name, table) for name, table in tables.items()}
