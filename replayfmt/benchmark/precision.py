"""How long to measure: a number of iterations or seconds, or until the median's confidence interval is narrow enough.

The values of --benchmark-min-time (`20x` iterations, `0.5s` or `0.5` seconds), --benchmark-precision and
--benchmark-max-time. The minimum time is the floor of the others. Does not depend on clocks or plans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayfmt.errors import UsageError

from .statistics import SMALLEST_FOR_INTERVAL, median_interval

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
    matched = _ITERATIONS.fullmatch(text)
    if matched:
        count = int(matched[1])
        if 1 <= count <= MOST_ITERATIONS:
            return MinTime(iterations=count)
    else:
        matched = _SECONDS.fullmatch(text)
        if matched:
            seconds = float(matched[1])
            if 0 < seconds <= MOST_SECONDS:
                return MinTime(seconds=seconds)
    raise UsageError(
        f"--benchmark-min-time={text}: expected <integer>x (iterations, 1 to {MOST_ITERATIONS}) or "
        f"<float>s (seconds, more than 0, at most {MOST_SECONDS}), for instance 20x or 0.5s"
    )


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
    if floor.seconds is not None and cap < floor.seconds:
        raise UsageError(f"--benchmark-max-time={most} is less than --benchmark-min-time={floor}")
    return Precision(share, cap)


def whole_precision(precision: str | None, most: str | None, floor: MinTime) -> Precision | None:
    """That of whole replays and scopes: at most 5 s, or ten times a floor in seconds."""
    return parse_precision(precision, most, floor, 5.0, 10.0)


def op_precision(precision: str | None, most: str | None, floor: MinTime) -> Precision | None:
    """That of single ops, of which a capture has many: at most 0.1 s each, or twice a floor in seconds."""
    return parse_precision(precision, most, floor, 0.1, 2.0)


def _seconds(text: str) -> float:
    try:
        cap = parse_min_time(text)
    except UsageError:
        cap = MinTime(iterations=1)
    if cap.seconds is None:
        raise UsageError(
            f"--benchmark-max-time={text}: expected <float>s (seconds, more than 0, at most {MOST_SECONDS}), for "
            "instance 10s"
        )
    return cap.seconds


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
