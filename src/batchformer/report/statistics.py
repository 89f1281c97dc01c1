"""Mean, deviation, paired difference with its 95 % interval, rank correlation: in pure Python, so that commands which
only read result files start without numpy or scipy (the tests compare every function with `scipy.stats`)."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from batchformer.errors import UserError


class Summary(NamedTuple):
    """Mean and sample standard deviation; `sd` is None for a single value."""

    mean: float
    sd: float | None


class PairedDifference(NamedTuple):
    """Mean of the differences and its confidence interval; the ends are None for a single pair."""

    mean: float
    low: float | None
    high: float | None


class RankCorrelation(NamedTuple):
    """Spearman's rho and its two-sided p value (t approximation); p is None with fewer than three values."""

    rho: float
    p: float | None


def summarise(values: Sequence[float]) -> Summary:
    """Mean and standard deviation over seeds (n - 1 in the denominator)."""
    if not values:
        raise UserError("a mean needs at least one value, got none")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def paired_difference(
    baseline: Sequence[float], treated: Sequence[float], confidence: float = 0.95
) -> PairedDifference:
    """`treated - baseline`, pair by pair (entry k of both comes from the same seed), with a Student t interval.

    Seeds share initial weights and data order between the methods, so pairing removes the deviation they share.
    """
    if len(baseline) != len(treated):
        raise UserError(f"paired values must match one to one, got {len(baseline)} and {len(treated)}")
    mean, sd = summarise([b - a for a, b in zip(baseline, treated, strict=True)])
    if sd is None:
        return PairedDifference(mean, None, None)
    half = student_t_quantile(0.5 + confidence / 2, len(baseline) - 1) * sd / math.sqrt(len(baseline))
    return PairedDifference(mean, mean - half, mean + half)


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) through the regularised incomplete beta function: 1 - I_{v / (v + t^2)}(v/2, 1/2) / 2 for t >= 0."""
    tail = 0.5 * _regularised_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def student_t_quantile(probability: float, freedom: int) -> float:
    """The t with P(T <= t) = probability, by bisection on the tail (it keeps the digits)."""
    if not 0 < probability < 1 or freedom < 1:
        raise UserError(f"no t quantile for probability {probability} and {freedom} degrees of freedom")
    if probability < 0.5:
        return -student_t_quantile(1 - probability, freedom)
    tail = 1 - probability
    low, high = 0.0, 1.0
    while student_t_cdf(-high, freedom) > tail:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if student_t_cdf(-middle, freedom) > tail:
            low = middle
        else:
            high = middle


def spearman(x: Sequence[float], y: Sequence[float]) -> RankCorrelation | None:
    """Rank correlation with ties sharing their mean rank; None where it is not defined (a constant side, one value)."""
    if len(x) != len(y):
        raise UserError(f"a rank correlation needs as many x as y, got {len(x)} and {len(y)}")
    count = len(x)
    if count < 2:
        return None
    centre = (count + 1) / 2
    from_x, from_y = ([rank - centre for rank in _mean_ranks(values)] for values in (x, y))
    var_x, var_y = (math.fsum(d * d for d in distances) for distances in (from_x, from_y))
    if var_x == 0 or var_y == 0:
        return None
    covariance = math.fsum(a * b for a, b in zip(from_x, from_y, strict=True))
    rho = max(-1.0, min(1.0, covariance / math.sqrt(var_x * var_y)))
    if count < 3:
        return RankCorrelation(rho, None)
    if abs(rho) == 1:
        return RankCorrelation(rho, 0.0)
    t = abs(rho) * math.sqrt((count - 2) / (1 - rho * rho))
    return RankCorrelation(rho, 2 * student_t_cdf(-t, count - 2))


def _mean_ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values]


def _regularised_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction, mirrored (1 - I_{1-x}(b, a)) where that converges."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _regularised_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    return front * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function, evaluated forwards (modified Lentz)."""
    tiny = 1e-300

    def guarded(value: float) -> float:
        return value if abs(value) > tiny else tiny

    numerator_ratio, denominator_ratio = 1.0, 1 / guarded(1 - (a + b) * x / (a + 1))
    value = denominator_ratio
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            denominator_ratio = 1 / guarded(1 + coefficient * denominator_ratio)
            numerator_ratio = guarded(1 + coefficient / numerator_ratio)
            step = denominator_ratio * numerator_ratio
            value *= step
        if abs(step - 1) < 1e-16:
            break
    return value
