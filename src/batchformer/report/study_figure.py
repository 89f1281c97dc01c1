"""A study as a picture: every seed of every variant, against the mean of the baseline."""

from __future__ import annotations

from batchformer.report.charts import Chart
from batchformer.report.comparison import by_seed
from batchformer.report.measures import measure_of
from batchformer.report.scales import Axis, linear_axis
from batchformer.report.statistics import summarise
from batchformer.report.studies import Study, Variant
from batchformer.report.svg_file import chart_svg

CAPTION = "A ring is a seed, the bar their mean; dotted: the mean of the baseline."


def study_chart(name: str, study: Study) -> tuple[Chart, str] | None:
    """A row of rings for each variant, and the means in words; None where there is nothing to compare."""
    found = [(variant, _seeds(variant)) for variant in study.variants]
    found = [(variant, seeds) for variant, seeds in found if seeds]
    if len(found) < 2:
        return None
    names = [variant.name or variant.method for variant, _ in found]
    rows = len(found)
    measure = measure_of(run.metrics for variant, _ in found for run in variant.runs)
    x = linear_axis([value for _, seeds in found for value in seeds.values()], f"{measure.name}, %")
    y = Axis(0, rows, [(rows - k - 0.5, each) for k, each in enumerate(names)])
    chart = Chart(name, x, y, left=max(64, 7 * max(map(len, names)) + 16), height=80 + 24 * rows)
    words = []
    for k, (variant, seeds) in enumerate(found):
        level, mean = rows - k - 0.5, summarise(list(seeds.values())).mean
        if variant is study.reference:
            chart.divider(mean)
        tips = [f"{names[k]}, seed {seed}: {value:.2f} %" for seed, value in seeds.items()]
        chart.dots([(value, level) for value in seeds.values()], "others", tips, radius=4)
        chart.segment((mean, level - 0.34), (mean, level + 0.34), "whisker batchformer")
        words.append(f"{names[k]} {mean:.2f} %")
    return chart, "; ".join(words)


def study_picture(study: Study) -> str | None:
    """As a file of its own, for pages that are Markdown."""
    drawn = study_chart("seeds", study)
    return None if drawn is None else chart_svg(drawn[0], f"Every seed of the study {study.base}", drawn[1])


def picture_name(study: Study) -> str:
    return f"study-{study.base}.svg"


def _seeds(variant: Variant) -> dict[int, float]:
    return by_seed([run.raw for run in variant.runs], variant.method, "all")
