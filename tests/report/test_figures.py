"""Learning curves: the end of a run is always drawn, and a steep start does not press it together."""

import re

import pytest
from made_up import write

from batchformer.metrics.measures import Measure
from batchformer.report import load_runs
from batchformer.report.figures import curve_chart

ERROR = Measure("error", "Error", unit="mm", better="lower", primary=True, bounds=(0, None))


def drawn(folder, values):
    """How many epochs of a run with these values are drawn, and whether some were left out."""
    history = [{"epoch": epoch, "error": value} for epoch, value in enumerate(values)]
    one = {"recipe": "r", "variant": "v", "target": None, "reference": "v", "seed": 0, "steps": 1,
           "measures": [ERROR.as_dict()], "metrics": {"error": values[-1]}, "history": history}  # fmt: skip
    write(folder, [one])
    curve = curve_chart("c", load_runs([folder]), ["v"], "error", "error, mm", ERROR)
    line = re.search(r'<polyline class="line [^"]*" points="([^"]+)"', curve[0])
    return len(line[1].split()), curve[1]


@pytest.mark.parametrize("values", [[2.7, 2.6, 2.9], [2.0] * 15 + [9.0], [5.0, 4.0, 3.0, 2.0, 8.0]])
def test_a_run_that_got_worse_at_its_end_shows_it(tmp_path, values):
    assert drawn(tmp_path, values) == (len(values), False)


def test_a_steep_start_is_left_out(tmp_path):
    count, left_out = drawn(tmp_path, [90.0, 60.0, *([2.0, 2.1] * 9)])
    assert left_out
    assert count == 18
