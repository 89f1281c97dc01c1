"""Pictures of the two streams: their losses over the epochs, and per depth what `stream_health.json` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from batchformer.report.charts import Chart
from batchformer.report.health import attention_per_head, series, short_names
from batchformer.report.runs import Run
from batchformer.report.scales import Axis, count_axis, decade_axis, linear_axis, named_axis, thin

STREAMS = {"plain": "plain stream", "related": "related stream"}
_MOST_EPOCHS = 240
_SHARES = Axis(0, 1, [(k / 5, f"{k / 5:g}") for k in range(6)])


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
