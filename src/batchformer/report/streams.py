"""The two streams of a training on the page: losses over the epochs, and per depth what `stream_health` measured."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from batchformer.report.charts import Chart
from batchformer.report.comparison import shown_name
from batchformer.report.health import attention_per_head, number, reading, series, short_names
from batchformer.report.html_parts import PICTURES, figure, pictures_of
from batchformer.report.runs import Run
from batchformer.report.scales import Axis, count_axis, decade_axis, linear_axis, named_axis, thin

STREAMS = {"plain": "plain stream", "related": "related stream"}
_MOST_EPOCHS = 240
_SHARES = Axis(0, 1, [(k / 5, f"{k / 5:g}") for k in range(6)])
_CLASSIFIES = ("accuracy", "top1")  # primary measures of tasks whose loss is that of classes alone


def streams_section(name: str, runs: Sequence[Run]) -> str:
    """Losses of both streams, their health per depth, pictures of the attention: whatever a variant's runs have."""
    found: dict[str, tuple[str, str]] = {}
    for variant in dict.fromkeys(run.variant for run in runs):
        mine = [run for run in runs if run.variant == variant]
        found[variant] = (_figures(f"{name}-streams{len(found)}", mine), pictures_of(mine, PICTURES))
    found = {variant: parts for variant, parts in found.items() if any(parts)}
    shown = []
    for variant, (figures, seen) in found.items():
        whose = f'<p class="muted">{escape(shown_name(variant))}</p>' if len(found) > 1 else ""
        grid = f'<div class="grid">{figures}</div>' if figures else ""
        shown.append(f"{whose}{grid}{seen}")
    return f"<h3>The two streams</h3>{''.join(shown)}" if shown else ""


def _figures(name: str, runs: Sequence[Run]) -> str:
    measured = next((run for run in runs if run.health), None)
    figures = _losses(name, runs, measured.health if measured is not None else {})
    return figures if measured is None else figures + _summary(measured) + _depth_figures(name, measured.health)


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
        f"Mean of the seeds; band: smallest to largest. A related stream that {dead} "
        "while the plain one learns is dead: nothing is learnt through the module."
    )
    return figure("Training loss of both streams", picture, caption, STREAMS)


def _summary(run: Run) -> str:
    health, told = run.health, reading(run.health)
    tone = {True: "helped", False: "hurt", None: "incomplete"}[told.alive]
    rows = [
        ("Loss, plain rows", _show(number(health, "plain_loss"), ".2f")),
        ("Loss, related rows", _show(number(health, "related_loss"), ".2f")),
        ("Loss by chance", _show(number(health, "chance"), ".2f")),
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
        f'<div class="card health {tone}"><p><strong>{escape(told.sentence)}</strong></p><table>'
        f"<caption>{escape(caption)}</caption><tbody>{body}</tbody></table></div>"
    )


def _depth_figures(name: str, health: Mapping[str, Any]) -> str:
    both = dict(STREAMS)
    drawn: list[tuple[str, str | None, str, dict[str, str]]] = [
        (
            "What survives of the related tokens",
            signal_chart(f"{name}-signal", health),
            "Cosine, between two dropout masks, of what tells samples apart (tokens minus their mean over the batch). "
            "At 0 there is only noise.",
            {},
        ),
        (
            "What each module changes",
            change_chart(f"{name}-change", health),
            "Without dropout, in percent of the tokens' norm; dotted: 5 %. From others: what remains of it when each "
            "sample looks at itself alone is taken away.",
            {"related": "whole change", "others": "from other samples"},
        ),
        (
            "Gradient into the blocks",
            gradient_chart(f"{name}-gradient", health),
            "Norm of the gradient of each stream's mean loss at the parameters of the block.",
            both,
        ),
        (
            "How widely the modules look",
            entropy_chart(f"{name}-entropy", health),
            "Entropy of the attention over the batch, relative to its largest value: 1 is uniform, 0 is one sample. "
            "Small dots: single heads.",
            {},
        ),
        (
            "Norm of the tokens",
            stats_chart(f"{name}-norm", health, "norm", "mean norm of a token"),
            "Behind each block, insertion included.",
            both,
        ),
        (
            "Effective rank of the tokens",
            stats_chart(f"{name}-rank", health, "effective_rank", "effective rank"),
            "Directions the samples of the batch take up at a position. Noise has a high rank, too: read it with the "
            "share that survives.",
            both,
        ),
    ]
    return "".join(figure(title, svg, caption, legend) for title, svg, caption, legend in drawn if svg is not None)


def loss_chart(name: str, runs: Sequence[Run], chance: float | None) -> str | None:
    """Training loss of each stream over the epochs: mean of the seeds, band from the smallest to the largest."""
    curves = {stream: _curve(runs, f"{stream}_loss") for stream in STREAMS}
    values = [v for curve in curves.values() for _, seeds in curve for v in seeds]
    if not curves["related"]:
        return None
    epochs = [epoch for curve in curves.values() for epoch, _ in curve]
    near = [chance] if chance is not None and max(values) > 0.8 * chance else []
    chart = Chart(name, count_axis(epochs, "epoch"), linear_axis([*values, *near], "training loss"))
    if near:
        chart.segment((chart.x.low, near[0]), (chart.x.high, near[0]), "divider")
        chart.heading((chart.x.low + chart.x.high) / 2, f"dotted: chance, {near[0]:.2f}")
    for stream, curve in curves.items():
        chart.band([(e, min(v)) for e, v in curve], [(e, max(v)) for e, v in curve], stream)
    for stream, curve in curves.items():
        chart.line([(e, math.fsum(v) / len(v)) for e, v in curve], stream)
    ends = [f"{STREAMS[s]} ends at {math.fsum(c[-1][1]) / len(c[-1][1]):.2f}" for s, c in curves.items() if c]
    return chart.svg("Training loss of both streams over the epochs", "; ".join(ends))


def signal_chart(name: str, health: Mapping[str, Any]) -> str | None:
    """How much of what tells related samples apart is the same under another dropout mask."""
    blocks = health.get("blocks", [])
    return _by_depth(name, blocks, {"related": series(blocks, "signal")}, _SHARES, "share that survives dropout")


def change_chart(name: str, health: Mapping[str, Any]) -> str | None:
    """What each insertion changes, and the part of it that other samples do, in percent of the tokens' norm."""
    points = health.get("points", [])
    lines = {"related": _percent(series(points, "change_quiet")), "others": _percent(series(points, "from_others"))}
    known = [v for values in lines.values() for v in values if v is not None]
    y = linear_axis([*known, 5.0], "change, % of the norm", include_zero=True)
    return _by_depth(name, points, lines, y, y.label, level=5.0)


def stats_chart(name: str, health: Mapping[str, Any], what: str, label: str) -> str | None:
    """Norm or effective rank of the tokens of each stream behind every block."""
    blocks = health.get("blocks", [])
    lines = {stream: series(blocks, stream, what) for stream in STREAMS}
    known = [v for values in lines.values() for v in values if v is not None]
    return _by_depth(name, blocks, lines, linear_axis(known, label, include_zero=True), label)


def gradient_chart(name: str, health: Mapping[str, Any]) -> str | None:
    """The gradient each stream's loss sends into the parameters of every block."""
    blocks = health.get("blocks", [])
    lines = {stream: series(blocks, "gradient", stream) for stream in STREAMS}
    lines = {stream: [v if v is None or v > 0 else None for v in values] for stream, values in lines.items()}
    known = [v for values in lines.values() for v in values if v is not None]
    return _by_depth(name, blocks, lines, decade_axis(known, "gradient norm (log)"), "gradient norm")


def entropy_chart(name: str, health: Mapping[str, Any]) -> str | None:
    """How widely each insertion looks: entropy of its attention over the largest it can have, a dot per head."""
    points = health.get("points", [])
    heads = attention_per_head(points, "entropy")
    means = [math.fsum(values) / len(values) if values else None for values in heads]
    dots = [(k + 0.5, value) for k, values in enumerate(heads) for value in values]
    return _by_depth(name, points, {"related": means}, _SHARES, "entropy of the attention", dots=dots)


def _by_depth(
    name: str,
    entries: Sequence[Mapping[str, Any]],
    lines: Mapping[str, Sequence[float | None]],
    y: Axis,
    label: str,
    level: float | None = None,
    dots: Sequence[tuple[float, float]] = (),
) -> str | None:
    """Lines over the depth; `level` is a dashed line to compare with, `dots` lie behind."""
    if not any(value is not None for values in lines.values() for value in values):
        return None
    names = short_names(entries)
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


def _percent(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]


def _curve(runs: Sequence[Run], key: str) -> list[tuple[float, list[float]]]:
    """(epoch, values of the seeds), the first epoch 1, thinned for drawing."""
    seen: dict[float, list[float]] = {}
    for run in runs:
        for epoch, value in enumerate(run.streams.get(key, []), 1):
            if value is not None:
                seen.setdefault(float(epoch), []).append(value)
    epochs = sorted(seen)
    return [(epochs[k], seen[epochs[k]]) for k in thin(range(len(epochs)), _MOST_EPOCHS)]


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
