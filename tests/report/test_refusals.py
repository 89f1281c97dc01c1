"""Numbers that cannot be compared or drawn are refused in a sentence, or have a fallback."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchformer.errors import UserError
from batchformer.report.charts import round_step
from batchformer.report.comparison import compare_runs, format_difference
from batchformer.report.health import read_health, reading
from batchformer.report.statistics import paired_difference, spearman, student_t_quantile

from .made_up import result


def test_pairs_match_one_to_one():
    with pytest.raises(UserError, match="must match one to one, got 2 and 1"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(UserError, match="needs as many x as y, got 2 and 1"):
        spearman([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 1), (1.0, 1), (0.5, 0)])
def test_a_quantile_has_a_probability_between_0_and_1_and_a_degree_of_freedom(probability, freedom):
    assert student_t_quantile(0.75, 1) == pytest.approx(1.0)
    assert student_t_quantile(0.25, 1) == pytest.approx(-1.0)
    with pytest.raises(UserError, match=f"no t quantile for probability {probability} and {freedom} degrees"):
        student_t_quantile(probability, freedom)


def test_a_table_is_of_one_recipe():
    with pytest.raises(UserError, match="got a, b: compare them one by one"):
        compare_runs([result("b"), result("a")])
    with pytest.raises(UserError, match="got none: compare"):
        compare_runs([])


def test_axes_step_by_1_2_or_5_times_a_power_of_ten():
    steps = {0.0: 1.0, -1.0: 1.0, 1.0: 1.0, 1.01: 2.0, 2.0: 2.0, 2.1: 5.0, 5.0: 5.0, 5.1: 10.0, 0.03: 0.05, 300: 500}
    assert {given: round_step(given) for given in steps} == pytest.approx(steps)


def test_no_difference_is_a_dash():
    assert format_difference(None) == "–"
    assert format_difference(paired_difference([1.0], [1.5])) == "+0.50 (one seed)"


@pytest.mark.parametrize("health", [[], {"points": {}}, {"blocks": [1]}, {"points": [], "blocks": None}])
def test_other_content_is_no_measurement_of_the_streams(health):
    assert read_health({"stream_health": {"points": [{}]}}, Path("result.json")) == {"points": [{}]}
    with pytest.raises(UserError, match="is not a measurement of the streams"):
        read_health({"stream_health": health}, Path("result.json"))


@pytest.mark.parametrize(
    ("related", "plain", "told"),
    [
        (1.94, 1.0, "stays at chance (1.94): nothing"),
        (1.94, 1.7, "stays at chance (1.94): nothing"),
        (1.94, 1.71, "stays at chance (1.94) and the plain one is near it (1.71): nothing"),
    ],
)
def test_a_related_loss_within_three_percent_of_chance_has_learnt_nothing(related, plain, told):
    read = reading({"chance": 2.0, "related_loss": related, "plain_loss": plain})
    assert read.alive is False
    assert told in read.sentence
    assert reading({"chance": 2.0, "related_loss": 1.939, "plain_loss": plain}).alive is not False
