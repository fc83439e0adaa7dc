"""Decides which of two things is faster from pairs of measured times. Measures nothing itself.

Each round measures both sides one after the other, so a temporary slowdown of the machine affects both; the side that
goes first alternates. The ratios within the pairs are compared. The confidence interval of the median ratio is
distribution-free (statistics.median_interval over the logarithms, which have the same order as the ratios): it does not
assume normally distributed times, and a few disturbed rounds do not move it. The sides differ if the interval with 95%
confidence excludes 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..statistics import CONFIDENCE, SMALLEST_FOR_INTERVAL, Interval, median_interval

Verdict = Literal["faster", "slower", "no measurable difference", "too noisy to tell", "not known"]
NOISY = 1.5  # an interval that contains 1 and is wider than this factor says nothing


@dataclass(frozen=True)
class Comparison:
    """Two sides of one comparison. Times are in nanoseconds, one per round, in order.

    `ratio` is the median of substituted over original in each pair: below 1 the substituted side is faster; None if the
    clock did not advance. `interval` is its confidence interval, None with a reason if there are too few rounds.
    """

    original: np.ndarray
    substituted: np.ndarray
    ratio: float | None
    interval: Interval | None
    reason: str = ""

    @property
    def rounds(self) -> int:
        return int(self.original.size)

    @property
    def verdict(self) -> Verdict:
        """What the interval says about the substituted side."""
        if self.interval is None:
            return "not known"
        if self.interval.high < 1:
            return "faster"
        if self.interval.low > 1:
            return "slower"
        return "too noisy to tell" if self.interval.high > NOISY * self.interval.low else "no measurable difference"


def compare(original: Sequence[float] | np.ndarray, substituted: Sequence[float] | np.ndarray) -> Comparison:
    """Compare pairs of times. Raises ValueError if the numbers of times differ or are zero."""
    mine = np.asarray(original, dtype=np.float64)
    theirs = np.asarray(substituted, dtype=np.float64)
    if mine.shape != theirs.shape or mine.ndim != 1 or not mine.size:
        raise ValueError(f"{mine.size} and {theirs.size} times do not make pairs")
    if not (mine > 0).all() or not (theirs > 0).all():
        return Comparison(mine, theirs, None, None, "the clock did not advance in some rounds")
    logarithms = np.log(theirs) - np.log(mine)
    ratio = float(np.exp(np.median(logarithms)))
    found = median_interval(logarithms)
    if found is None:
        return Comparison(
            mine,
            theirs,
            ratio,
            None,
            f"{mine.size} rounds cannot enclose the ratio with {CONFIDENCE:.0%} confidence; "
            f"{SMALLEST_FOR_INTERVAL} are needed",
        )
    interval = Interval(float(np.exp(found.low)), float(np.exp(found.high)), found.confidence, found.independent)
    return Comparison(mine, theirs, ratio, interval)
