"""Axes: from values to positions in a chart, and round tick labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

Bounds = tuple[float | None, float | None]
NO_BOUNDS: Bounds = (None, None)


@dataclass(frozen=True)
class Axis:
    """Maps [low, high] to [0, 1]; `reverse` runs it from right to left, `log` by powers of ten."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    label: str = ""
    log: bool = False
    reverse: bool = False
    slanted: bool = False  # labels, where names are too long to stand side by side

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        share = max(0.0, min(1.0, share))
        return 1 - share if self.reverse else share

    def holds(self, value: float) -> bool:
        slack = 1e-9 * (self.high - self.low)
        return self.low - slack <= value <= self.high + slack


def linear_axis(
    values: Sequence[float], label: str = "", *, include_zero: bool = False, within: Bounds = NO_BOUNDS
) -> Axis:
    """Round ends around the values; of values that lie `within` bounds, no end is beyond them."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    ends = low, high
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    step = round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    lowest = max(first * step, -math.inf if within[0] is None else min(ends[0], within[0]))
    highest = min(last * step, math.inf if within[1] is None else max(ends[1], within[1]))
    ticks = [(k * step, _plain(k * step, digits)) for k in range(first, last + 1)]
    inside = [tick for tick in ticks if lowest - 1e-9 * step <= tick[0] <= highest + 1e-9 * step]
    return Axis(lowest, highest, inside, label)


def count_axis(values: Sequence[float], label: str = "") -> Axis:
    """From the smallest to the largest value exactly, with whole-number ticks inside: epochs, ranks of classes."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        high = low + 1
    step = max(1.0, round_step((high - low) / 6))
    ticks = [
        (k * step, f"{k * step:.0f}") for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    return Axis(low, high, ticks, label)


def frequency_axis(counts: Sequence[float], label: str = "") -> Axis:
    """Training images per class on a logarithmic axis, the frequent classes on the left."""
    positive = [max(1.0, value) for value in counts] or [1.0]
    low, high = min(positive) / 1.15, max(positive) * 1.15
    steps = [m * 10.0**k for k in range(0, 8) for m in (1, 2, 5)]
    inside = [value for value in steps if low <= value <= high]
    while len(inside) > 9:
        inside = inside[::2]
    inside = inside or sorted({float(round(value)) for value in (min(positive), max(positive))})
    return Axis(low, high, [(value, f"{value:.0f}") for value in inside], label, log=True, reverse=True)


def decade_axis(values: Sequence[float], label: str = "") -> Axis:
    """Logarithmic, from a power of ten below the values to one above."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = math.floor(math.log10(min(positive)) + 1e-9), math.ceil(math.log10(max(positive)) - 1e-9)
    last = max(last, first + 1)
    step = max(1, math.ceil((last - first) / 6))
    ticks = [(10.0**k, f"{10.0**k:g}") for k in range(first, last + 1, step)]
    return Axis(10.0**first, 10.0**last, ticks, label, log=True)


def named_axis(names: Sequence[str], label: str = "") -> Axis:
    """A place for each name, the first at 0.5, the next at 1.5; so many are written that they fit."""
    shown = thin(range(len(names)), 13 if max(map(len, names), default=0) < 4 else 6)
    return Axis(0, max(len(names), 1), [(k + 0.5, names[k]) for k in shown], label)


def with_names(axis: Axis, first: float, names: Sequence[str]) -> Axis:
    """The axis with a name at each whole step from `first`; long names are cut and slanted."""
    ticks = [(first + k, short_name(name, 14)) for k, name in enumerate(names)]
    return replace(axis, ticks=ticks, slanted=max(map(len, names)) > 3)


def short_name(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Gaussian-weighted moving average; near the ends the weights that would fall outside are left out."""
    reach = math.ceil(3 * width)
    smoothed = []
    for i in range(len(values)):
        near = range(max(0, i - reach), min(len(values), i + reach + 1))
        weights = [math.exp(-0.5 * ((j - i) / width) ** 2) for j in near]
        smoothed.append(math.fsum(w * values[j] for w, j in zip(weights, near, strict=True)) / math.fsum(weights))
    return smoothed


def thin(indices: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly spaced, first and last always kept."""
    if len(indices) <= most:
        return list(indices)
    stride = (len(indices) - 1) / (most - 1)
    return [indices[round(k * stride)] for k in range(most)]


def _plain(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) != 0 else text.lstrip("-")
