"""Statistics of measured times, when they are known well enough, the comparison of paired times, and figures as text.

`summarize` gives the median with its confidence interval, mean, spread, extremes and outliers. A figure that the sample
is too small for is None, and `reasons` says why. Times are in nanoseconds everywhere in this package.

`compare_pairs` decides which of two things is faster from pairs of times that were measured one after the other, so
that a temporary slowdown of the machine affects both. The confidence interval of the median ratio is distribution-free.

`MinTime` and `Precision` are the values of --benchmark-min-time (`20x` iterations, `0.5s` or `0.5` seconds),
--benchmark-precision and --benchmark-max-time. Imports no torch, and nothing of clocks, plans or reports.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.validation import SECONDS, counted, fitting

_RATE_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SIZE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_DIGITS = 4


def duration(nanoseconds: float | None) -> str:
    """A time in ns, us, ms or s; `-` if unknown."""
    if nanoseconds is None:
        return "-"
    scale, unit = fitting(nanoseconds, SECONDS)
    return f"{_digits(nanoseconds / scale)} {unit}"


def size(length: int) -> str:
    """A number of bytes in B, KiB, MiB, GiB or TiB; whole below 1 KiB."""
    scale, unit = fitting(length, _SIZE_UNITS)
    return f"{length} {unit}" if scale == 1 else f"{_digits(length / scale)} {unit}"


def call_count(number: int) -> str:
    """A number of calls."""
    return f"{number} call{'' if number == 1 else 's'}"


def share_text(value: float) -> str:
    """A share as 12.3%; one that rounds to nothing is not shown as none."""
    return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def verified(text: str) -> str:
    """The line that says how results were verified, or that they were not."""
    return text if text.startswith("not verified") else f"verified  {text}"


def ran_on(context: dict[str, Any]) -> str:
    """The line that says where it ran: devices, PyTorch and its threads, processors."""
    threads = context["torch_num_threads"]
    devices = ", ".join(context["devices"]) or "no device"
    reason = f" ({context['threads_reason']})" if context.get("threads_reason") else ""
    return (
        f"run on    {devices}; torch {context['torch_version']}, {counted(threads, 'thread')}{reason}; "
        f"{context['num_cpus']} CPUs"
    )


def rate(per_second: float | None) -> str:
    """A rate per second, as 12.34k/s; `-` if unknown."""
    if per_second is None:
        return "-"
    scale, unit = fitting(per_second, _RATE_UNITS)
    return f"{_digits(per_second / scale)}{unit}/s"


def _digits(value: float) -> str:
    """Four significant digits, and all digits before the point."""
    before = len(str(int(abs(value))))
    return f"{value:.{max(0, _DIGITS - before)}f}"


CONFIDENCE = 0.95
_DEVIATIONS = 1.96  # of a normal distribution: so many on either side have that confidence
# Of the difference of two medians, which varies sqrt(2) times as much as one of them: 97.5%, since what else a machine
# does drifts between two runs.
_DEVIATIONS_OF_TWO = math.sqrt(2) * 2.24
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


def summarize(times: Sequence[float] | np.ndarray, *, of_processes: bool = False) -> TimeStatistics:
    """Statistics over `times`, each of one iteration, or `of_processes`: then the interval is `other_runs_interval`.
    Raises ValueError for an empty sample."""
    noun = ("process", "processes") if of_processes else ("iteration", "iterations")
    values = np.asarray(times, dtype=np.float64)
    if values.size == 0:
        raise ValueError("statistics need at least one time")
    reasons: dict[str, str] = {}
    deviation: float | None = None
    if values.size > 1:
        deviation = float(values.std(ddof=1))
    else:
        reasons["standard_deviation"] = f"one {noun[0]} has no spread; two are needed"
    interval = other_runs_interval(values) if of_processes else median_interval(values)
    if interval is None:
        reasons["interval"] = (
            f"{values.size} {noun[1]} cannot enclose the median with {CONFIDENCE:.0%} confidence; "
            f"{SMALLEST_FOR_INTERVAL} are needed"
        )
    quartiles, outliers = _quartiles(values)
    if quartiles is None:
        reasons["quartiles"] = f"{values.size} {noun[1]} have no quartiles; {SMALLEST_FOR_QUARTILES} are needed"
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


def possible_places(bounds: Sequence[tuple[float, float] | None]) -> list[tuple[int, int]]:
    """For each of some times, given by its bounds, the first and the last place, from 1, that it may have among them,
    the largest first. Unknown bounds imply nothing."""
    known = [each or (0.0, math.inf) for each in bounds]
    lows, highs = sorted(low for low, _high in known), sorted(high for _low, high in known)
    return [(len(lows) - bisect_right(lows, high) + 1, len(highs) - bisect_left(highs, low)) for low, high in known]


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


def median_interval(times: np.ndarray, deviations: float = _DEVIATIONS) -> Interval | None:
    """The narrowest symmetric pair of order statistics around the median with at least 95% confidence, else None. With
    other `deviations` of a normal distribution than 1.96 it has their confidence, as far as there are so many times.

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
        rank = max(1, math.floor(count / 2 - deviations / 2 * count / math.sqrt(independent)))
        return Interval(float(ordered[rank - 1]), float(ordered[count - rank]), _confidence(deviations), independent)
    rank, confidence = _interval_rank(count, deviations)
    return Interval(float(ordered[rank - 1]), float(ordered[count - rank]), confidence, float(count))


def other_runs_interval(medians: np.ndarray) -> Interval | None:
    """Where the median of another run of as many processes lies with at least 95% confidence. So few processes have no
    pair of medians with that confidence: the outermost ones are moved away from the median, in ratio, by what is
    missing."""
    found = median_interval(medians, _DEVIATIONS_OF_TWO)
    if found is None:
        return None
    found_deviations = NormalDist().inv_cdf(min((1 + found.confidence) / 2, 1 - 1e-12))
    missing = max(1.0, _DEVIATIONS_OF_TWO / found_deviations)
    median = float(np.median(medians))
    low = median * (found.low / median) ** missing if median > 0 else found.low
    high = median * (found.high / median) ** missing if median > 0 else found.high
    return Interval(low, high, CONFIDENCE, found.independent)


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
    return runs < expected - _RARE * math.sqrt((expected - 1) * (expected - 2) / (count - 1))


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


def _confidence(deviations: float) -> float:
    return CONFIDENCE if deviations == _DEVIATIONS else math.erf(deviations / math.sqrt(2))


@lru_cache(maxsize=4096)
def _interval_rank(count: int, deviations: float) -> tuple[int, float]:
    """The largest k whose interval still has the required confidence, and the confidence it has; 1 if none has it."""
    required = _confidence(deviations)
    if count > LARGEST_EXACT:
        rank = math.floor(count / 2 - deviations / 2 * math.sqrt(count))
        spread = (count / 2 - rank + 0.5) / (math.sqrt(count) / 2)  # continuity correction of the rank's tail
        return rank, math.erf(spread / math.sqrt(2))
    outcomes = 1 << count
    rank = 1
    tail = 1  # outcomes, of 2**count, with at most rank - 1 times below the median: at first, the one with none
    while True:
        wider = tail + math.comb(count, rank)
        if outcomes - 2 * wider < required * outcomes:
            return rank, (outcomes - 2 * tail) / outcomes
        tail = wider
        rank += 1


# Other programs only ever make a time longer: a low quantile is the one that they change least.
_LOW = 0.1
# The part of a difference of medians that low quantiles have to confirm, on a scale of logarithms, and by how much they
# have to differ from it to contradict: quantiles vary, too.
_CONFIRMED, _CLEAR = 0.1, 0.05


def low_quantile(times: Sequence[float] | np.ndarray) -> float:
    """The time that a tenth of the times do not exceed; the smallest of fewer than ten."""
    return float(np.quantile(np.asarray(times, dtype=np.float64), _LOW, method="lower"))


# Two processes that nothing disturbed agree this well.
_AGREE = 0.03


def undisturbed(shortest: Sequence[float]) -> float | None:
    """Of the shortest times (`low_quantile`) of several processes: the smallest that another one confirms, which is
    what the work takes where nothing disturbs it. None if no two agree. The median of a run on a shared machine depends
    on how many of its processes others slowed down; this does not, as long as they left two alone."""
    least = sorted(shortest)[:2]
    return least[1] if len(least) == 2 and least[1] <= least[0] * (1 + _AGREE) else None


def contradicted(ratio: float, low_ratio: float) -> str:
    """Why medians decide nothing: the least disturbed times show next to nothing of their difference, or the opposite.
    Empty if they confirm it."""
    difference, confirmed = abs(math.log(ratio)), math.log(low_ratio) * math.copysign(1, math.log(ratio))
    if confirmed >= _CONFIRMED * difference or difference - confirmed <= _CLEAR:
        return ""
    return (
        f"the ratio of medians is {ratio:.3g}, that of the shortest tenth of the times {low_ratio:.3g}: other programs "
        "slowed one side down"
    )


Verdict = Literal["faster", "slower", "no measurable difference", "too noisy to tell", "not known"]
NOISY = 1.5  # an interval that contains 1 and is wider than this factor says nothing


@dataclass(frozen=True)
class PairedComparison:
    """Two sides of one comparison. Times are in nanoseconds, one per round, in order.

    `ratio` is the median of substituted over original in each pair: below 1 the substituted side is faster; None if the
    clock did not advance. `interval` is its confidence interval, None with a reason if there are too few rounds.
    There is no verdict, and `reason` says why, where the shortest times contradict the ratio.
    """

    original: np.ndarray
    substituted: np.ndarray
    ratio: float | None
    interval: Interval | None
    reason: str = ""

    @property
    def rounds(self) -> int:
        return int(self.original.size)

    def fields(self) -> dict[str, Any]:
        """The ratio and what it says, for a row."""
        return {
            "rounds": self.rounds,
            "ratio": self.ratio,
            "ratio_low": None if self.interval is None else self.interval.low,
            "ratio_high": None if self.interval is None else self.interval.high,
            "verdict": self.verdict,
            "reason": self.reason or None,
        }

    @property
    def verdict(self) -> Verdict:
        """What the interval says about the substituted side."""
        if self.interval is None:
            return "not known"
        if self.reason:
            return "too noisy to tell"
        if self.interval.high < 1:
            return "faster"
        if self.interval.low > 1:
            return "slower"
        return "too noisy to tell" if self.interval.high > NOISY * self.interval.low else "no measurable difference"


def compare_pairs(
    original: Sequence[float] | np.ndarray, substituted: Sequence[float] | np.ndarray
) -> PairedComparison:
    """Compare pairs of times. Raises ValueError if the numbers of times differ or are zero."""
    mine = np.asarray(original, dtype=np.float64)
    theirs = np.asarray(substituted, dtype=np.float64)
    if mine.shape != theirs.shape or mine.ndim != 1 or not mine.size:
        raise ValueError(f"{mine.size} and {theirs.size} times do not make pairs")
    if not (mine > 0).all() or not (theirs > 0).all():
        return PairedComparison(mine, theirs, None, None, "the clock did not advance in some rounds")
    logarithms = np.log(theirs) - np.log(mine)
    ratio = float(np.exp(np.median(logarithms)))
    found = median_interval(logarithms)
    if found is None:
        return PairedComparison(
            mine,
            theirs,
            ratio,
            None,
            f"{mine.size} rounds cannot enclose the ratio with {CONFIDENCE:.0%} confidence; "
            f"{SMALLEST_FOR_INTERVAL} are needed",
        )
    interval = Interval(float(np.exp(found.low)), float(np.exp(found.high)), found.confidence, found.independent)
    low_ratio = low_quantile(theirs) / low_quantile(mine)
    decided = interval.high < 1 or interval.low > 1
    return PairedComparison(mine, theirs, ratio, interval, contradicted(ratio, low_ratio) if decided else "")


MOST_ITERATIONS = 1_000_000_000  # Google Benchmark's own limit
MOST_SECONDS = 86_400  # a day; Google Benchmark has no limit for seconds
_ITERATIONS = re.compile(r"\s*\+?0*(\d{1,10})x", re.ASCII)
_SECONDS = re.compile(r"\s*\+?((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)s?", re.ASCII)


@dataclass(frozen=True)
class MinTime:
    """Exactly one of the two is set: `iterations`, or `seconds` of measured replay time."""

    iterations: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.iterations}x" if self.iterations is not None else f"{self.seconds:g}s"


def parse_min_time(text: str) -> MinTime:
    """Read `<integer>x`, `<float>s` or, as Google Benchmark still takes it, `<float>`.

    Raises UsageError for everything else, and for values that are not positive: measuring for no time measures nothing.
    (Google Benchmark reports rows of 0 iterations for `0x`.)
    """
    count, seconds = _ITERATIONS.fullmatch(text), _seconds(text)
    if count is not None and 1 <= int(count[1]) <= MOST_ITERATIONS:
        return MinTime(iterations=int(count[1]))
    if seconds is not None:
        return MinTime(seconds=seconds)
    raise UsageError(
        f"--benchmark-min-time={text}: expected <integer>x (iterations, 1 to {MOST_ITERATIONS}) or "
        f"<float>s (seconds, more than 0, at most {MOST_SECONDS}), for instance 20x or 0.5s"
    )


def _seconds(text: str) -> float | None:
    """The seconds that `0.5s` or `0.5` is; None if it is none, or no time that can be measured for."""
    matched = _SECONDS.fullmatch(text)
    seconds = float(matched[1]) if matched else 0.0
    return seconds if 0 < seconds <= MOST_SECONDS else None


DEFAULT_PRECISION = "2%"
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)%?\s*", re.ASCII)
# Looking costs a sort of all times so far: next look at this many times as many.
_NEXT_LOOK = 1.2


@dataclass(frozen=True)
class Precision:
    """What half the width of the median's interval may be, as a share of the median, and after how many elapsed seconds
    (with restoring, which is not timed) measuring stops without it."""

    share: float
    cap_s: float

    def __str__(self) -> str:
        return f"{self.share:.4g} within {self.cap_s:g} s"


def parse_share(flag: str, text: str) -> float:
    """The share that `5%` or `5` is. Raises UsageError for anything else and for 0%."""
    matched = _SHARE.fullmatch(text)
    if matched is None or not 0 < float(matched[1]) <= 1000:
        raise UsageError(f"{flag}={text}: expected a percentage, more than 0% and at most 1000%, for instance 5%")
    percent = float(matched[1])
    if percent < 1 and "%" not in text:  # a share or a percentage? A gate must not guess.
        raise UsageError(f"{flag}={text}: a percentage below 1 needs its sign: {percent:g}%, or {percent * 100:g}%")
    return percent / 100


def parse_precision(
    precision: str | None, most: str | None, floor: MinTime, default_cap_s: float, cap_of_floor: float
) -> Precision | None:
    """What was asked for: `precision` a percentage or `off`, `most` seconds.

    None where measuring takes exactly as long as the floor: with `off`, or if the floor is a number of iterations and
    no precision is given. Without `most` the cap is `cap_of_floor` times a floor in seconds, else `default_cap_s`.
    Raises UsageError for a cap without effect, or one below the floor.
    """
    if precision == "off" or (precision is None and floor.iterations is not None):
        if most is not None:
            raise UsageError(
                f"--benchmark-max-time={most} has no effect: --benchmark-min-time={floor} is also the end unless "
                "--benchmark-precision=PERCENT is given"
            )
        return None
    share = parse_share("--benchmark-precision", DEFAULT_PRECISION if precision is None else precision)
    if most is None:
        return Precision(share, default_cap_s if floor.seconds is None else cap_of_floor * floor.seconds)
    cap = _seconds(most)
    if cap is None:
        raise UsageError(
            f"--benchmark-max-time={most}: expected <float>s (seconds, more than 0, at most {MOST_SECONDS}), for "
            "instance 10s"
        )
    if floor.seconds is not None and cap < floor.seconds:
        raise UsageError(f"--benchmark-max-time={most} is less than --benchmark-min-time={floor}")
    return Precision(share, cap)


def whole_precision(precision: str | None, most: str | None, floor: MinTime) -> Precision | None:
    """That of whole replays and scopes: at most 5 s, or ten times a floor in seconds."""
    return parse_precision(precision, most, floor, 5.0, 10.0)


def op_precision(precision: str | None, most: str | None, floor: MinTime) -> Precision | None:
    """That of single ops, of which a capture has many: at most 0.1 s each, or twice a floor in seconds."""
    return parse_precision(precision, most, floor, 0.1, 2.0)


class StoppingRule:
    """Whether the times so far determine the median to a share. Looks only now and then: see `_NEXT_LOOK`.

    Who ends when an interval happens to be narrow ends more often than others with one that is narrow and wrong: beyond
    the first look, whose number of times was not chosen by it, two looks one after the other have to find the same.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._next = SMALLEST_FOR_INTERVAL
        self._found = False
        self._narrow = True  # at the look before; the first one needs none

    def __call__(self, times: Sequence[float]) -> bool:
        """`times` only grow between calls."""
        if len(times) < self._next:
            return self._found
        self._next = int(len(times) * _NEXT_LOOK) + 1
        before, self._narrow, self._found = self._narrow, False, False
        values = np.asarray(times, dtype=np.float64)
        interval, median = median_interval(values), float(np.median(values))
        if interval is not None:
            self._narrow = (interval.high - interval.low) / 2 <= self._share * median
            self._found = before and self._narrow
        return self._found
