"""How the cost of the layer grows, as charts: `python -m batchformer.report.growth_charts growth.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchformer.report.charts import Chart, Point, lines_svg
from batchformer.report.scales import decade_axis

Row = Mapping[str, Any]


def _ratio(row: Row) -> float | None:
    attention, products = row["attention_ms"], row["products_ms"]
    return attention / products if attention and products else None


_CHARTS: dict[str, tuple[str, str, Callable[[Row], float | None]]] = {
    "time": ("Time of the layer, forward and backward", "milliseconds", lambda row: row["fast_ms"]),
    "memory": ("Peak memory of the layer, forward and backward", "GiB", lambda row: row["fast_gib"]),
    "memory-lean": ("Peak memory with memory=lean", "GiB", lambda row: row["lean_gib"]),
    "attention": ("Attention over the matrix products: above 1 it overtakes them", "ratio of times", _ratio),
}


def write_growth_charts(rows: Sequence[Row], source: Path) -> list[Path]:
    """One SVG beside `source` for each quantity that was measured, a line for each number of positions."""
    written = []
    for name, (title, label, value) in _CHARTS.items():
        lines: dict[str, list[Point]] = {}
        for row in sorted(rows, key=lambda row: (row["shape"][1], row["shape"][0])):
            found = value(row)
            if found:  # zero has no place on this axis either
                lines.setdefault(f"{row['shape'][1]:,} positions", []).append((float(row["shape"][0]), float(found)))
        if not lines:
            continue
        points = [point for line in lines.values() for point in line]
        chart = Chart(name, decade_axis([x for x, _ in points], "batch"), decade_axis([y for _, y in points], label))
        ends = "; ".join(f"{which}: {line[-1][1]:.3g} at a batch of {line[-1][0]:.0f}" for which, line in lines.items())
        target = source.with_name(f"{source.stem}-{name}.svg")
        target.write_text(lines_svg(chart, lines, title, ends), encoding="utf-8")
        written.append(target)
    return written


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        write_growth_charts(json.loads(file.read_text(encoding="utf-8"))["rows"], file)
