"""The parts of the page about one recipe, as HTML. Everything that comes from a file goes through `escape`."""

import json
import operator
import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from batchformer.report.classes import MOST_POINTS, class_chart, class_difference_chart, class_table, influence_section
from batchformer.report.comparison import Comparison, class_word, compare_runs, measure_word, shown_name, with_unit
from batchformer.report.failures import failures_section
from batchformer.report.figures import curve_chart
from batchformer.report.first_screen import arrows, curve_figure, first_screen, legend, verdict_line
from batchformer.report.html_parts import figure, missing, pictures_of
from batchformer.report.own_sections import own_section, series_together
from batchformer.report.provenance import caveats, command, facts, knows_its_command, representative_run
from batchformer.report.runs import Run
from batchformer.report.streams import streams_section

_MOST_RUNS_OPEN = 4  # runs shown of a task's section per run; the others are collapsed
_SPLITS = ("many", "medium", "few")


def recipe_section(name: str, runs: Sequence[Run], heading: bool) -> str:
    """Everything about one recipe; `name` is a safe id for links and pictures."""
    table = compare_runs([run.raw for run in runs])
    title = f"<h2>{escape(table.recipe)}</h2>" if heading else ""
    first = first_screen(name, runs, table)
    mixing, found = pictures_of(runs, "mixing"), pictures_of(runs, "detection", whole_width=True)
    looks = [
        (variant, pictures_of([run for run in runs if run.variant == variant], "grad_cam", whole_width=True))
        for variant in table.variants
    ]
    parts = [
        first.html,
        _caveats(runs),
        _curves(name, runs, table, first.curve),
        failures_section(name, runs, table),
        _own_sections(name, runs, first.section),
        streams_section(name, runs),
        f"<h3>Mixing</h3>{mixing}" if mixing else "",
        f"<h3>Predictions</h3>{found}" if found else "",
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
        _provenance(runs),
    ]
    return f'<section class="recipe" id="{name}">{title}{"".join(parts)}</section>'


def brief_section(name: str, runs: Sequence[Run]) -> str:
    """A recipe on a page of many, collapsed: the first screen, the curves and where the runs come from."""
    table = compare_runs([run.raw for run in runs])
    first, (kind, line) = first_screen(name, runs, table), verdict_line(table)
    entries = "".join(f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in facts(runs))
    return (
        # the id is inside: browsers open what holds the target of a link
        f'<details class="recipe"><summary><h2>{escape(table.recipe)}</h2>'
        f'<span class="line {kind}">{escape(line)}</span></summary><div id="{name}"></div>{first.html}'
        f'{_caveats(runs)}{_curves(name, runs, table, first.curve)}<div class="card"><dl>{entries}</dl></div></details>'
    )


def _caveats(runs: Sequence[Run]) -> str:
    warned = "".join(f"<li>{escape(text)}</li>" for text in caveats(runs))
    return f'<div class="card caveats"><b>Read with care</b><ul>{warned}</ul></div>' if warned else ""


def _curves(name: str, runs: Sequence[Run], table: Comparison, shown: str) -> str:
    """The primary measure, unless that is `shown` already, and the training loss."""
    title = "<h3>Learning curves</h3>"
    judged = "" if shown == table.primary.key else curve_figure(name, runs, table, table.primary)
    loss = curve_chart(f"{name}-loss", runs, table.variants, "train_loss", "training loss")
    if not judged and loss is None:
        remedy = "train with `batchformer fit` or `compare`, which record it"
        return "" if shown else title + missing("These runs have no history of their epochs", remedy)
    figures = judged
    if loss:
        told = "The loss that was minimised. With BatchFormer it covers both streams, and some recipes scale it"
        told += ", so compare the shapes rather than the levels." if legend(table) else "."
        figures += figure("Training loss", loss.svg, told, legend(table))
    return f'{title}<div class="grid">{figures}</div>{_target_curves(name, runs, table)}'


def _target_curves(name: str, runs: Sequence[Run], table: Comparison) -> str:
    """The primary measure over the epochs, a figure for each target."""
    measure, figures = table.primary, ""
    label = with_unit(measure_word(measure), measure.unit)
    for k, target in enumerate(table.targets if len(table.targets) > 1 else ()):
        mine = [run for run in runs if run.target == target]
        if drawn := curve_chart(f"{name}-target{k}", mine, table.variants, measure.key, label, measure):
            figures += figure(target, drawn.svg, "", legend(table))
    word = measure_word(measure)
    heading = f"<h3>{escape(word[0].upper() + word[1:])} on each target</h3>"
    return f'{heading}<div class="grid">{figures}</div>' if figures else ""


def _own_sections(name: str, runs: Sequence[Run], left_out: str) -> str:
    """The task's own sections: each title once, and below it a part for each run, of every variant one first.

    `left_out`: the one that is on the first screen already.
    """
    places = Counter[str]()
    ordered = []
    for run in runs:
        ordered.append((places[run.variant], run))
        places[run.variant] += 1
    runs = [run for _, run in sorted(ordered, key=operator.itemgetter(0))]  # stable: variants keep their order
    titles = dict.fromkeys(s["title"] for run in runs for s in run.sections if s["title"] != left_out)
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
    measure, word = table.primary, class_word(table.primary)
    title, by_name = f"<h3>{escape(word[0].upper() + word[1:])} per class</h3>", class_table(runs, table)
    if not any(run.metrics.get(key) is not None for run in runs for key in _SPLITS):
        return title + by_name if by_name else ""
    scatter = class_chart(f"{name}-classes", runs, table.variants, measure)
    if scatter is None:
        return title + missing(
            "These runs have no numbers per class, or no training images per class",
            "train with `batchformer fit` or `compare`, which record both",
        )
    many = any(len(run.class_counts) > MOST_POINTS for run in runs)
    point = "group of classes of similar frequency" if many else "class"
    told = f"One point per {point}{' and variant' if len(table.shown) > 1 else ''}"
    told += ", mean of the seeds." if len(table.seeds) > 1 else "."
    figures = figure("Against training frequency", scatter, told, legend(table))
    bins = {
        v: class_difference_chart(f"{name}-bins{k}", runs, table.reference, v, measure)
        for k, v in enumerate(table.others)
    }
    told = "Classes sorted by frequency, in at most ten bins of equal size; line: 95 % interval over matched seeds. "
    told += "The bins only break down the same data; the table above is what counts."
    for variant, drawn in bins.items():
        if drawn is not None:
            whose = f", {shown_name(variant)}" if len(table.others) > 1 else ""
            figures += figure(f"Difference by frequency{whose}", drawn, told + arrows(drawn))
    if not any(bins.values()) and len(table.shown) > 1:
        figures += missing("No seed was run with two variants", "run `batchformer compare`")
    return f'{title}<div class="grid">{figures}{by_name}</div>'


def _provenance(runs: Sequence[Run]) -> str:
    entries = "".join(f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in facts(runs))
    run = representative_run(runs)
    config = run.raw.get("config")
    whole = ""
    if config:
        text = escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
        whole = f"<details><summary>The whole configuration ({escape(run.name)})</summary><pre>{text}</pre></details>"
    told = "" if knows_its_command(runs) else " (fields changed on the command line are in the configuration)"
    lines = command(runs).split("\n")
    told += ", with your data folder for DIR" if any(line.endswith(" DIR") for line in lines) else ""
    options = "\n".join(
        " ".join(f'<span class="option">{escape(part)}</span>' for part in re.split(r" (?=--)", line)) for line in lines
    )
    return (
        f'<h3>How it was made</h3><div class="card"><dl>{entries}</dl><p class="muted">To reproduce{told}:</p>'
        f"<pre><code>{options}</code></pre>{whole}</div>"
    )
