"""A task's own sections of the page: text, table, lines, points, a grid of values, pictures of the run."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from batchformer.report.charts import variant_styles
from batchformer.report.comparison import shown_name
from batchformer.report.figures import lines_chart, points_chart
from batchformer.report.html_parts import figure, legend_of, marked, pictures_of, plain_table
from batchformer.report.runs import Run

_MOST_CELLS = 4000  # a larger grid says nothing that an eye could read


def own_section(name: str, run: Run, section: Mapping[str, Any]) -> str:
    """The section of one run."""
    text = _paragraphs(section)
    table, series, points = (section.get(part) or {} for part in ("table", "series", "points"))
    rows = [["–" if cell is None else str(cell) for cell in row] for row in table.get("rows") or []]
    text += plain_table([str(head) for head in table.get("header") or []], rows) if rows else ""
    text += value_grid(section["grid"]) if section.get("grid") else ""
    lines = {str(line): values for line, values in (series.get("lines") or {}).items()}
    drawn = lines_chart(name, section["title"], series.get("x") or [], lines, *_labels(series)) if lines else None
    styles = variant_styles(list(lines)) if drawn and len(lines) > 1 else {}
    legend = legend_of({style: line for line, style in styles.items()}, drawn or "")
    pictures = legend + (drawn or "")
    if groups := {str(group): places for group, places in (points.get("groups") or {}).items()}:
        drawn = points_chart(f"{name}-points", section["title"], groups, *_labels(points)) or ""
        pictures += legend_of({style: group for group, style in variant_styles(list(groups)).items()}, drawn) + drawn
    sheets = pictures_of([run], section["pictures"], whole_width=True) if section.get("pictures") else ""
    wide = " wide" if sheets else ""  # the words on a sheet are not read at half of the width
    pictures += sheets
    return f'<figure class="own{wide}"><h4>{escape(run.name)}</h4>{text}{pictures}</figure>'


def series_together(name: str, title: str, runs: Sequence[Run]) -> str:
    """One chart for all runs, where the section sets `together`: a line for each variant, mean of its runs.

    Beside its name the primary measure of these runs.
    """
    found: dict[str, list[tuple[Run, Mapping[str, Any]]]] = {}
    for run in runs:
        for section in run.sections:
            if section["title"] == title and (section.get("series") or {}).get("together"):
                found.setdefault(run.variant, []).append((run, section))
    if not found:
        return ""
    shared, lines = next(iter(found.values()))[0][1], {}
    for variant, drawn in found.items():
        values = [line for _, section in drawn for line in section["series"]["lines"].values()]
        lines[_label(variant, [run for run, _ in drawn])] = [_mean(column) for column in zip(*values, strict=True)]
    series = shared["series"]
    chart = lines_chart(name, title, series.get("x") or [], lines, *_labels(series))
    legend = {style: line for line, style in variant_styles(list(lines)).items()} if chart else {}
    return figure("All variants", chart or "", str(shared.get("text") or ""), legend)


def _label(variant: str, runs: Sequence[Run]) -> str:
    measure = runs[0].primary
    value = _mean([run.metrics.get(measure.key) for run in runs])
    amount = "" if value is None else f", {measure.label} {value:.1f} {measure.unit}".rstrip()
    return f"{shown_name(variant)}{amount}{f', mean of {len(runs)} runs' if len(runs) > 1 else ''}"


def _mean(values: Sequence[float | None]) -> float | None:
    """None where a run has no value: a mean over other runs than before would be a step in the line."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _labels(series: Mapping[str, Any]) -> tuple[str, str]:
    return str(series.get("xlabel") or ""), str(series.get("ylabel") or "")


def _paragraphs(section: Mapping[str, Any]) -> str:
    parts = str(section.get("text") or "").split("\n\n")
    return "".join(f"<p>{marked(part)}</p>" for part in parts if part.strip())


def value_grid(grid: Mapping[str, Any]) -> str:
    """A table of numbers from 0 to 100, coloured by them; rows and columns without any are left out."""
    values = grid["values"]
    rows = [r for r, row in enumerate(values) if any(value is not None for value in row)]
    columns = [c for c in range(len(grid["columns"])) if any(values[r][c] is not None for r in rows)]
    if len(rows) * len(columns) > _MOST_CELLS:
        return f'<p class="muted">{len(rows)} x {len(columns)} are too many to be shown.</p>'
    marks = {(row, column) for row, column in grid.get("marked") or ()}
    head = "".join(f'<th scope="col">{escape(str(grid["columns"][c]))}</th>' for c in columns)
    lines = []
    for r in rows:
        cells = "".join(_cell(values[r][c], (r, c) in marks) for c in columns)
        lines.append(f'<tr><th scope="row">{escape(str(grid["rows"][r]))}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="values"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(lines)}'
        f"</tbody></table></div>"
    )


def _cell(value: float | None, is_marked: bool) -> str:
    if value is None:
        return "<td></td>"
    mark = " marked" if is_marked else ""
    return f'<td class="value{mark}" style="--share: {value:.0f}%">{value:.0f}</td>'
