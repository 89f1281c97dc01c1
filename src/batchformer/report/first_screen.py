"""The first screen of a recipe, the same for every family: verdict, table, and the one picture that matters.

A task says which picture that is (`main_picture`), one of
- {"bars": [keys of measures]}: a group of bars for each, one bar for each variant;
- {"targets": true}: the same of the primary measure, a group for each target;
- {"curve": key of a measure}: over the epochs;
- {"section": title}: lines of a section of its own that is drawn for all runs together.
Files of tasks that say nothing show what their measures suggest.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

from batchformer.metrics.measures import Measure
from batchformer.report.charts import STYLES, Axis, Chart, linear_axis, variant_styles, with_names
from batchformer.report.comparison import (
    Comparison,
    format_interval,
    format_summary,
    measure_word,
    shown_name,
    signed,
    with_unit,
)
from batchformer.report.figures import curve_chart, difference_chart, seeds_chart
from batchformer.report.html_parts import figure, marked, plain_table
from batchformer.report.own_sections import series_together
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference
from batchformer.report.tables import Cell, Table, comparison_table, readings_table, verdicts

VERDICT_WORDS = {"helped": "It helped", "hurt": "It hurt", "unclear": "Undecided", "incomplete": "Incomplete"}
_MOST_NUMBERS = 12  # bars that have their number above them
_MOST_VERDICTS = 2  # variants with a card each; of more there is one line, and the sentences are collapsed
_LETTER, _ACROSS = 7.6, 370  # width of a letter and of a chart's plot, in its own units
_LONGEST_TITLE = 46


class FirstScreen(NamedTuple):
    """HTML, and what of it the sections below need not show again: the key of a curve, the title of a section."""

    html: str
    curve: str = ""
    section: str = ""


def first_screen(name: str, runs: Sequence[Run], table: Comparison) -> FirstScreen:
    picture = _main_picture(name, runs, table)
    return picture._replace(html=_verdicts(table) + _table(name, runs, table, picture.html))


def verdict_line(table: Comparison) -> tuple[str, str]:
    """(kind, one line) for an index: the verdict, or of several variants how many of each kind; alone, the result."""
    if len(table.shown) == 1 and (found := table.cell(table.primary, *table.shown)):
        return "incomplete", _result(table, found)
    judged = verdicts(table)
    if len(judged) == 1:
        return next((each.kind, each.sentence) for each in judged.values())
    kinds = {kind: [v for v, each in judged.items() if each.kind == kind] for kind in VERDICT_WORDS}
    words = {"helped": "better", "hurt": "worse", "unclear": "undecided", "incomplete": "incomplete"}
    told = [f"{words[kind]}: {', '.join(map(shown_name, some))}" for kind, some in kinds.items() if some]
    clear = [kind for kind in ("helped", "hurt") if kinds[kind]]
    return clear[0] if len(clear) == 1 else "unclear", f"Against {table.reference}, {'; '.join(told)}."


def _result(table: Comparison, found: Any) -> str:
    measure, (variant,) = table.primary, table.shown
    amount = with_unit(format_summary(found, table.digits(measure)), measure.unit).replace(",", "")
    return f"{shown_name(variant)}: {measure.words} {amount}."


def _main_picture(name: str, runs: Sequence[Run], table: Comparison) -> FirstScreen:
    """The declared picture; where it cannot be drawn of these runs, the usual one."""
    if len(table.shown) > STYLES:  # lines and bars of so many look alike
        return FirstScreen(_every_seed(name, table))
    asked = next((run.main_picture for run in runs if run.main_picture), {})
    for wanted in (asked, _usual(table), {"curve": table.primary.key}):
        if wanted.get("section") and (drawn := series_together(f"{name}-main", wanted["section"], runs)):
            return FirstScreen(
                drawn.replace("<h4>All variants</h4>", f"<h4>{escape(wanted['section'])}</h4>"),
                section=wanted["section"],
            )
        if wanted.get("targets") and len(table.targets) > 1:
            return FirstScreen(_bars(name, table, [(t, table.primary, t) for t in table.targets], "on each target"))
        keys = wanted.get("bars") or ()
        if groups := [(m.label, m, None) for key in keys for m in table.measures if m.key == key]:
            return FirstScreen(_bars(name, table, groups, ""))
        if wanted.get("curve"):
            measure = next((m for m in table.measures if m.key == wanted["curve"]), None)
            if measure is not None and (drawn := curve_figure(name, runs, table, measure)):
                return FirstScreen(drawn, curve=measure.key)
    return FirstScreen("")


def _usual(table: Comparison) -> dict[str, Any]:
    if len(table.targets) > 1:
        return {"targets": True}
    primary = table.primary
    alike = [m.key for m in table.measures if (m.unit, m.better, m.reading_of) == (primary.unit, primary.better, "")]
    return {"bars": alike[:6]} if len(alike) > 2 else {"curve": primary.key}


def _bars(name: str, table: Comparison, groups: Sequence[tuple[str, Measure, str | None]], where: str) -> str:
    """Means over the seeds, from zero; thin lines reach from the smallest to the largest seed."""
    measure = groups[0][1]
    styles, digits = variant_styles(table.variants), table.digits(measure)
    shown = [v for v in table.variants if any(table.cell(m, v, target) for _, m, target in groups)]
    cells = {(v, k): cell for v in shown for k, (_, m, t) in enumerate(groups) if (cell := table.cell(m, v, t))}
    if not cells:
        return ""
    seeds = {(v, k): list(table.by_seed(groups[k][1], v, groups[k][2]).values()) for v, k in cells}
    labels, word = [label for label, *_ in groups], measure_word(measure)
    y = linear_axis(
        [value for of in seeds.values() for value in of],
        with_unit(word if where else "", measure.unit).strip(", "),
        include_zero=True,
        within=measure.bounds,
    )
    x = with_names(Axis(0, len(groups), ()), 0.5, labels)
    fits = _LETTER * max(map(len, labels)) < _ACROSS / len(groups)
    chart = Chart(f"{name}-main", replace(x, slanted=not fits), y)
    wide = 0.8 / len(shown)
    for (variant, k), cell in cells.items():
        left = k + 0.1 + wide * shown.index(variant)
        tip = f"{groups[k][0]}, {shown_name(variant)}: {format_summary(cell, digits)} {measure.unit}".rstrip()
        chart.bar(left, left + 0.92 * wide, cell.mean, styles[variant], tip)
        middle, of = left + 0.46 * wide, seeds[variant, k]
        if len(of) > 1:
            chart.segment((middle, min(of)), (middle, max(of)), "whisker")
        if len(cells) <= _MOST_NUMBERS:
            chart.number((middle, max(of)), f"{cell.mean:.1f}")
    told = "Mean of the seeds; line: smallest to largest seed." if len(table.seeds) > 1 else ""
    told += " Lower is better." if measure.better == "lower" else ""
    spoken = "; ".join(f"{groups[k][0]} {v} {cell.mean:.{digits}f}" for (v, k), cell in cells.items())
    together = ", ".join(labels)
    title = f"{word[:1].upper()}{word[1:]} {where}" if where or len(together) > _LONGEST_TITLE else together
    return figure(title, chart.svg(title, spoken), told.strip(), legend(table))


def curve_figure(name: str, runs: Sequence[Run], table: Comparison, measure: Measure) -> str:
    """A measure over the epochs; empty where no run has a history of it."""
    label = with_unit(measure_word(measure), measure.unit)
    drawn = curve_chart(f"{name}-measure", runs, table.variants, measure.key, label, measure)
    if drawn is None:
        return ""
    told = "Line: mean of the seeds; band: smallest to largest seed." if len(table.seeds) > 1 else ""
    told += " A seed is the mean over its targets." if table.targets else ""
    told += " The steep start is cut off." if drawn.start_left_out else ""
    told += " Lower is better." if measure.better == "lower" else ""
    return figure(f"{measure.words[0].upper()}{measure.words[1:]}", drawn.svg, told.strip(), legend(table))


def _verdicts(table: Comparison) -> str:
    if len(table.shown) == 1 and (found := table.cell(table.primary, *table.shown)):
        how = ""
        if table.is_default_pair:
            how = marked(f"to compare, run `batchformer compare {table.recipe}`, with and without BatchFormer.")
            how = f'<br><span class="muted">Only this variant was run; {how}</span>'
        sentence = escape(_result(table, found))
        return f'<p class="card verdict incomplete"><strong>Result</strong>{sentence}{how}</p>'
    cards = []
    if len(table.others) > _MOST_VERDICTS:
        kind, line = verdict_line(table)
        sentences = "".join(f"<li>{escape(each.sentence)}</li>" for each in verdicts(table).values())
        word = f"{len(table.others)} variants"
        each = f"<details><summary>Each of them</summary><ul>{sentences}</ul></details>"
        return f'<div class="card verdict {kind}"><strong>{word}</strong>{escape(line)}{each}</div>'
    for variant, judged in verdicts(table).items():
        word = VERDICT_WORDS[judged.kind]
        word = word if len(table.others) < 2 else f"{shown_name(variant)}: {word.removeprefix('It ')}"
        cards.append(
            f'<p class="card verdict {judged.kind}"><strong>{escape(word)}</strong>{escape(judged.sentence)}</p>'
        )
    return "".join(cards)


def _table(name: str, runs: Sequence[Run], table: Comparison, main_picture: str) -> str:
    made = comparison_table(table)
    measure = table.primary
    judged = f"{measure.words[0].upper()}{measure.words[1:]}"
    caption = with_unit(judged, measure.unit)
    if len(table.seeds) > 1 or len(table.shown) > 1:
        caption += ": mean ± standard deviation over seeds"
    if len(table.shown) > 1:
        caption += ", and the difference between matched seeds with its 95 % interval"
        caption += f" (in {measure.points})" if measure.points != measure.unit else ""
    caption += "."
    if table.targets:
        caption += " Mean and interval are taken over the means of all targets, seed by seed."
    if len(table.others) > 1:
        caption += " The intervals are not corrected for the number of variants."
    content = _content(made)
    is_wide = len(made.header) > 4
    numbers = f'<table class="comparison"><caption>{escape(caption)}</caption>{content}'
    if is_wide:  # scrolls on a phone, and its caption does not
        numbers = f'<div class="scroll"><table class="comparison">{content}</div>'
        numbers = f'<p class="caption">{escape(caption)}</p>{numbers}'
    wide = " wide" if is_wide else ""
    whole, more = f'<div class="card{wide}">{numbers}{_per_run(runs, table)}</div>', _readings(table)
    drawn = difference_chart(f"{name}-difference", table)
    if drawn is None:
        return f'<div class="grid first">{whole}{main_picture}{more}</div>' if main_picture else whole + more
    helps = "the method helps" if table.is_default_pair else f"a variant is better than {table.reference}"
    side = "Right" if measure.gain(1.0) > 0 else "Left"
    told = f"Dot: mean over matched seeds; line: 95 % interval. {side} of zero: {helps}."
    told += arrows(drawn.svg)
    notes = ", ".join(f"{each.label}: {each.note}" for each in table.measures if each.note and not table.targets)
    told += f" {notes}." if notes else ""
    one = len(table.others) == 1
    minus = f", {shown_name(table.others[0])} minus {table.reference}" if one else f" to {table.reference}"
    seeds = _every_seed(name, table) if len(table.shown) <= STYLES else ""  # else shown already
    tall = drawn.tall and is_wide and bool(main_picture and seeds)
    picture = figure(f"Difference{minus}", drawn.svg, told, {} if one else legend(table), tall)
    return f'<div class="grid first">{whole}{main_picture}{picture}{seeds}{more}</div>'


def _content(made: Table) -> str:
    heads = [shown_name(head.split(" [95 %")[0]) for head in made.header]  # the caption explains the interval
    header = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(shown_name(row.head))}</th>'
        f"{''.join(html_cell(cell, row.digits) for cell in row.cells)}</tr>"
        for row in made.rows
    )
    return f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _readings(table: Comparison) -> str:
    made = readings_table(table)
    if made is None:
        return ""
    told = f"The same runs evaluated with other weights than {table.primary.words} uses, and the difference."
    told += "".join(f" {each.label}: {each.words}." for each in table.readings)
    told += "".join(f" {each.label}: {each.note}." for each in table.readings if each.note)
    readings = f'<div class="scroll"><table class="comparison">{_content(made)}</div>'
    return f'<div class="card wide"><p class="caption">{escape(told)}</p>{readings}</div>'


def _every_seed(name: str, table: Comparison) -> str:
    measure = table.primary
    rows = {v: seeds for v in table.variants if (seeds := table.by_seed(measure, v))}
    words = "; ".join(f"{v} {format_summary(table.cell(measure, v), table.digits(measure))}" for v in rows)
    told = f"Ring: one seed{', mean over its targets' if table.targets else ''}; bar: mean of the seeds; dotted: "
    told += f"mean of {table.reference}.{' Lower is better.' if measure.better == 'lower' else ''}"
    named = {shown_name(variant): seeds for variant, seeds in rows.items()}
    drawn = seeds_chart(f"{name}-seeds", named, measure, shown_name(table.reference))
    return figure("Every seed", drawn.svg("Every seed of every variant", words), told)


def html_cell(cell: Cell, digits: int) -> str:
    """A cell of a comparison: the number, and smaller its deviation or interval."""
    if isinstance(cell, PairedDifference):
        interval = format_interval(cell, digits)
        return f'<td class="strong">{signed(cell.mean, digits)}<span class="interval">{interval}</span></td>'
    if isinstance(cell, str):
        return f'<td class="muted">{escape(cell)}</td>'
    mean, _, sd = format_summary(cell, digits).partition(" ")
    return f'<td>{mean} <span class="sd">{sd}</span></td>' if sd else f"<td>{mean}</td>"


def _per_run(runs: Sequence[Run], table: Comparison) -> str:
    if len(runs) == 1:
        return ""
    rows = []
    for variant in table.variants:
        for run in (run for run in runs if run.variant == variant):
            values = [(run.metrics.get(measure.key), table.digits(measure)) for measure in table.measures]
            named = run.name.replace(variant, shown_name(variant), 1)
            rows.append([named, *("–" if v is None else f"{v:.{digits}f}" for v, digits in values)])
    header = ["Run", *(measure.title for measure in table.measures)]
    return f"<details><summary>Every run</summary>{plain_table(header, rows)}</details>"


def legend(table: Comparison) -> dict[str, str]:
    """The legend of the variants, where there are several; of very many some look alike."""
    names: dict[str, list[str]] = {}
    for variant, style in variant_styles(table.variants).items():
        names.setdefault(style, []).append(shown_name(variant))
    return {style: ", ".join(alike) for style, alike in names.items()} if len(table.shown) > 1 else {}


def arrows(svg: str) -> str:
    return " Arrow: the interval extends beyond the possible range." if 'class="arrow' in svg else ""
