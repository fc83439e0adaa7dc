"""How long to measure: the value of --benchmark-min-time, in Google Benchmark's forms.

`20x` is a number of iterations, `0.5s` or `0.5` a number of seconds. Does not depend on clocks or plans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from replayfmt.errors import UsageError

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
