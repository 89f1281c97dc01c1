"""The parts of the page about one recipe, as HTML. Everything that comes from a file goes through `escape`."""

import json
import operator
import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from batchformer.report.charts import variant_styles
from batchformer.report.classes import (
    MOST_POINTS,
    class_chart,
    class_difference_chart,
    class_table,
    influence_section,
)
from batchformer.report.comparison import (
    Comparison,
    compare_runs,
    format_interval,
    format_summary,
    measure_word,
    shown_name,
    signed,
    with_unit,
)
from batchformer.report.figures import curve_chart, difference_chart, seeds_chart
from batchformer.report.html_parts import figure, marked, missing, pictures_of, plain_table
from batchformer.report.own_sections import own_section, series_together
from batchformer.report.provenance import caveats, command, facts, knows_its_command, shown_run
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference
from batchformer.report.streams import streams_section
from batchformer.report.tables import Cell, Table, comparison_table, readings_table, verdicts

_MOST_RUNS_OPEN = 4  # runs shown of a task's section per run; the others are collapsed
_SPLITS = ("many", "medium", "few")
_VERDICT_WORDS = {"helped": "It helped", "hurt": "It hurt", "unclear": "Undecided", "incomplete": "Incomplete"}


def recipe_section(name: str, runs: Sequence[Run], heading: bool) -> str:
    """Everything about one recipe; `name` is a safe id for links and pictures."""
    table = compare_runs([run.raw for run in runs])
    title = f"<h2>{escape(table.recipe)}</h2>" if heading else ""
    warned = "".join(f"<li>{escape(text)}</li>" for text in caveats(runs))
    mixing, found = pictures_of(runs, "mixing"), pictures_of(runs, "detection", whole_width=True)
    looks = [
        (variant, pictures_of([run for run in runs if run.variant == variant], "grad_cam", whole_width=True))
        for variant in table.variants
    ]
    parts = [
        _verdicts(table),
        f'<div class="card caveats"><b>Read with care</b><ul>{warned}</ul></div>' if warned else "",
        _table(name, runs, table),
        _curves(name, runs, table),
        _own_sections(name, runs),
        streams_section(name, runs),
        f"<h3>Mixing</h3>{mixing}" if mixing else "",
        f"<h3>What is found in the images</h3>{found}" if found else "",
        *(f"<h3>Grad-CAM on rare classes, {escape(shown_name(v))}</h3>{drawn}" for v, drawn in looks if drawn),
        _classes(name, runs, table),
        *(
            influence_section(
                f"{name}-influence{k}",
                [run for run in runs if run.variant == variant],
                f", {shown_name(variant)}" if len(table.others) > 1 else "",
            )
            for k, variant in enumerate(table.variants)
        ),
        _made(runs),
    ]
    return f'<section class="recipe" id="{name}">{title}{"".join(parts)}</section>'


def _verdicts(table: Comparison) -> str:
    if len(table.shown) == 1 and (found := table.cell(table.primary, *table.shown)):
        measure, (variant,), how = table.primary, table.shown, ""
        if table.is_default_pair:
            how = marked(f"`batchformer compare {table.recipe}` trains it with and without BatchFormer.")
            how = f'<br><span class="muted">Only this one was run: {how}</span>'
        amount = with_unit(format_summary(found, table.digits(measure)), measure.unit).replace(",", "")
        sentence = f"{shown_name(variant)}: {measure.words} {amount}."
        return f'<p class="card verdict incomplete"><strong>Result</strong>{escape(sentence)}{how}</p>'
    cards = []
    for variant, judged in verdicts(table).items():
        word = _VERDICT_WORDS[judged.kind]
        word = word if len(table.others) < 2 else f"{shown_name(variant)}: {word.removeprefix('It ')}"
        cards.append(
            f'<p class="card verdict {judged.kind}"><strong>{escape(word)}</strong>{escape(judged.sentence)}</p>'
        )
    return "".join(cards)


def _table(name: str, runs: Sequence[Run], table: Comparison) -> str:
    made = comparison_table(table)
    measure = table.primary
    judged = f"{measure.words[0].upper()}{measure.words[1:]}"
    caption = with_unit(judged, measure.unit)
    if len(table.seeds) > 1 or len(table.shown) > 1:
        caption += ": mean ± standard deviation over seeds"
    if len(table.shown) > 1:
        caption += ", and the difference of matched seeds with its 95 % interval"
        caption += f" (in {measure.points})" if measure.points != measure.unit else ""
    caption += "."
    if table.targets:
        caption += " The mean is that over the targets, seed by seed, and so is its interval."
    if len(table.others) > 1:
        caption += " The intervals are not widened for the number of variants."
    content = _content(made)
    is_wide = len(made.header) > 4
    numbers = f'<table class="comparison"><caption>{escape(caption)}</caption>{content}'
    if is_wide:  # scrolls on a phone, and its caption does not
        numbers = f'<div class="scroll"><table class="comparison">{content}</div>'
        numbers = f'<p class="caption">{escape(caption)}</p>{numbers}'
    wide = " wide" if is_wide else ""
    whole = f'<div class="card{wide}">{numbers}{_readings(table)}{_per_run(runs, table)}</div>'
    drawn = difference_chart(f"{name}-difference", table)
    if drawn is None:
        return whole
    helps = "the method helps" if table.is_default_pair else f"a variant is better than {table.reference}"
    side = "Right" if measure.gain(1.0) > 0 else "Left"
    told = f"Dot: mean over matched seeds; line: 95 % interval. {side} of zero {helps}."
    told += _arrows(drawn)
    notes = ", ".join(f"{each.label}: {each.note}" for each in table.measures if each.note and not table.targets)
    told += f" {notes}." if notes else ""
    one = len(table.others) == 1
    minus = f", {shown_name(table.others[0])} minus {table.reference}" if one else f" to {table.reference}"
    picture = figure(f"Difference{minus}", drawn, told, {} if one else _legend(table))
    seeds = _every_seed(name, table) if is_wide else ""
    return f'<div class="grid">{whole}{picture}{seeds}</div>'


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
    told = f"The same runs with other weights than those of {table.primary.words}, and the difference to these."
    told += "".join(f" {each.label}: {each.words}." for each in table.readings)
    told += "".join(f" {each.label}: {each.note}." for each in table.readings if each.note)
    return f'<p class="caption">{escape(told)}</p><div class="scroll"><table class="comparison">{_content(made)}</div>'


def _every_seed(name: str, table: Comparison) -> str:
    measure = table.primary
    rows = {v: seeds for v in table.variants if (seeds := table.by_seed(measure, v))}
    words = "; ".join(f"{v} {format_summary(table.cell(measure, v), table.digits(measure))}" for v in rows)
    told = (
        f"A ring is a seed{', its mean over the targets' if table.targets else ''}; the bar is their mean; dotted: the "
    )
    told += f"mean of {table.reference}.{' Lower is better.' if measure.better == 'lower' else ''}"
    drawn = seeds_chart(f"{name}-seeds", rows, measure, table.reference)
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


def _legend(table: Comparison) -> dict[str, str]:
    """The legend of the variants, where there are several."""
    styles = variant_styles(table.variants)
    return {style: shown_name(variant) for variant, style in styles.items()} if len(table.shown) > 1 else {}


def _arrows(svg: str) -> str:
    return " Arrow: the interval goes on beyond what is possible." if 'class="arrow' in svg else ""


def _curves(name: str, runs: Sequence[Run], table: Comparison) -> str:
    title = "<h3>Learning curves</h3>"
    measure, legend = table.primary, _legend(table)
    label = with_unit(measure_word(measure), measure.unit)
    judged = curve_chart(f"{name}-measure", runs, table.variants, measure.key, label, measure)
    loss = curve_chart(f"{name}-loss", runs, table.variants, "train_loss", "training loss")
    if judged is None and loss is None:
        return title + missing(
            "These runs carry no history of their epochs", "train with `batchformer fit` or `compare`, which record it"
        )
    figures = ""
    if judged:
        told = "Line: mean of the seeds; band: smallest to largest seed." if len(table.seeds) > 1 else ""
        told += " A seed is the mean over its targets." if table.targets else ""
        told += " The axis leaves out a steep start." if judged.start_left_out else ""
        told += " Lower is better." if measure.better == "lower" else ""
        figures += figure(f"{measure.words[0].upper()}{measure.words[1:]}", judged.svg, told.strip(), legend)
    if loss:
        told = "As it was minimised. With BatchFormer it covers both streams, and some recipes scale it"
        told += ", so compare the shapes rather than the levels." if legend else "."
        figures += figure("Training loss", loss.svg, told, legend)
    return f'{title}<div class="grid">{figures}</div>{_target_curves(name, runs, table)}'


def _target_curves(name: str, runs: Sequence[Run], table: Comparison) -> str:
    """The primary measure over the epochs, a figure for each target."""
    measure, figures = table.primary, ""
    label = with_unit(measure_word(measure), measure.unit)
    for k, target in enumerate(table.targets if len(table.targets) > 1 else ()):
        mine = [run for run in runs if run.target == target]
        if drawn := curve_chart(f"{name}-target{k}", mine, table.variants, measure.key, label, measure):
            figures += figure(target, drawn.svg, "", _legend(table))
    word = measure_word(measure)
    heading = f"<h3>{escape(word[0].upper() + word[1:])} on each target</h3>"
    return f'{heading}<div class="grid">{figures}</div>' if figures else ""


def _own_sections(name: str, runs: Sequence[Run]) -> str:
    """The task's own sections: each title once, and below it a part for each run, of every variant one first."""
    places = Counter[str]()
    ordered = []
    for run in runs:
        ordered.append((places[run.variant], run))
        places[run.variant] += 1
    runs = [run for _, run in sorted(ordered, key=operator.itemgetter(0))]  # stable: variants keep their order
    titles = dict.fromkeys(section["title"] for run in runs for section in run.sections)
    shown = []
    for k, title in enumerate(titles):
        if together := series_together(f"{name}-own{k}", title, runs):
            shown.append(f'<h3>{escape(title)}</h3><div class="grid">{together}</div>')
            continue
        parts: list[str] = []
        for run in runs:
            for section in (section for section in run.sections if section["title"] == title):
                parts.append(own_section(f"{name}-own{k}-{len(parts)}", run, section))
        first, rest = "".join(parts[:_MOST_RUNS_OPEN]), "".join(parts[_MOST_RUNS_OPEN:])
        shown.append(f'<h3>{escape(title)}</h3><div class="grid">{first}</div>')
        if rest:
            more = f"{len(parts) - _MOST_RUNS_OPEN} more runs"
            shown.append(f'<details><summary>{more}</summary><div class="grid">{rest}</div></details>')
    return "".join(shown)


def _classes(name: str, runs: Sequence[Run], table: Comparison) -> str:
    measure, word = table.primary, measure_word(table.primary)
    title, by_name = f"<h3>{escape(word[0].upper() + word[1:])} per class</h3>", class_table(runs, table)
    if not any(run.metrics.get(key) is not None for run in runs for key in _SPLITS):
        return title + by_name if by_name else ""
    scatter = class_chart(f"{name}-classes", runs, table.variants, measure)
    if scatter is None:
        return title + missing(
            "These runs carry no number per class, or do not say how many training images each class has",
            "train with `batchformer fit` or `compare`, which record both",
        )
    many = any(len(run.class_counts) > MOST_POINTS for run in runs)
    point = "some classes of like frequency" if many else "class"
    told = f"One point per {point}{' and variant' if len(table.shown) > 1 else ''}"
    told += ", mean of the seeds." if len(table.seeds) > 1 else "."
    figures = figure("Against training frequency", scatter, told, _legend(table))
    bins = {
        v: class_difference_chart(f"{name}-bins{k}", runs, table.reference, v, measure)
        for k, v in enumerate(table.others)
    }
    told = "Classes sorted by frequency, in at most ten bins of equal size; line: 95 % interval over matched seeds. "
    told += "A bin is a second look at the same data: the table above decides."
    for variant, drawn in bins.items():
        if drawn is not None:
            whose = f", {shown_name(variant)}" if len(table.others) > 1 else ""
            figures += figure(f"Difference by frequency{whose}", drawn, told + _arrows(drawn))
    if not any(bins.values()) and len(table.shown) > 1:
        figures += missing("No seed was run with two variants", "run `batchformer compare`")
    return f'{title}<div class="grid">{figures}{by_name}</div>'


def _made(runs: Sequence[Run]) -> str:
    entries = "".join(f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in facts(runs))
    run = shown_run(runs)
    config = run.raw.get("config")
    whole = ""
    if config:
        text = escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
        whole = f"<details><summary>The whole configuration ({escape(run.name)})</summary><pre>{text}</pre></details>"
    told = "" if knows_its_command(runs) else " (fields changed on the command line are in the configuration)"
    lines = command(runs).split("\n")
    told += ", with your folder of data for DIR" if any(line.endswith(" DIR") for line in lines) else ""
    options = "\n".join(
        " ".join(f'<span class="option">{escape(part)}</span>' for part in re.split(r" (?=--)", line)) for line in lines
    )
    return (
        f'<h3>How it was made</h3><div class="card"><dl>{entries}</dl><p class="muted">Again{told}:</p>'
        f"<pre><code>{options}</code></pre>{whole}</div>"
    )
