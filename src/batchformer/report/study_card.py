"""The part of the page about the variants of one recipe: a table, and every seed in a picture."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from batchformer.report.comparison import format_difference
from batchformer.report.html_parts import figure, marked
from batchformer.report.measures import measure_of
from batchformer.report.paper import MAIN, STUDIES
from batchformer.report.studies import Study, held_to, missing_from
from batchformer.report.study_figure import CAPTION, study_chart
from batchformer.report.study_section import accuracy


def study_card(name: str, study: Study, names: Mapping[str, str]) -> str:
    """`names`: the ids of the sections about each recipe, to which the table leads."""
    setting = (MAIN.get(study.base) or STUDIES[study.base]).setting
    missing = missing_from(study)
    told = f"{setting}. This study is not finished: {'; '.join(missing)}." if missing else f"{setting}."
    drawn = study_chart(f"{name}-seeds", study)
    picture = ""
    if drawn is not None:
        chart, words = drawn
        picture = figure("Every seed", chart.svg("Every seed of every variant", words), CAPTION)
    return (
        f'<section class="recipe study" id="{name}"><h2>Study: {escape(study.base)}</h2><p>{marked(told)}</p>'
        f'<div class="card scroll">{_table(study, names)}</div>{_cautions(study)}{picture}</section>'
    )


def _cautions(study: Study) -> str:
    """What the differences to another variant mean, and what besides it differs."""
    return f"<p>{marked(STUDIES[study.base].held_to_words)}</p>" if held_to(study) else ""


def _table(study: Study, names: Mapping[str, str]) -> str:
    others = {(variant.recipe, variant.method): other for variant, other in held_to(study)}
    lines = []
    for variant in study.variants:
        other = others.get((variant.recipe, variant.method))
        cells = [accuracy(variant, "all"), str(len(variant.runs))]
        cells += ["the baseline" if variant is study.reference else format_difference(study.difference(variant))]
        if others:
            held = "" if other is None else f"{format_difference(study.difference(variant, other))} to {other.name}"
            cells.append(held)
        words = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        link = f'<a href="#{names[variant.recipe]}">{escape(variant.name or variant.method)}</a>'
        lines.append(f'<tr><th scope="row">{link}</th>{words}</tr>')
    heads = ["variant", "mean ± deviation", "seeds", "difference to the baseline"]
    heads += ["difference to another"] if others else []
    header = "".join(f'<th scope="col">{head}</th>' for head in heads)
    judged = measure_of(run.metrics for variant in study.variants for run in variant.runs).name.capitalize()
    return (
        f"<table><caption>{judged} in percent after the last epoch; differences over matched seeds, "
        f"with their 95 % interval.</caption><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )
