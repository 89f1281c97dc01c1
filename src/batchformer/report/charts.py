"""Axes, and charts as one SVG inside a page, whose style sheet colours it by class names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 46
STYLES = 8  # that page.css has for variants, v0 to v7: each a colour and a dash pattern

XY = tuple[float, float]
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


def variant_styles(variants: Sequence[str]) -> dict[str, str]:
    """Variant -> class name of its marks; the reference, which is the first, is always v0."""
    return {variant: f"v{k if k < STYLES else 1 + (k - 1) % (STYLES - 1)}" for k, variant in enumerate(variants)}


class Chart:
    """Axes first, then marks in drawing order, then `svg()`. `name` makes its ids unique in the page."""

    def __init__(self, name: str, x: Axis, y: Axis, *, left: int = LEFT, height: int = HEIGHT) -> None:
        self.name, self.x, self.y = name, x, y
        slant = 6.4 * max((len(text) for _, text in x.ticks), default=0) if x.slanted else 0
        if y.label:  # room for long numbers (18.966) between the label and the axis
            left = max(left, 34 + round(6.4 * max((len(text) for _, text in y.ticks), default=0)))
        self.left, self.height, self.bottom = left, height + round(slant), BOTTOM + round(slant)
        self._marks: list[str] = []

    def at(self, x: float, y: float) -> XY:
        """Position of a data point in the SVG."""
        across = self.left + self.x.place(x) * (WIDTH - self.left - RIGHT)
        down = self.height - self.bottom - self.y.place(y) * (self.height - TOP - self.bottom)
        return across, down

    def line(self, points: Sequence[XY], style: str) -> None:
        if len(points) == 1:
            self.dots(points, style)
        elif points:
            self._marks.append(f'<polyline class="line {style}" points="{self._path(points)}"/>')

    def band(self, low: Sequence[XY], high: Sequence[XY], style: str) -> None:
        if len(low) > 1:
            outline = self._path([*low, *reversed(high)])
            self._marks.append(f'<polygon class="band {style}" points="{outline}"/>')

    def dots(self, points: Sequence[XY], style: str, tips: Sequence[str] = (), radius: float = 3) -> None:
        """Circles; a tip is the text shown when the pointer rests on one."""
        for k, point in enumerate(points):
            cx, cy = self.at(*point)
            tip = f"<title>{escape(tips[k])}</title>" if tips else ""
            self._marks.append(f'<circle class="dot {style}" cx="{cx:.1f}" cy="{cy:.1f}" r="{radius:g}">{tip}</circle>')

    def bar(self, x_from: float, x_to: float, value: float, style: str, tip: str) -> None:
        """A bar from zero to the value."""
        (x0, y0), (x1, y1) = self.at(x_from, 0), self.at(x_to, value)
        self._marks.append(
            f'<rect class="bar {style}" x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" '
            f'height="{max(abs(y1 - y0), 0.6):.1f}"><title>{escape(tip)}</title></rect>'
        )

    def number(self, point: XY, text: str) -> None:
        """A small number above a bar."""
        x, y = self.at(*point)
        self._marks.append(f'<text class="number" x="{x:.1f}" y="{y - 5:.1f}">{escape(text)}</text>')

    def segment(self, start: XY, end: XY, style: str) -> None:
        (x0, y0), (x1, y1) = self.at(*start), self.at(*end)
        self._marks.append(f'<line class="{style}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')

    def interval(self, start: XY, end: XY, style: str) -> None:
        """A line between two points; an end that lies beyond the axes is an arrow at their border."""
        self.segment(start, end, f"whisker {style}".rstrip())
        for point, other in ((start, end), (end, start)):
            (x, y), (x0, y0) = self.at(*point), self.at(*other)
            if self.x.holds(point[0]) and self.y.holds(point[1]):
                continue
            tip = ((x > x0) - (x < x0), (y > y0) - (y < y0))  # a step along the line, away from its other end
            sides = [(x - 7 * tip[0] + k * tip[1], y - 7 * tip[1] + k * tip[0]) for k in (-4.5, 4.5)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in ((x, y), *sides))
            self._marks.append(f'<polygon class="arrow {style}" points="{corners}"/>')

    def divider(self, x: float) -> None:
        """A dashed vertical line over the whole height: a border between groups of classes."""
        self.segment((x, self.y.low), (x, self.y.high), "divider")

    def heading(self, x: float, text: str) -> None:
        """A small word above the plot, centred at x as far as it fits."""
        across, _ = self.at(x, self.y.high)
        half = 3.6 * len(text)
        across = min(max(across, half), WIDTH - half)
        self._marks.append(f'<text class="heading" x="{across:.1f}" y="{TOP - 8}">{escape(text)}</text>')

    def svg(self, title: str, description: str) -> str:
        """The SVG text; title and description are for screen readers."""
        head, body = f"{self.name}-title", f"{self.name}-desc"
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-labelledby="{escape(head)} {escape(body)}">'
            f'<title id="{escape(head)}">{escape(title)}</title><desc id="{escape(body)}">{escape(description)}</desc>'
            f"{self._frame()}{''.join(self._marks)}</svg>"
        )

    def _frame(self) -> str:
        parts = []
        bottom, right = self.height - self.bottom, WIDTH - RIGHT
        for value, text in self.y.ticks:
            _, y = self.at(self.x.low, value)
            style = "zero" if value == 0 and self.y.low < 0 else "grid"
            parts.append(f'<line class="{style}" x1="{self.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick y" x="{self.left - 7}" y="{y:.1f}" dy="0.35em">{escape(text)}</text>')
        for value, text in self.x.ticks:
            x, _ = self.at(value, self.y.low)
            style = "zero" if value == 0 and self.x.low < 0 else "mark"
            top = TOP if style == "zero" else bottom
            parts.append(f'<line class="{style}" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom + 4}"/>')
            turned = f'transform="translate({x + 4:.1f} {bottom + 14}) rotate(-60)"'
            inside = min(x, WIDTH - 3.8 * len(text))  # the last number may be wider than what is left of the picture
            place = f'slanted" {turned}' if self.x.slanted else f'x" x="{inside:.1f}" y="{bottom + 18}"'
            parts.append(f'<text class="tick {place}>{escape(text)}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        middle = (self.left + right) / 2
        parts.append(f'<text class="label" x="{middle:.1f}" y="{self.height - 6}">{escape(self.x.label)}</text>')
        if self.y.label:
            centre = (TOP + bottom) / 2
            parts.append(
                f'<text class="label" transform="translate(12 {centre:.1f}) rotate(-90)">{escape(self.y.label)}</text>'
            )
        return "".join(parts)

    def _path(self, points: Sequence[XY]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)
