"""Mean, deviation, paired difference with its 95 % interval, rank correlation: in pure Python, so that commands which
only read result files start without numpy or scipy (the tests compare every function with `scipy.stats`)."""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
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


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def summarise(values: Sequence[float]) -> Summary:
    """Mean and standard deviation over seeds (n - 1 in the denominator)."""
    if not values:
        raise UserError("a mean needs at least one value, got none")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Summary(mean, None)
    return Summary(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def paired_difference(baseline: Sequence[float], treated: Sequence[float]) -> PairedDifference:
    """`treated - baseline`, pair by pair (entry k of both comes from the same seed), with Student's 95 % interval.

    Seeds share initial weights and data order between the methods, so pairing removes the deviation they share.
    """
    if len(baseline) != len(treated):
        raise UserError(f"paired values must match one to one, got {len(baseline)} and {len(treated)}")
    mean, sd = summarise([b - a for a, b in zip(baseline, treated, strict=True)])
    if sd is None:
        return PairedDifference(mean, None, None)
    half = student_t_quantile(0.975, len(baseline) - 1) * sd / math.sqrt(len(baseline))
    return PairedDifference(mean, mean - half, mean + half)


def student_t_cdf(t: float, freedom: int) -> float:
    """P(T <= t), by the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan2(t, math.sqrt(freedom)), freedom % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    term, terms = (cosine if odd else 1.0), []
    for k in range(2 + odd, freedom + 1, 2):
        terms.append(term)
        term *= cosine * cosine * (k - 1) / k
    between = 2 / math.pi * (angle + sine * math.fsum(terms)) if odd else sine * math.fsum(terms)
    return max(0.0, 0.5 + between / 2)


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
    try:
        rho = max(-1.0, min(1.0, statistics.correlation(_mean_ranks(x), _mean_ranks(y))))
    except statistics.StatisticsError:
        return None
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
