"""Which classes fail: the entry `failures` of result files as text for a terminal, as CSV, and on the page.

What the entry holds: see `analysis.failures`. Tables list the worst classes first.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from batchformer.files import csv_text
from batchformer.metrics.measures import Measure, measures_of, with_current_names
from batchformer.report.charts import Axis, Chart, short_name
from batchformer.report.comparison import Comparison, format_summary, shown_name
from batchformer.report.html_parts import figure, pictures_of, plain_table
from batchformer.report.own_sections import value_grid
from batchformer.report.runs import Run
from batchformer.report.statistics import mean_of_known, summarise

SHOWN = 10  # classes and confused pairs; the others are collapsed, in a terminal in a file
KEYS = ("balanced_accuracy", "macro_f1", "ece", "ece_scaled")
_LONGEST = 28  # letters of a class name in a terminal
_PERCENT = Axis(0, 100, [(k, str(k)) for k in range(0, 101, 20)])
_HALVES = (
    "The temperature is not evaluated on the images it was fitted on: each half of the test images is scaled with that "
    "of the other half. The saved one is fitted on all of them."
)
_OTHER = "The temperature was fitted on the set {set}, not on the test images."

Columns = Mapping[str, Sequence[float | None]]


def worst_first(columns: Columns, worst_by: str) -> list[int]:
    """Numbers of the classes that have something to evaluate: the lowest value first, of equal ones the larger."""
    judged, size = columns[worst_by], next(iter(columns.values()))
    there = [k for k, value in enumerate(judged) if value is not None and size[k]]
    return sorted(there, key=lambda k: (judged[k], -(size[k] or 0), k))


def failures_text(result: Mapping[str, Any], where: str) -> str:
    """For a terminal: the worst classes, what they are taken for, and the numbers over all of them; "" without any.

    `where` are the others.
    """
    found = result.get("failures")
    if not found:
        return ""
    names, columns = _names(result, found), found["columns"]
    order = worst_first(columns, found["worst_by"])
    shown = [[short_name(names[k], _LONGEST), *(_cell(v[k]) for v in columns.values())] for k in order[:SHOWN]]
    lines = [["class", *columns], *shown]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    told = [f"Which classes fail, lowest {found['worst_by']} first, in %:"]
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        told.append("  " + "  ".join([first.ljust(widths[0]), *cells]))
    if len(order) > SHOWN:
        told.append(f"  and {len(order) - SHOWN} more: {where}")
    if pairs := found.get("confusions"):
        sizes = next(iter(columns.values()))
        words = [f"{names[t]} predicted as {names[s]} ({n} of {sizes[t]:.0f})" for t, s, n in pairs[:3]]
        told.append(f"  most frequent mistakes: {', '.join(words)}")
    if scores := _scores(result):
        told.append(f"  {'; '.join(scores)}")
    return "\n".join(told)


def _scores(result: Mapping[str, Any]) -> list[str]:
    measures: dict[str, Measure] = {each.key: each for each in measures_of(with_current_names(result))}
    values = {key: result["metrics"].get(key) for key in KEYS}
    texts = {k: f"{v:.1f} {measures[k].unit}".strip() for k, v in values.items() if v is not None}
    scores = [f"{measures[k].label} {text}" for k, text in texts.items() if k != "ece_scaled"]
    if "ece_scaled" in texts:
        temperature = result["failures"]["calibration"]["temperature"]
        scores[-1] += f" ({texts['ece_scaled']} with temperature {temperature:.2f}: predict --calibrated)"
    return scores


def failures_csv(result: Mapping[str, Any]) -> str:
    """All classes that have something to evaluate, the worst first; "" without any."""
    found = result.get("failures")
    if not found:
        return ""
    names, columns = _names(result, found), found["columns"]
    order = worst_first(columns, found["worst_by"])
    rows = [[names[k], *("" if v[k] is None else str(v[k]) for v in columns.values())] for k in order]
    return csv_text(["class", *columns], rows)


def _names(result: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    names = [str(name) for name in result.get("class_names", ())]
    return names or [f"class {k}" for k in range(len(next(iter(found["columns"].values()))))]


# ---- the page


def failures_section(name: str, runs: Sequence[Run], table: Comparison) -> str:
    """The classes that fail, for each variant; "" where no run has looked for them."""
    found = {v: mine for v in table.variants if (mine := [run for run in runs if run.variant == v and run.failures])}
    if not found:
        return ""
    cells = {v: cell for v in found if (cell := table.cell(table.primary, v)) is not None}
    best = max(cells, key=lambda v: table.primary.gain(cells[v].mean), default=next(iter(found)))
    parts = []
    for k, (variant, mine) in enumerate(found.items()):
        content = _of_variant(f"{name}-failures{k}", mine)
        if len(found) > 1:
            state = " open" if variant == best else ""
            content = f"<details{state}><summary>{escape(shown_name(variant))}</summary>{content}</details>"
        parts.append(content)
    return f"<h3>Which classes fail</h3>{''.join(parts)}"


def _of_variant(name: str, runs: Sequence[Run]) -> str:
    """Numbers are means over the runs; confusions, calibration and pictures are those of the first run."""
    first, found = runs[0], runs[0].failures
    names = first.class_names or _names({}, found)
    columns = {key: _mean_column(runs, key) for key in found["columns"]}
    whole = {key: all(v is None or v == round(v) for v in column) for key, column in columns.items()}
    rows = [
        [names[k], *(_cell(column[k], whole[key]) for key, column in columns.items())]
        for k in worst_first(columns, found["worst_by"])
    ]
    whose = f" Mean of {len(runs)} runs." if len(runs) > 1 else ""
    caption = f"Lowest {found['worst_by']} first, in %.{whose} {found.get('note', '')}".strip()
    cards = [_collapsed("card worst", ["class", *columns], rows, caption, "classes")]
    only = f"{first.name}: " if len(runs) > 1 else ""
    if pairs := found.get("confusions"):
        sizes = next(iter(found["columns"].values()))
        listed = [[names[t], names[s], f"{n} of {sizes[t]:.0f}"] for t, s, n in pairs]
        caption = f"{only}Most frequent confusions."
        cards.append(_collapsed("card worst", ["true class", "predicted as", "images"], listed, caption, "pairs"))
    if matrix := found.get("matrix"):
        shares = [[100 * n / sum(row) if sum(row) else None for n in row] for row in matrix]
        grid = {"rows": names, "columns": names, "values": shares, "marked": [[k, k] for k in range(len(names))]}
        told = f"{only}Percentage of the images of each class (row) that were predicted as each class (column)."
        cards.append(
            f'<figure class="own"><h4>Confusion matrix</h4>{value_grid(grid)}'
            f"<figcaption>{escape(told)}</figcaption></figure>"
        )
    if trusted := found.get("calibration"):
        cards.append(_reliability(name, runs, trusted))
    drawn = pictures_of([first], found["pictures"], whole_width=True) if found.get("pictures") else ""
    return f'{_totals(runs)}<div class="grid">{"".join(cards)}</div>{drawn}'


def _totals(runs: Sequence[Run]) -> str:
    totals = []
    for key in KEYS:
        values = [value for run in runs if (value := run.metrics.get(key)) is not None]
        label, unit = next(((m.label, m.unit) for m in runs[0].measures if m.key == key), (key, ""))
        totals += [f"{escape(label)} <b>{format_summary(summarise(values), 1)} {escape(unit)}</b>"] if values else []
    return f'<p class="totals">{" · ".join(totals)}</p>' if totals else ""


def _collapsed(kind: str, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, what: str) -> str:
    """A table whose first rows are shown and the others collapsed."""
    more = ""
    if len(rows) > SHOWN:
        more = (
            f"<details><summary>{len(rows) - SHOWN} more {what}</summary>{plain_table(header, rows[SHOWN:])}</details>"
        )
    return f'<div class="{kind}">{plain_table(header, rows[:SHOWN], caption)}{more}</div>'


def _mean_column(runs: Sequence[Run], key: str) -> list[float | None]:
    columns = [run.failures["columns"][key] for run in runs if key in run.failures["columns"]]
    return [mean_of_known(values) for values in zip(*columns, strict=False)]


def _cell(value: float | None, whole: bool = False) -> str:
    whole = whole or isinstance(value, int)
    return "–" if value is None else f"{value:,.0f}" if whole else f"{value:.1f}"


def _reliability(name: str, runs: Sequence[Run], trusted: Mapping[str, Any]) -> str:
    """Accuracy against confidence in bins, beside the line on which both are equal."""
    x, y = (Axis(0, 100, _PERCENT.ticks, label) for label in ("predicted probability, %", "accuracy, %"))
    chart = Chart(name, x, y)
    chart.line([(0, 0), (100, 100)], "others")
    for key, style in (("bins", "v0"), ("bins_scaled", "v1")):
        points = [(confidence, accuracy) for confidence, accuracy, _ in trusted.get(key) or ()]
        images = [f"{count:.0f} images" for *_, count in trusted.get(key) or ()]
        chart.line(points, style)
        chart.dots(points, style, images)
    legend = {"others": "perfectly calibrated", "v0": "as trained", "v1": "with temperature"}
    told = f"{runs[0].name}. Below the dotted line it is overconfident. ECE {trusted['ece']:.1f} %"
    if trusted.get("temperature") is not None:
        told += f", {trusted['ece_scaled']:.1f} % with logits divided by {trusted['temperature']:.2f}. "
        on = str(trusted.get("fitted_on") or "halves")
        told += _HALVES if on == "halves" else _OTHER.format(set=on)
        told += " To use it: predict --calibrated, export --calibrated."
    else:
        told += ". There are too few images to fit a temperature."
    svg = chart.svg("Reliability diagram", f"ECE {trusted['ece']:.1f} %.")
    return figure("Are the probabilities calibrated?", svg, told, legend)
