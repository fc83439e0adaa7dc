"""Measured ops grouped by kernel, signature or scope, the most expensive first, with the certainty of that order.

A row's time is the sum over its ops of calls times the median of a call; its bounds are the same sum over the ends of
the medians' intervals, which is never too narrow. Its rank is certain if no other row's bounds overlap with its own.
Ops without times are in no sum: a row counts their calls separately, and if it has no others its time is unknown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from replayfmt.format.reader import CaptureReader

from .results import STATUSES, MeasuredOp, PerOpRun

GroupBy = Literal["kernel", "signature", "scope"]
NO_SCOPE = "(in no scope)"
# Bounds of a row are wide if they are farther apart than this share of its time.
WIDE = 0.10


@dataclass
class OpRow:
    """One row: `members` are its measured ops with the number of their calls that belong to it, `unmeasured` likewise.

    `inner_ns` is, for scopes, the time of the row including all scopes inside it. `ranks` are the first and the last
    place, from 1, that it may have among the measured rows; None if it has no time.
    """

    label: str
    members: list[tuple[MeasuredOp, int]] = field(default_factory=list)
    unmeasured: list[tuple[MeasuredOp, int]] = field(default_factory=list)
    inner_ns: float | None = None
    ranks: tuple[int, int] | None = None

    @property
    def calls(self) -> int:
        """Calls of the measured ops."""
        return sum(calls for _op, calls in self.members)

    @property
    def not_measured(self) -> Counter[str]:
        """Calls of the other ops, by their status."""
        found: Counter[str] = Counter()
        for op, calls in self.unmeasured:
            found[op.status] += calls
        return found

    @property
    def estimated_ns(self) -> float | None:
        """Calls times the median, summed; None if nothing was measured."""
        if not self.members:
            return None
        return sum(calls * op.times.median for op, calls in self.members if op.times is not None)

    @property
    def bounds_ns(self) -> tuple[float, float] | None:
        """Bounds of `estimated_ns`; None if an op has too few samples."""
        low = high = 0.0
        for op, calls in self.members:
            if op.times is None or op.times.interval is None:
                return None
            low += calls * op.times.interval.low
            high += calls * op.times.interval.high
        return low, high

    @property
    def width(self) -> float | None:
        """The distance between its bounds, as a share of its time; None if unknown."""
        estimated, bounds = self.estimated_ns, self.bounds_ns
        return (bounds[1] - bounds[0]) / estimated if estimated and bounds is not None else None

    @property
    def captured_ns(self) -> float | None:
        """The mean time of a call when captured; None if unknown for exactly these calls."""
        total, clocks = 0.0, set()
        for op, calls in self.members:
            group = op.group
            if group.captured_ns is None or calls != group.count:
                return None
            total += group.captured_ns * calls
            clocks.add(group.captured_clock)
        return total / self.calls if len(clocks) == 1 else None

    @property
    def verdict(self) -> str:
        """The worst status of its ops."""
        return max((op.status for op, _calls in (*self.members, *self.unmeasured)), key=STATUSES.index)


def make_rows(run: PerOpRun, by: GroupBy | None, reader: CaptureReader) -> list[OpRow]:
    """The rows of a run, those without times last; one per measured op if `by` is None."""
    rows: dict[str | int, OpRow] = {}
    for place, op in enumerate(run.ops):
        for key, label, calls in _keys(op, place, by, reader):
            row = rows.setdefault(key, OpRow(label))
            (row.unmeasured if op.times is None else row.members).append((op, calls))
    if by == "scope":
        _add_inner(rows, run, reader)
    ordered = sorted(
        rows.values(), key=lambda row: -1.0 if row.estimated_ns is None else row.estimated_ns, reverse=True
    )
    _rank([row for row in ordered if row.members])
    return ordered


def _keys(
    op: MeasuredOp, place: int, by: GroupBy | None, reader: CaptureReader
) -> Iterator[tuple[str | int, str, int]]:
    """The rows that an op belongs to, each with its key, its label, and the number of the op's calls in it."""
    group = op.group
    if by == "scope":
        for scope, calls in group.by_scope.items():
            label = reader.scope_path(scope) if scope else NO_SCOPE
            yield label if scope else 0, label, calls
    elif by == "kernel":
        yield group.kernel.qualified_name, group.kernel.qualified_name, group.count
    else:
        yield group.signature if by == "signature" else place, group.signature, group.count


def _add_inner(rows: dict[str | int, OpRow], run: PerOpRun, reader: CaptureReader) -> None:
    inner: defaultdict[str, float] = defaultdict(float)
    for op in run.ops:
        if op.times is None:
            continue
        for innermost, calls in op.group.by_scope.items():
            scope = innermost
            while scope:
                inner[reader.scope_path(scope)] += calls * op.times.median
                scope = reader.scopes[scope].parent
    for key, row in rows.items():
        if row.members:
            row.inner_ns = inner[key] if isinstance(key, str) else row.estimated_ns


def _rank(rows: list[OpRow]) -> None:
    """Set the places that each row may have; unknown bounds imply nothing."""
    bounds = [row.bounds_ns or (0.0, float("inf")) for row in rows]
    lows, highs = sorted(low for low, _high in bounds), sorted(high for _low, high in bounds)
    for row, (low, high) in zip(rows, bounds, strict=True):
        surely_larger = len(lows) - bisect_right(lows, high)
        surely_smaller = bisect_left(highs, low)
        row.ranks = surely_larger + 1, len(rows) - surely_smaller
