"""A comparison as text: the table of the terminal and of the page, and one sentence for each variant."""

from typing import Literal, NamedTuple

from batchformer.metrics.measures import Measure
from batchformer.report.comparison import (
    DEFAULT_PAIR,
    Comparison,
    format_difference,
    format_summary,
    measure_word,
    rows_word,
    shown_name,
    signed,
    with_unit,
)
from batchformer.report.statistics import PairedDifference, Summary

MOST_COLUMNS = 4  # variants side by side
Cell = str | Summary | PairedDifference | None


class Row(NamedTuple):
    """A line of the table; `digits` are the decimals of its numbers."""

    head: str
    cells: list[Cell]
    digits: int


class Table(NamedTuple):
    header: list[str]
    rows: list[Row]


def comparison_table(table: Comparison) -> Table:
    """Variants x targets in the primary measure; without targets measures x variants, and a difference for each.

    Of many variants, variants x measures, and the difference in the primary one.
    """
    if table.targets:
        return _by_target(table)
    return _by_variant(table) if len(table.shown) > MOST_COLUMNS else _by_measure(table)


def _by_target(table: Comparison) -> Table:
    measure, digits = table.primary, table.digits(table.primary)
    header = [with_unit(measure_word(measure), measure.unit) + _hint(measure), *table.targets, "mean"]
    rows = []
    for variant in table.shown:
        cells: list[Cell] = [table.cell(measure, variant, target) for target in (*table.targets, None)]
        rows.append(Row(variant, cells, digits))
    if len(rows) > 1:
        header.append("difference [95 % interval]")
        for row in rows:
            held = row.head == table.reference
            row.cells.append("the reference" if held else table.difference(measure, row.head))
    return Table(header, rows)


def _by_variant(table: Comparison) -> Table:
    measures = [table.primary, *(measure for measure in table.measures if measure is not table.primary)]
    same = len({measure.unit for measure in measures}) == 1
    names = [(measure.label if same else measure.title) + _hint(measure) for measure in measures]
    header = [measures[0].unit if same else "", names[0], "difference [95 % interval]", *names[1:]]
    digits = max(map(table.digits, measures))
    rows = []
    for variant in table.shown:
        first, *rest = (table.cell(measure, variant) for measure in measures)
        held = variant == table.reference
        difference = "the reference" if held else table.difference(measures[0], variant)
        rows.append(Row(variant, [first, difference, *rest], digits))
    return Table(header, rows)


def _by_measure(table: Comparison) -> Table:
    units, hints = {measure.unit for measure in table.measures}, {_hint(measure) for measure in table.measures}
    first = "measure"
    if len(units) == 1 and len(hints) == 1:
        first = with_unit(rows_word(table) or "measure", units.pop()) + hints.pop()
    others = table.others if len(table.shown) > 1 else ()
    several = "{} − {} [95 %]" if len(others) > 1 else "difference [95 % interval]"
    header = [first, *table.shown, *(several.format(variant, table.reference) for variant in others)]
    rows = []
    for measure in table.measures:
        head = measure.title + _hint(measure) if first == "measure" else measure.label
        cells: list[Cell] = [table.cell(measure, variant) for variant in table.shown]
        differences = [table.difference(measure, variant) for variant in others]
        rows.append(Row(head, [*cells, *differences], table.digits(measure)))
    return Table(header, rows)


def readings_table(table: Comparison) -> Table | None:
    """Variants x readings of the primary measure over all targets, each with its difference to that; None without any.

    Without targets the readings are rows of the comparison itself.
    """
    if not table.targets or not table.readings:
        return None
    primary, digits = table.primary, table.digits(table.primary)
    header = ["mean over the targets", primary.label]
    for reading in table.readings:
        header += [reading.label, f"− {primary.label} [95 %]"]
    rows = []
    for variant in table.shown:
        cells: list[Cell] = [table.cell(primary, variant)]
        for reading in table.readings:
            cells += [table.cell(reading, variant), table.reading_difference(reading, variant)]
        rows.append(Row(variant, cells, digits))
    return Table(header, rows)


def _hint(measure: Measure) -> str:
    """The direction of a measure, where lower is better."""
    return "" if measure.better == "higher" else " (lower is better)"


def format_table(table: Comparison) -> str:
    """The table as plain text for a terminal, and below it that of the readings, where there are any."""
    made = [comparison_table(table), readings_table(table)]
    return "\n\n".join(_as_text(each) for each in made if each is not None)


def _as_text(made: Table) -> str:
    lines = [made.header, *([row.head, *(format_cell(cell, row.digits) for cell in row.cells)] for row in made.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(made.header))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line(lines[0]), "  ".join("─" * width for width in widths), *map(line, lines[1:])])


def format_cell(cell: Cell, digits: int) -> str:
    if isinstance(cell, PairedDifference):
        return format_difference(cell, digits)
    return cell if isinstance(cell, str) else format_summary(cell, digits)


class Verdict(NamedTuple):
    """`mixed`: the variants of a comparison have different verdicts."""

    kind: Literal["helped", "hurt", "unclear", "incomplete", "mixed"]
    sentence: str


def verdict(table: Comparison) -> Verdict:
    """A sentence for each variant that is compared with the reference, one below the other."""
    found = list(verdicts(table).values())
    kinds = {each.kind for each in found}
    return Verdict(found[0].kind if len(kinds) == 1 else "mixed", "\n".join(each.sentence for each in found))


def verdicts(table: Comparison) -> dict[str, Verdict]:
    """Variant -> what its paired difference in the primary measure says: better, worse, or no clear difference.

    One measure decides, chosen beforehand: with several, a chance result would look like a gain.
    """
    if not table.others:
        only = f"Only runs of {table.reference} are here: add runs of another variant to compare."
        return {table.reference: Verdict("incomplete", only)}
    return {variant: _judged(table, variant) for variant in table.others}


def _judged(table: Comparison, variant: str) -> Verdict:
    measure, name = table.primary, shown_name(variant)
    difference = table.difference(measure, variant)
    if difference is None:
        return Verdict("incomplete", _what_is_missing(table, variant))
    mean, low, high = difference
    digits = table.digits(measure)
    against = "" if table.is_default_pair else f" against {table.reference}"
    over = f", mean of {len(table.targets)} targets" if len(table.targets) > 1 else ""
    if low is None or high is None:
        amount = " ".join(filter(None, [f"{abs(mean):.{digits}f}", measure.points, "higher" if mean > 0 else "lower"]))
        return Verdict(
            "unclear",
            f"With {name} the {measure.words} is {amount if mean else 'the same'}"
            f"{' than with ' + table.reference if against and mean else ''}, but this is one seed: no interval can be "
            "given, so it may be chance.",
        )
    amount = " ".join(filter(None, [signed(mean, digits), measure.points, "of", measure.words]))
    interval = f"95 % interval {signed(low, digits)} to {signed(high, digits)}"
    seeds = f"{len(table.paired_seeds(measure, variant))} matched seeds{over}"
    if low <= 0 <= high:
        begin = f"{name}: no clear difference" if against else "No clear difference"
        return Verdict("unclear", f"{begin}{against}: {amount}, and the {interval} ({seeds}) contains zero.")
    kind: Literal["helped", "hurt"] = "helped" if measure.gain(mean) > 0 else "hurt"
    return Verdict(kind, f"{name} {kind}{against}: {amount} ({interval}, {seeds}).")


def _what_is_missing(table: Comparison, variant: str) -> str:
    measure = table.primary
    cells = [
        [table.values.get((measure.key, each, target)) for target in table.targets or (None,)]
        for each in (table.reference, variant)
    ]
    has_reference, has_variant = (any(each) for each in cells)
    name, reference = shown_name(variant), table.reference
    the_reference = "the baseline" if reference == DEFAULT_PAIR[0] else reference
    if not has_reference and not has_variant:
        return f"No run here has a number for the {measure.words}, so there is nothing to compare."
    if not has_reference:
        return f"Only runs with {name} are here: add runs of {the_reference} to compare."
    if not has_variant:
        return f"Only runs of {the_reference} are here: add runs with {name} to compare."
    if table.targets:
        return f"No seed has a run of {the_reference} and of {name} for every target: no difference can be given."
    return "Both were run, but never with the same seed: no paired difference can be given."
