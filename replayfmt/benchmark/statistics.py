"""Statistics of measured times: median with its confidence interval, mean, spread, extremes, outliers.

Plain arithmetic over numpy arrays; does not depend on clocks, plans or reports. Times keep their unit (nanoseconds
everywhere in this package). A figure that the sample is too small for is None, and `reasons` says why: the standard
deviation of one time is unknown, not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from replayfmt.benchmark.reports.units import duration

CONFIDENCE = 0.95
# With fewer times, no pair of them encloses the median with 95% confidence: 1 - 2 / 2**6 is the first value above it.
SMALLEST_FOR_INTERVAL = 6
# Up to here the binomial tail is summed exactly; beyond, its normal approximation picks the same ranks or safer ones.
LARGEST_EXACT = 1000
# Runs above and below the median of fewer times tell little.
_SMALLEST_FOR_RUNS = 20
_RARE = 2.326  # standard deviations: what is as far away, or farther, happens once in a hundred
# Quartiles of fewer times are single times.
SMALLEST_FOR_QUARTILES = 4
# J. W. Tukey's fences: times this many interquartile ranges outside the quartiles are outliers.
FENCE = 1.5
# A time of fewer steps of its clock is not even known to an eighth of itself: rounding is half a step.
LEAST_STEPS = 4
# A median whose interval spans more than this factor is not even known by its order of magnitude.
MOST_SPAN = 10.0


@dataclass(frozen=True)
class Interval:
    """Two measured times that enclose the true median with at least `confidence`; about that where times depend on each
    other. `independent` is how many independent times would tell as much: at most as many as there are."""

    low: float
    high: float
    confidence: float
    independent: float


@dataclass(frozen=True)
class Outliers:
    """How many times lie below and above Tukey's fences. They are counted in every figure: none is dropped."""

    low: int
    high: int


@dataclass(frozen=True)
class TimeStatistics:
    """Figures over `count` times. Fields that the sample is too small for are None; `reasons` maps them to why."""

    count: int
    median: float
    mean: float
    minimum: float
    maximum: float
    standard_deviation: float | None  # of the sample: divided by count - 1
    interval: Interval | None  # of the median
    quartiles: tuple[float, float] | None = None  # the first and the third
    outliers: Outliers | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def half_width(self) -> float | None:
        """Half the width of the median's interval, as a share of the median; None if there is no interval, or the
        median is 0."""
        if self.interval is None or self.median <= 0:
            return None
        return (self.interval.high - self.interval.low) / 2 / self.median

    @property
    def variation(self) -> float | None:
        """The coefficient of variation, standard deviation over mean; None if either is unknown or the mean is 0."""
        if self.standard_deviation is None or self.mean == 0:
            return None
        return self.standard_deviation / self.mean


def summarize(times: Sequence[float] | np.ndarray) -> TimeStatistics:
    """Statistics over `times`. Raises ValueError for an empty sample."""
    values = np.asarray(times, dtype=np.float64)
    if values.size == 0:
        raise ValueError("statistics need at least one time")
    reasons: dict[str, str] = {}
    deviation: float | None = None
    if values.size > 1:
        deviation = float(values.std(ddof=1))
    else:
        reasons["standard_deviation"] = "one iteration has no spread; two are needed"
    interval = median_interval(values)
    if interval is None:
        reasons["interval"] = (
            f"{values.size} iterations cannot enclose the median with {CONFIDENCE:.0%} confidence; "
            f"{SMALLEST_FOR_INTERVAL} are needed"
        )
    quartiles, outliers = _quartiles(values)
    if quartiles is None:
        reasons["quartiles"] = f"{values.size} iterations have no quartiles; {SMALLEST_FOR_QUARTILES} are needed"
    return TimeStatistics(
        int(values.size),
        float(np.median(values)),
        float(values.mean()),
        float(values.min()),
        float(values.max()),
        deviation,
        interval,
        quartiles,
        outliers,
        reasons,
    )


def _quartiles(values: np.ndarray) -> tuple[tuple[float, float] | None, Outliers | None]:
    """The first and third quartile (interpolated linearly), and how many values lie outside Tukey's fences."""
    if values.size < SMALLEST_FOR_QUARTILES:
        return None, None
    first, third = (float(each) for each in np.percentile(values, (25, 75)))
    reach = FENCE * (third - first)
    low, high = int((values < first - reach).sum()), int((values > third + reach).sum())
    return (first, third), Outliers(low, high)


def why_unmeasurable(times: TimeStatistics, step_ns: float | None, *, noise: bool) -> str:
    """Why these times are no measurement; empty if they are one.

    `step_ns` is the smallest step of the clock as it counts for one of these times, None if it is unknown. `noise`: a
    median that is not known to its order of magnitude counts as none, too.
    """
    if times.median <= 0:
        return "resolution: the clock did not advance"
    if step_ns is not None and times.median < LEAST_STEPS * step_ns:
        return (
            f"resolution: the median, {times.median:.4g} ns, is less than {LEAST_STEPS} steps of the clock, of "
            f"{step_ns:.4g} ns each"
        )
    if noise and times.interval is not None and times.interval.high > MOST_SPAN * times.interval.low:
        return (
            f"noise: the median is only known to lie between {duration(times.interval.low)} and "
            f"{duration(times.interval.high)}; stop other programs, or measure longer"
        )
    return ""


def median_interval(times: np.ndarray) -> Interval | None:
    """The narrowest symmetric pair of order statistics around the median with at least 95% confidence, else None.

    Distribution-free: the number of times below the true median is binomial(n, 1/2), so the k-th smallest and the
    k-th largest enclose it with probability 1 - 2 P(B <= k - 1). See J.-Y. Le Boudec, "Performance Evaluation of
    Computer and Communication Systems" (EPFL Press 2010), theorem 2.1; recommended for times, which are never normal,
    by T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems" (SC 2015). That takes the times,
    in the order in which they were measured, to be independent. Where they are found to depend on each other (drift,
    modes that last), it is the pair that fewer independent times would have: `Interval.independent` of them.
    """
    count = int(times.size)
    if count < SMALLEST_FOR_INTERVAL:
        return None
    ordered = np.sort(times)
    above = np.sign(times - np.median(ordered))
    if _clustered(above):
        independent = count / _correlation_time(above)
        # The number below the median varies as if each time were there several times.
        rank = max(1, math.floor(count / 2 - 0.98 * count / math.sqrt(independent)))
        return Interval(float(ordered[rank - 1]), float(ordered[count - rank]), CONFIDENCE, independent)
    rank, confidence = _interval_rank(count)
    return Interval(float(ordered[rank - 1]), float(ordered[count - rank]), confidence, float(count))


def _clustered(above: np.ndarray) -> bool:
    """Whether times above and below the median come in fewer runs than independent ones would, once in a hundred: the
    test of A. Wald and J. Wolfowitz (Annals of Mathematical Statistics 11, 1940). `above` has 1, 0 and -1."""
    sides = above[above != 0] > 0
    count, high = int(sides.size), int(sides.sum())
    low = count - high
    if count < _SMALLEST_FOR_RUNS or not high or not low:
        return False
    runs = 1 + int((sides[1:] != sides[:-1]).sum())
    expected = 1 + 2 * high * low / count
    variance = (expected - 1) * (expected - 2) / (count - 1)
    return runs < expected - _RARE * math.sqrt(variance)


def _correlation_time(above: np.ndarray) -> float:
    """How many successive times tell as much as one independent one, 1 at least: the sum of their autocorrelations over
    all distances, up to where noise begins (C. J. Geyer, "Practical Markov Chain Monte Carlo", Statistical Science 7,
    1992: sums of neighbouring pairs, as long as they are positive, and never rising)."""
    count = above.size
    spectrum = np.fft.rfft(above - above.mean(), 2 * count)
    covariances = np.fft.irfft(spectrum * np.conj(spectrum))[:count]
    even = count // 2 * 2
    pairs = (covariances[0:even:2] + covariances[1:even:2]) / covariances[0]
    noise = np.flatnonzero(pairs <= 0)
    positive = pairs[: noise[0]] if noise.size else pairs
    return max(1.0, 2 * float(np.minimum.accumulate(positive).sum()) - 1)


@lru_cache(maxsize=4096)
def _interval_rank(count: int) -> tuple[int, float]:
    """The largest k whose interval still has the required confidence, and the confidence it has."""
    if count > LARGEST_EXACT:
        rank = math.floor(count / 2 - 0.98 * math.sqrt(count))
        spread = (count / 2 - rank + 0.5) / (math.sqrt(count) / 2)  # continuity correction of the rank's tail
        return rank, math.erf(spread / math.sqrt(2))
    outcomes = 1 << count
    rank = 1
    tail = 1  # outcomes, of 2**count, with at most rank - 1 times below the median: at first, the one with none
    while True:
        wider = tail + math.comb(count, rank)
        if outcomes - 2 * wider < CONFIDENCE * outcomes:
            return rank, (outcomes - 2 * tail) / outcomes
        tail = wider
        rank += 1
