"""The two streams of a training on the page: losses over the epochs, and per depth what `stream_health` measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from batchformer.report.charts import Axis, Chart, count_axis, decade_axis, linear_axis, named_axis
from batchformer.report.comparison import shown_name
from batchformer.report.figures import draw_curves, epoch_curve
from batchformer.report.health import attention_per_head, number, reading, series, short_names
from batchformer.report.html_parts import PICTURES, figure, pictures_of
from batchformer.report.runs import Run
from batchformer.report.statistics import mean_of_known

STREAMS = {"plain": "plain stream", "related": "related stream"}
_CLASSIFIES = ("accuracy", "top1")  # primary measures of tasks whose loss is that of classes alone


def streams_section(name: str, runs: Sequence[Run]) -> str:
    """Losses of both streams, their health per depth, pictures of the attention: whatever a variant's runs have."""
    found: dict[str, tuple[str, str]] = {}
    for variant in dict.fromkeys(run.variant for run in runs):
        its_runs = [run for run in runs if run.variant == variant]
        measured = next((run for run in its_runs if run.health), None)
        figures = _losses(label := f"{name}-streams{len(found)}", its_runs, measured.health if measured else {})
        figures += _summary(measured) + _depth_figures(label, measured.health) if measured else ""
        found[variant] = (figures, pictures_of(its_runs, PICTURES))
    found = {variant: parts for variant, parts in found.items() if any(parts)}
    shown = []
    for variant, (figures, seen) in found.items():
        whose = f'<p class="muted">{escape(shown_name(variant))}</p>' if len(found) > 1 else ""
        grid = f'<div class="grid">{figures}</div>' if figures else ""
        shown.append(f"{whose}{grid}{seen}")
    return f"<h3>The two streams</h3>{''.join(shown)}" if shown else ""


def _losses(name: str, runs: Sequence[Run], health: Mapping[str, Any]) -> str:
    chance = None
    if runs[0].primary.key in _CLASSIFIES:
        classes = {len(run.class_counts) for run in runs} - {0}
        chance = math.log(next(iter(classes))) if len(classes) == 1 else number(health, "chance")
    picture = loss_chart(f"{name}-losses", runs, chance)
    if picture is None:
        return ""
    dead = "stays up" if chance is None else "stays at chance"
    caption = (
        f"{'Mean of the seeds; band: smallest to largest. ' * (len(runs) > 1)}If the related stream {dead} "
        "while the plain one learns, nothing is learnt through the module."
    )
    return figure("Training loss of both streams", picture, caption, STREAMS)


def _summary(run: Run) -> str:
    health, found = run.health, reading(run.health)
    tone = {True: "helped", False: "hurt", None: "incomplete"}[found.alive]
    rows = [
        ("Loss, plain rows", _show(number(health, "plain_loss"), ".2f")),
        ("Loss, related rows", _show(number(health, "related_loss"), ".2f")),
        ("Loss at chance", _show(number(health, "chance"), ".2f")),
    ]
    for mode, words in (("quiet", "dropout off"), ("train", "as in training")):
        shares = [number(health, "gradient_on_others", mode, key) for key in ("norm_share", "squared_share")]
        rows.append((f"Gradient on other samples, {words}", " / ".join(_show(share, ".1%") for share in shares)))
    body = "".join(f'<tr><th scope="row">{escape(what)}</th><td>{escape(value)}</td></tr>' for what, value in rows)
    caption = (
        f"Measured on one batch of {_show(number(health, 'batch'), '.0f')} images, seed {run.seed}. Gradient: share of "
        "the sum of norms / of the squared norms."
    )
    return (
        f'<div class="card health {tone}"><p><strong>{escape(found.sentence)}</strong></p><table>'
        f"<caption>{escape(caption)}</caption><tbody>{body}</tbody></table></div>"
    )


def _depth_figures(name: str, health: Mapping[str, Any]) -> str:
    """A chart over the depth for each quantity that was measured: behind the blocks, or at the insertions (points)."""
    blocks, points = health.get("blocks", []), health.get("points", [])
    changes = {
        stream: [None if value is None else 100 * value for value in series(points, what)]
        for stream, what in (("related", "change_quiet"), ("others", "from_others"))
    }
    gradients = {stream: series(blocks, "gradient", stream) for stream in STREAMS}
    above_zero = {stream: [v if v is None or v > 0 else None for v in values] for stream, values in gradients.items()}
    heads = attention_per_head(points, "entropy")
    means = [mean_of_known(values) for values in heads]
    norms, ranks = ({s: series(blocks, s, what) for s in STREAMS} for what in ("norm", "effective_rank"))
    figures = []

    def draw(
        title: str, caption: str, key: str, *given: Any, legend: Mapping[str, str] | None = None, **marks: Any
    ) -> None:
        svg = _by_depth(f"{name}-{key}", *given, **marks)
        figures.append("" if svg is None else figure(title, svg, caption, legend))

    draw(
        "Signal in the related tokens",
        "Cosine between two dropout masks of what distinguishes samples (tokens minus their mean over the batch). "
        "At 0 there is only noise.",
        "signal", blocks, {"related": series(blocks, "signal")}, _shares, "cosine between dropout masks",
    )  # fmt: skip
    draw(
        "What each module changes",
        "Without dropout, in percent of the tokens' norm; dotted: 5 %. From other samples: minus the change that "
        "remains when each sample attends only to itself.",
        "change", points, changes, _from_zero, "change, % of the norm",
        level=5.0, legend={"related": "whole change", "others": "from other samples"},
    )  # fmt: skip
    draw(
        "Gradient into the blocks",
        "Norm of the gradient of each stream's mean loss at the parameters of the block.",
        "gradient", blocks, above_zero, lambda values: decade_axis(values, "gradient norm (log)"),
        "gradient norm", legend=STREAMS,
    )  # fmt: skip
    draw(
        "Entropy of the attention",
        "Of the attention over the batch, relative to its maximum: 1 is uniform, 0 is a single sample. "
        "Small dots: single heads.",
        "entropy", points, {"related": means}, _shares, "entropy of the attention",
        dots=[(k + 0.5, value) for k, values in enumerate(heads) for value in values],
    )  # fmt: skip
    draw(
        "Norm of the tokens",
        "After each block, including its insertion.",
        "norm", blocks, norms, _from_zero, "mean norm of a token", legend=STREAMS,
    )  # fmt: skip
    draw(
        "Effective rank of the tokens",
        "Number of directions the samples of the batch span at a position. Noise also has a high rank: read it "
        "together with the signal.",
        "rank", blocks, ranks, _from_zero, "effective rank", legend=STREAMS,
    )  # fmt: skip
    return "".join(figures)


def loss_chart(name: str, runs: Sequence[Run], chance: float | None) -> str | None:
    """Training loss of each stream over the epochs: mean of the seeds, band from the smallest to the largest."""
    losses = {stream: [run.streams.get(f"{stream}_loss", []) for run in runs] for stream in STREAMS}
    curves = {
        stream: epoch_curve((run, epoch, value) for run, each in enumerate(of) for epoch, value in enumerate(each))
        for stream, of in losses.items()
    }
    values = [v for curve in curves.values() for _, seeds in curve for v in seeds]
    if not curves["related"]:
        return None
    epochs = [epoch for curve in curves.values() for epoch, _ in curve]
    near = [chance] if chance is not None and max(values) > 0.8 * chance else []
    chart = Chart(name, count_axis(epochs, "epoch"), linear_axis([*values, *near], "training loss"))
    if near:
        chart.segment((chart.x.low, near[0]), (chart.x.high, near[0]), "divider")
        chart.heading((chart.x.low + chart.x.high) / 2, f"dotted: chance, {near[0]:.2f}")
    draw_curves(chart, {stream: stream for stream in STREAMS}, curves)
    ends = [f"{STREAMS[s]} ends at {fmean(c[-1][1]):.2f}" for s, c in curves.items() if c]
    return chart.svg("Training loss of both streams over the epochs", "; ".join(ends))


def _by_depth(
    name: str,
    entries: Sequence[Mapping[str, Any]],
    lines: Mapping[str, Sequence[float | None]],
    axis: Callable[[list[float]], Axis],
    label: str,
    level: float | None = None,
    dots: Sequence[tuple[float, float]] = (),
) -> str | None:
    """Lines over the depth; `level` is a dashed line to compare with, `dots` lie behind.

    `axis` makes the vertical axis of the values and the level.
    """
    seen = [value for values in lines.values() for value in values if value is not None]
    if not seen:
        return None
    names = short_names(entries)
    y = axis(seen if level is None else [*seen, level])
    y = Axis(y.low, y.high, y.ticks, y.label or label, y.log)
    chart = Chart(name, named_axis(names, "after block, counted from 0" if names[0].isdigit() else "after"), y)
    if level is not None:
        chart.segment((chart.x.low, level), (chart.x.high, level), "divider")
    chart.dots(list(dots), "faint", radius=2.6)
    for style, values in lines.items():
        known = [(k, value) for k, value in enumerate(values) if value is not None]
        places = [(k + 0.5, value) for k, value in known]
        chart.line(places, style)
        chart.dots(places, style, [f"{entries[k].get('path')}: {v:.4g}" for k, v in known])
    spoken = "; ".join(
        f"{style}: " + ", ".join("–" if v is None else f"{v:.3g}" for v in vs) for style, vs in lines.items()
    )
    return chart.svg(f"{label} by depth", spoken)


def _shares(_: list[float]) -> Axis:
    return Axis(0, 1, [(k / 5, f"{k / 5:g}") for k in range(6)])


def _from_zero(values: list[float]) -> Axis:
    return linear_axis(values, include_zero=True, within=(0, None))


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
