"""Every statistic agrees with scipy, which the package itself does not import."""

import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from batchformer.errors import UserError
from batchformer.report.statistics import (
    paired_difference,
    spearman,
    student_t_cdf,
    student_t_quantile,
    summarise,
)

values = st.floats(-100, 100, allow_nan=False).map(lambda v: round(v, 3))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 98, 1000])
@pytest.mark.parametrize("probability", [0.001, 0.025, 0.3, 0.5, 0.9, 0.975, 0.995, 0.99999])
def test_t_quantile_agrees_with_scipy(probability, freedom):
    expected = scipy.stats.t.ppf(probability, freedom)
    assert student_t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@given(st.floats(-60, 60), st.integers(1, 500))
def test_t_cdf_agrees_with_scipy(t, freedom):
    assert student_t_cdf(t, freedom) == pytest.approx(scipy.stats.t.cdf(t, freedom), rel=1e-7, abs=1e-13)


@given(st.lists(st.tuples(values, values), min_size=2, max_size=8))
def test_interval_of_the_paired_difference_agrees_with_scipy(pairs):
    before, after = zip(*pairs, strict=True)
    mean, low, high = paired_difference(before, after)
    differences = [b - a for a, b in pairs]
    if math.isclose(min(differences), max(differences), abs_tol=1e-9):
        assert low == pytest.approx(mean, abs=1e-6)
        assert high == pytest.approx(mean, abs=1e-6)
        return
    expected = scipy.stats.ttest_rel(after, before).confidence_interval(0.95)
    assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-6)


def test_difference_is_treated_minus_baseline():
    assert paired_difference([1.0, 2.0], [3.0, 4.5]).mean == pytest.approx(2.25)


def test_one_pair_has_a_mean_and_no_interval():
    assert paired_difference([50.0], [51.5]) == (1.5, None, None)
    assert summarise([50.0]) == (50.0, None)


def test_deviation_is_the_sample_deviation():
    sample = [49.1, 50.3, 48.8, 50.0]
    assert summarise(sample).sd == pytest.approx(scipy.stats.tstd(sample))


def test_pairs_that_do_not_match_are_refused():
    with pytest.raises(UserError, match="2 and 1"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(UserError, match="at least one value"):
        summarise([])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=40))
def test_spearman_with_ties_agrees_with_scipy(pairs):
    x, y = zip(*pairs, strict=True)
    ours = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert ours is None
        return
    expected = scipy.stats.spearmanr(x, y)
    assert ours.rho == pytest.approx(expected.statistic, abs=1e-12)
    assert ours.p == pytest.approx(expected.pvalue, abs=1e-8)
