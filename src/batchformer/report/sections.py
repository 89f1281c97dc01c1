"""The parts of the page about one recipe, as HTML. Everything that comes from a file goes through `escape`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from batchformer.report.classes import MOST_POINTS
from batchformer.report.comparison import (
    METHODS,
    ComparisonRow,
    by_seed,
    comparison_table,
    format_interval,
    format_summary,
    metrics_of,
    signed,
)
from batchformer.report.detection_section import detection_section
from batchformer.report.figures import (
    NAMES,
    class_accuracy_chart,
    class_difference_chart,
    curve_chart,
    difference_chart,
    influence_chart,
    influence_correlation,
)
from batchformer.report.html_parts import figure, missing
from batchformer.report.measures import TOP, Measure, measure_of
from batchformer.report.mix_section import mix_section
from batchformer.report.provenance import caveats, command, facts, knows_its_command
from batchformer.report.runs import Run
from batchformer.report.statistics import PairedDifference, Summary
from batchformer.report.stream_sections import streams_section
from batchformer.report.studies import base_of
from batchformer.report.verdict import verdict

_SPLITS = " Many: more than 100 training images, Medium: 20 to 100, Few: less than 20."
_VERDICT_WORDS = {"helped": "It helped", "hurt": "It hurt", "unclear": "Undecided", "incomplete": "Incomplete"}


def recipe_section(name: str, runs: Sequence[Run], heading: bool) -> str:
    """Everything about one recipe; `name` is a safe id for links and pictures."""
    rows = comparison_table([run.raw for run in runs])
    title = f"<h2>{escape(runs[0].recipe)}</h2>" if heading else ""
    parts = [
        _verdict(runs, rows),
        _caveats(runs),
        _table(name, runs, rows),
        _curves(name, runs),
        streams_section(name, runs),
        mix_section(runs),
        detection_section(runs),
        _classes(name, runs) if _frequencies_differ(runs) else "",
        _influence(name, runs) if any(run.influence for run in runs) or not _inside(runs) else "",
        _made(runs),
    ]
    return f'<section class="recipe" id="{name}">{title}{"".join(parts)}</section>'


def _measure(runs: Sequence[Run]) -> Measure:
    return measure_of(run.metrics for run in runs)


def _inside(runs: Sequence[Run]) -> bool:
    """Whether the module stands inside the network: image classification and detectors, not the long tails."""
    return _measure(runs) is TOP or _measure(runs).objects


def _frequencies_differ(runs: Sequence[Run]) -> bool:
    """Whether there is a frequency to set the classes against; where it is not known, the page says so."""
    if _measure(runs).objects:
        return False
    counts = {count for run in runs for count in run.class_counts}
    return len(counts) > 1 or not _inside(runs)


def _verdict(runs: Sequence[Run], rows: Sequence[ComparisonRow]) -> str:
    base = base_of(runs[0].recipe)
    if base not in (None, runs[0].recipe) and all(run.method == "baseline" for run in runs):
        return f'<p class="card verdict incomplete"><strong>A baseline</strong>of the study {escape(str(base))}.</p>'
    judged = verdict(rows)
    word = _VERDICT_WORDS[judged.kind]
    return f'<p class="card verdict {judged.kind}"><strong>{word}</strong>{escape(judged.sentence)}</p>'


def _caveats(runs: Sequence[Run]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in caveats(runs))
    return f'<div class="card caveats"><b>Read with care</b><ul>{items}</ul></div>' if items else ""


def _table(name: str, runs: Sequence[Run], rows: Sequence[ComparisonRow]) -> str:
    body = "".join(
        f'<tr><th scope="row">{row.label}</th><td>{_summary(row.baseline)}</td><td>{_summary(row.batchformer)}</td>'
        f'<td class="strong">{_difference(row.difference)}</td></tr>'
        for row in rows
    )
    measure = _measure(runs)
    kind = "Metric" if measure.objects else "Accuracy" if measure is TOP else "Classes"
    judged = measure.name.capitalize() if measure.objects else "Test accuracy"
    table = (
        f'<div class="card"><table><caption>{judged} in percent: mean ± standard deviation over seeds, and the '
        "difference of matched seeds with its 95 % interval.</caption><thead><tr>"
        f'<th scope="col">{kind}</th><th scope="col">baseline</th><th scope="col">BatchFormer</th>'
        f'<th scope="col">difference</th></tr></thead><tbody>{body}</tbody></table>{_per_seed(runs)}</div>'
    )
    picture = difference_chart(f"{name}-difference", rows)
    if picture is None:
        return table
    figure = _figure(
        "Difference, BatchFormer minus baseline",
        picture,
        "Dot: mean over matched seeds; line: 95 % interval. Right of zero the method helps."
        + (_SPLITS if any(row.metric == "few" for row in rows) else ""),
    )
    return f'<div class="grid">{table}{figure}</div>'


def _summary(summary: Summary | None) -> str:
    mean, _, sd = format_summary(summary).partition(" ")
    return f'{mean} <span class="sd">{sd}</span>' if sd else mean


def _difference(difference: PairedDifference | None) -> str:
    if difference is None:
        return "–"
    return f'{signed(difference.mean)}<span class="interval">{format_interval(difference)}</span>'


def _per_seed(runs: Sequence[Run]) -> str:
    raw = [run.raw for run in runs]
    metrics = metrics_of(raw)
    lines = []
    for method in METHODS:
        values = {metric: by_seed(raw, method, metric) for metric in metrics}
        for seed in sorted(run.seed for run in runs if run.method == method):
            cells = "".join(
                f"<td>{values[metric][seed]:.2f}</td>" if seed in values[metric] else "<td>–</td>" for metric in metrics
            )
            lines.append(f'<tr><th scope="row">{NAMES[method]}, seed {seed}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{label}</th>' for label in metrics.values())
    return (
        '<details><summary>Every seed</summary><div class="scroll"><table><thead><tr><th scope="col">Run</th>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _curves(name: str, runs: Sequence[Run]) -> str:
    title = "<h3>Learning curves</h3>"
    measure = _measure(runs)
    label = f"{measure.short}, %" if measure.objects else "test accuracy, %"
    accuracy = curve_chart(f"{name}-accuracy", runs, "all", label, skip_start=True)
    loss = curve_chart(f"{name}-loss", runs, "train_loss", "training loss")
    if accuracy is None and loss is None:
        return title + missing(
            "These runs carry no history of their epochs", "train with `batchformer fit` or `compare`, which record it"
        )
    figures = ""
    if accuracy:
        picture, start_left_out = accuracy
        figures += _figure(
            measure.name[0].upper() + measure.name[1:],
            picture,
            "Line: mean of the seeds; band: smallest to largest seed."
            + (" The axis leaves out a steep start." if start_left_out else ""),
            runs,
        )
    if loss:
        figures += _figure(
            "Training loss",
            loss[0],
            "As it was minimised. With BatchFormer it covers both streams, and some recipes scale it, so compare the "
            "shapes rather than the levels.",
            runs,
        )
    return f'{title}<div class="grid">{figures}</div>'


def _classes(name: str, runs: Sequence[Run]) -> str:
    title = "<h3>Accuracy per class against training frequency</h3>"
    scatter = class_accuracy_chart(f"{name}-classes", runs)
    if scatter is None:
        return title + missing(
            "These runs carry no accuracy per class, or do not say how many training images each class has",
            "train with `batchformer fit` or `compare`, which record both",
        )
    many = any(len(run.class_counts) > MOST_POINTS for run in runs)
    point = "some classes of like frequency" if many else "class"
    figures = _figure(
        "With and without the method", scatter, f"One point per {point} and method, mean of the seeds.", runs
    )
    bins = class_difference_chart(f"{name}-bins", runs)
    if bins is None:
        bins_part = missing("No seed was run with both methods", "run `batchformer compare`")
    else:
        bins_part = _figure(
            "Difference by frequency",
            bins,
            "Classes sorted by frequency, in at most ten bins of equal size; line: 95 % interval over matched seeds. "
            "A bin is a second look at the same data: the table above decides.",
        )
    return f'{title}<div class="grid">{figures}{bins_part}</div>'


def _influence(name: str, runs: Sequence[Run]) -> str:
    title = "<h3>Gradients on the other images of the batch (the paper’s Fig. 6)</h3>"
    picture = influence_chart(f"{name}-influence", runs)
    if picture is None:
        return title + missing(
            "No run with BatchFormer carries its gradient influence",
            "run `batchformer compare` or `fit` without `--no-analysis`",
        )
    wrt = "features" if all(run.influence_wrt == "features" for run in runs if run.influence) else "pixels"
    figure = _figure(
        "Gradient norm of each class’s loss on the others",
        picture,
        f"Test set, module on, norm at the {wrt} of the other images, mean of the seeds; line: smoothed.",
    )
    return f'{title}<div class="grid">{figure}<div class="card reading">{_influence_reading(runs)}</div></div>'


def _influence_reading(runs: Sequence[Run]) -> str:
    claim = (
        "<p class='muted'>Through BatchFormer the loss of one image also reaches the <em>other</em> images of its "
        "batch. The paper reports: the rarer the class, the larger this gradient.</p>"
    )
    overall = influence_correlation(runs)
    if overall is None:
        return (
            claim + "<p>No rank correlation can be given: all classes are equally frequent, or there is only one.</p>"
        )
    single = [(run.seed, influence_correlation([run])) for run in runs if run.influence]
    seeds = ", ".join(f"{signed(found.rho)} (seed {seed})" for seed, found in single if found is not None)
    certain = overall.p is not None and overall.p < 0.05
    if not certain:
        reading = "Here there is no clear order: these runs neither show nor exclude what the paper reports."
    elif overall.rho > 0:
        reading = "Here it is so too: rarer classes have the larger gradient on the others."
    else:
        reading = "Here it is the other way round: rarer classes have the smaller gradient on the others."
    chance = "" if overall.p is None else f"; p {'&lt; 0.001' if overall.p < 0.001 else f'= {overall.p:.3f}'}"
    return (
        f'{claim}<p class="rho">ρ = {signed(overall.rho)}</p><p class="muted">Spearman rank correlation between rarity '
        f"and gradient norm over the classes (+1: the rarer, the larger{chance}).</p><p><b>{reading}</b></p>"
        f'<p class="muted">Each run alone: {escape(seeds)}.</p>'
    )


def _made(runs: Sequence[Run]) -> str:
    entries = "".join(f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in facts(runs))
    run = next((run for run in runs if run.method == "batchformer"), runs[0])
    config = run.raw.get("config")
    whole = ""
    if config:
        text = escape(json.dumps(config, indent=2, ensure_ascii=False, default=str))
        which = f"{run.method}, seed {run.seed}"
        whole = f"<details><summary>The whole configuration ({which})</summary><pre>{text}</pre></details>"
    told = (
        "--data-root DIR says where the data are"
        if knows_its_command(runs)
        else ("fields changed on the command line are in the configuration")
    )
    return (
        f'<h3>How it was made</h3><div class="card"><dl>{entries}</dl><p class="muted">Again ({told}):</p>'
        f"<pre><code>{escape(command(runs))}</code></pre>{whole}</div>"
    )


def _figure(title: str, svg: str, caption: str, runs: Sequence[Run] = ()) -> str:
    legend = {method: NAMES[method] for method in METHODS if any(run.method == method for run in runs)}
    return figure(title, svg, caption, legend)
