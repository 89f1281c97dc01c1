"""A chart as one SVG: inside a page, whose style sheet colours it by class names, or as a file with its own colours."""

from collections.abc import Mapping, Sequence
from html import escape

from batchformer.report.scales import Axis

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 46
STYLES = 8  # that page.css has for variants, v0 to v7: each a colour and a dash pattern

Point = tuple[float, float]


def variant_styles(variants: Sequence[str]) -> dict[str, str]:
    """Variant -> class name of its marks; the reference, which is the first, is always v0."""
    return {variant: f"v{k if k < STYLES else 1 + (k - 1) % (STYLES - 1)}" for k, variant in enumerate(variants)}


class Chart:
    """Axes first, then marks in drawing order, then `svg()`. `name` makes its ids unique in the page."""

    def __init__(self, name: str, x: Axis, y: Axis, *, left: int = LEFT, height: int = HEIGHT) -> None:
        self.name, self.x, self.y = name, x, y
        self.left, self.height = left, height
        self._marks: list[str] = []

    def at(self, x: float, y: float) -> Point:
        """Place of a data point on the paper."""
        across = self.left + self.x.place(x) * (WIDTH - self.left - RIGHT)
        down = self.height - BOTTOM - self.y.place(y) * (self.height - TOP - BOTTOM)
        return across, down

    def line(self, points: Sequence[Point], style: str) -> None:
        if len(points) == 1:
            self.dots(points, style)
        elif points:
            self._marks.append(f'<polyline class="line {style}" points="{self._path(points)}"/>')

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        if len(low) > 1:
            outline = self._path([*low, *reversed(high)])
            self._marks.append(f'<polygon class="band {style}" points="{outline}"/>')

    def dots(self, points: Sequence[Point], style: str, tips: Sequence[str] = (), radius: float = 3) -> None:
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

    def segment(self, start: Point, end: Point, style: str) -> None:
        (x0, y0), (x1, y1) = self.at(*start), self.at(*end)
        self._marks.append(f'<line class="{style}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>')

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
        """The finished picture; title and description are what a screen reader says."""
        head, body = f"{self.name}-title", f"{self.name}-desc"
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-labelledby="{escape(head)} {escape(body)}">'
            f'<title id="{escape(head)}">{escape(title)}</title><desc id="{escape(body)}">{escape(description)}</desc>'
            f"{self._frame()}{''.join(self._marks)}</svg>"
        )

    def _frame(self) -> str:
        parts = []
        bottom, right = self.height - BOTTOM, WIDTH - RIGHT
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
            parts.append(f'<text class="tick x" x="{x:.1f}" y="{bottom + 18}">{escape(text)}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
        middle = (self.left + right) / 2
        parts.append(f'<text class="label" x="{middle:.1f}" y="{self.height - 6}">{escape(self.x.label)}</text>')
        if self.y.label:
            centre = (TOP + bottom) / 2
            parts.append(
                f'<text class="label" transform="translate(12 {centre:.1f}) rotate(-90)">{escape(self.y.label)}</text>'
            )
        return "".join(parts)

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*self.at(*point)) for point in points)


# on light, on dark: each far from all others, or lines beside each other are taken for one
_COLOURS = (("#c2410c", "#fb923c"), ("#1d4ed8", "#fcd34d"), ("#7c3aed", "#c4b5fd"), ("#64748b", "#94a3b8"),
            ("#0e7490", "#67e8f9"), ("#15803d", "#4ade80"), ("#be185d", "#f9a8d4"), ("#111827", "#f1f5f9"))  # fmt: skip
_STYLE = """text{font:12px system-ui,sans-serif;fill:#334155}.tick{font-size:11px}.tick.y{text-anchor:end}
.tick.x,.label{text-anchor:middle}.grid{stroke:#cbd5e1;stroke-width:.6}.axis,.mark,.zero{stroke:#64748b}
.line{fill:none;stroke-width:2}.dot{fill:none;stroke:#64748b;stroke-width:1.3}
.divider{stroke:#64748b;stroke-dasharray:2 4}.whisker{stroke:#1d4ed8;stroke-width:3;stroke-linecap:round}
svg{background:#fff}"""
_DARK = "text{fill:#cbd5e1}.grid{stroke:#334155}.whisker{stroke:#fcd34d}.dot{stroke:#cbd5e1}svg{background:#0f172a}"


def lines_svg(chart: Chart, lines: Mapping[str, Sequence[Point]], title: str, description: str) -> str:
    """The lines drawn into the chart, named to the right of it."""
    names = list(lines)
    for k, points in enumerate(lines.values()):
        chart.line(points, f"s{k}")
    light = "".join(f".s{k}{{stroke:{_COLOURS[k % len(_COLOURS)][0]}}}" for k in range(len(names)))
    dark = "".join(f".s{k}{{stroke:{_COLOURS[k % len(_COLOURS)][1]}}}" for k in range(len(names)))
    legend = "".join(
        f'<line class="line s{k}" x1="{WIDTH + 8}" x2="{WIDTH + 30}" y1="{34 + 20 * k}" y2="{34 + 20 * k}"/>'
        f'<text x="{WIDTH + 37}" y="{38 + 20 * k}">{escape(name)}</text>'
        for k, name in enumerate(names)
    )
    return _file(chart, title, description, legend, 200, light, dark)


def chart_svg(chart: Chart, title: str, description: str) -> str:
    """A chart of rings, bars and dividers as it is."""
    return _file(chart, title, description)


def _file(
    chart: Chart, title: str, description: str, beside: str = "", room: int = 0, light: str = "", dark: str = ""
) -> str:
    style = f"<style>{_STYLE}{light}@media(prefers-color-scheme:dark){{{_DARK}{dark}}}</style>"
    head, rest = chart.svg(title, description).split(">", 1)
    size = f'width="{WIDTH + room}" height="{chart.height}"'
    head = head.replace(f'viewBox="0 0 {WIDTH} ', f'viewBox="0 0 {WIDTH + room} ')
    head = head.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" {size}')
    return f"{head}>{style}{rest.removesuffix('</svg>')}{beside}</svg>\n"
