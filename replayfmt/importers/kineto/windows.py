"""Which part of a profiler trace is imported: steps, scopes, or a time, as windows of the host's time.

A window holds the calls and launches that begin in it, on any thread; the device work is that of those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.printable import printable

from .events import TraceEvents

_TIME = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)?:(\d{1,12}(?:\.\d{1,6})?)?\Z")
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class Wanted:
    """`steps`: numbers of the profiler's steps; `scopes`: names of annotations; `time`: A:B in milliseconds since the
    trace's first event. What is in any of them is imported; everything, if all are empty."""

    steps: Sequence[int] = ()
    scopes: Sequence[str] = ()
    time: str = ""

    def __bool__(self) -> bool:
        return bool(self.steps or self.scopes or self.time)


def inside_windows(events: TraceEvents, annotations: np.ndarray, wanted: Wanted, times: np.ndarray) -> np.ndarray:
    """Which of these times are in a wanted window. Raises UsageError for what the trace does not have."""
    found = np.zeros(len(times), bool)
    for begin, end in _windows(events, annotations, wanted):
        found |= (begin <= times) & (times < end)
    return found


def _windows(events: TraceEvents, annotations: np.ndarray, wanted: Wanted) -> list[tuple[int, int]]:
    ops = events.ops
    named: dict[str, list[tuple[int, int]]] = {}
    for index in np.flatnonzero(annotations).tolist():
        start = ops.start[index]
        named.setdefault(events.kinds[ops.kind[index]].name, []).append((start, start + max(1, ops.duration[index])))
    windows: list[tuple[int, int]] = []
    asked = [(f"--step={each}", f"ProfilerStep#{each}") for each in wanted.steps]
    asked += [(f"--scope={each}", each) for each in wanted.scopes]
    for flag, name in asked:
        if name not in named:
            shown = ", ".join(list(named)[:_SHOWN_NAMES])
            more = f" and {len(named) - _SHOWN_NAMES} more" if len(named) > _SHOWN_NAMES else ""
            raise UsageError(
                printable(f"{flag}: the trace has no annotation {name}; it has {shown + more if named else 'none'}")
            )
        windows += named[name]
    if wanted.time:
        begin, end = parse_time(wanted.time)
        first = min(min(column, default=1 << 62) for column in (ops.start, events.launches.start))
        windows.append((first + begin, first + end))
    return windows


def parse_time(text: str) -> tuple[int, int]:
    """Nanoseconds of `A:B`, in milliseconds; either may be left out. Raises UsageError."""
    found = _TIME.match(text)
    begin, end = (found[1] or "0", found[2] or "1e12") if found else ("1", "0")
    if float(begin) >= float(end):
        raise UsageError(f"--time={text}: expected A:B in milliseconds since the trace's beginning, such as 10:25.5")
    return round(float(begin) * 1e6), round(float(end) * 1e6)
