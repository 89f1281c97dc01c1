"""A chart of the report as an SVG file with its own colours."""

from collections.abc import Mapping, Sequence
from html import escape

from batchformer.report.charts import WIDTH, XY, Chart

# on light, on dark: each far from all others, or lines beside each other are taken for one
_COLOURS = (("#c2410c", "#fb923c"), ("#1d4ed8", "#fcd34d"), ("#7c3aed", "#c4b5fd"), ("#64748b", "#94a3b8"),
            ("#0e7490", "#67e8f9"), ("#15803d", "#4ade80"), ("#be185d", "#f9a8d4"), ("#111827", "#f1f5f9"))  # fmt: skip
_STYLE = """text{font:12px system-ui,sans-serif;fill:#334155}.tick{font-size:11px}.tick.y{text-anchor:end}
.tick.x,.label{text-anchor:middle}.grid{stroke:#cbd5e1;stroke-width:.6}.axis,.mark,.zero{stroke:#64748b}
.line{fill:none;stroke-width:2}.dot{fill:none;stroke:#64748b;stroke-width:1.3}
.divider{stroke:#64748b;stroke-dasharray:2 4}.whisker{stroke:#1d4ed8;stroke-width:3;stroke-linecap:round}
svg{background:#fff}"""
_DARK = "text{fill:#cbd5e1}.grid{stroke:#334155}.whisker{stroke:#fcd34d}.dot{stroke:#cbd5e1}svg{background:#0f172a}"


def lines_svg(chart: Chart, lines: Mapping[str, Sequence[XY]], title: str, description: str) -> str:
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
