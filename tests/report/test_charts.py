"""Axes hold their values, carry few round labels, and survive degenerate input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchformer.report.charts import count_axis, frequency_axis, linear_axis, smooth, thin

numbers = st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_linear_axis_holds_its_values_between_few_round_labels(values):
    axis = linear_axis(values)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 9
    assert len({text for _, text in axis.ticks}) == len(axis.ticks)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_frequency_axis_runs_from_frequent_to_rare_with_few_labels(counts):
    axis = frequency_axis(counts)
    places = [axis.place(max(1, count)) for count in sorted(counts, reverse=True)]
    assert places == sorted(places)
    assert 0 < places[0] <= places[-1] < 1
    assert 1 <= len(axis.ticks) <= 9


@given(st.lists(st.floats(-3, 7), min_size=1, max_size=20))
def test_linear_axis_ends_where_values_can(values):
    axis = linear_axis(values, within=(-3, 7))
    assert axis.low >= -3
    assert axis.high <= 7
    assert all(axis.low - 1e-6 <= value <= axis.high + 1e-6 for value, _ in axis.ticks)
    assert axis.low - 1e-6 <= min(values) <= max(values) <= axis.high + 1e-6


def test_axes_of_a_single_value_do_not_divide_by_zero():
    assert 0 <= linear_axis([3.0]).place(3.0) <= 1
    assert count_axis([1.0]).place(1.0) == 0
    assert linear_axis([]).place(0.5) == 0.5


def test_smoothing_keeps_a_constant_and_a_length():
    assert smooth([2.0] * 7, 1.5) == pytest.approx([2.0] * 7)
    wavy = smooth([0.0, 1.0] * 20, 4)
    assert max(wavy) - min(wavy) < 0.2


def test_thinning_keeps_first_and_last():
    kept = thin(range(1000), 240)
    assert (kept[0], kept[-1], len(kept), len(set(kept))) == (0, 999, 240, 240)
    assert thin(range(5), 240) == [0, 1, 2, 3, 4]
