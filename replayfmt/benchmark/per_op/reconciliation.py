"""Isolated ops against the whole: sums of single times, the replay, the capture and the program itself, side by side.

Ops are measured on their own with hot inputs and once more with cold ones. Neither sum has to be the time of the whole
replay: caches hold something in between, devices work on several ops at once, and between ops the host allocates,
releases and issues. `explain` says what the figures themselves tell about the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from replayfmt.format.validation import counted, printable

from ..measure import Measurement, Run
from ..statistics import TimeStatistics, call_count, duration, summarize
from .results import PerOpRun

# A difference of less than this share of the whole replay needs no explanation.
_SMALL = 0.05


@dataclass(frozen=True)
class IsolatedTotal:
    """The isolated times of all ops, weighted by their counts. `low` and `high` sum the ends of the intervals, None if
    one is missing; `total_ns` is None if no call has a time. `left_out` counts calls without one."""

    inputs: str
    total_ns: float | None
    low_ns: float | None
    high_ns: float | None
    calls: int
    left_out: int
    overhead_ns: float  # of the calls themselves, in all of them

    @staticmethod
    def of(run: PerOpRun, inputs: str) -> IsolatedTotal:
        measured = [(op.times, op.group.count) for op in run.ops if op.times is not None]
        low = high = 0.0
        known = True
        for times, count in measured:
            known = known and times.interval is not None
            if times.interval is not None:
                low, high = low + count * times.interval.low, high + count * times.interval.high
        calls = sum(count for _times, count in measured)
        left_out = run.not_measured.total() + run.chosen.unsupported.calls.total()
        return IsolatedTotal(
            inputs,
            run.estimated_ns,
            low if known and measured else None,
            high if known and measured else None,
            calls,
            left_out,
            run.overhead_ns * calls,
        )


@dataclass(frozen=True)
class ProgramTimes:
    """The program's own runs, without a recorder, in nanoseconds; `what` says which part of it."""

    command: str
    what: str
    times_ns: tuple[float, ...]

    @property
    def statistics(self) -> TimeStatistics:
        return summarize(self.times_ns)


@dataclass(frozen=True)
class Reconciliation:
    """All figures of one region. `host_ns` is the median time that the host needed to issue the work, None if the
    whole's times are the host's own."""

    region: str
    hot: IsolatedTotal
    cold: IsolatedTotal
    whole: TimeStatistics
    host_ns: float | None
    captured_ns: int | None
    captured_reason: str
    program: ProgramTimes | None

    @staticmethod
    def of(run: Run, hot: PerOpRun, cold: PerOpRun, program: ProgramTimes | None) -> Reconciliation:
        measurement: Measurement = run.measurements[0]
        sample = measurement.samples[0]
        return Reconciliation(
            measurement.region.row,
            IsolatedTotal.of(hot, "hot"),
            IsolatedTotal.of(cold, "cold"),
            sample.statistics(),
            None if sample.host is None else summarize(sample.host).median,
            measurement.region.captured_ns,
            measurement.region.captured_reason,
            program,
        )

    def explain(self) -> Iterator[str]:
        """What the figures tell about the difference between the whole replay and the sum of hot isolated times."""
        whole, hot, cold = self.whole.median, self.hot, self.cold
        if whole <= 0:
            yield "the clock did not advance during a replay: there is nothing to explain"
            return
        if hot.left_out:
            yield f"{call_count(hot.left_out)} have no isolated time and are in the replay alone"
        if hot.total_ns is None:
            yield "no op has an isolated time: there is nothing to compare the replay with"
            return
        difference = whole - hot.total_ns
        if abs(difference) < _SMALL * whole:
            yield f"the sum of hot isolated times is within {_SMALL:.0%} of the replay: nothing is left to explain"
            return
        if difference > 0:
            both = cold.total_ns is not None and cold.calls == hot.calls
            caches = cold.total_ns - hot.total_ns if both and cold.total_ns is not None else 0.0
            if caches > 0:
                reach = "as much as the difference, or more" if caches >= difference else "less than the difference"
                yield f"cache effects: with cold inputs the sum is {duration(caches)} more, {reach}"
            if self.host_ns is not None and self.host_ns > _SMALL * whole + hot.total_ns:
                yield (
                    f"launch gaps: the host needed {duration(self.host_ns)} to issue the work, more than the devices "
                    "for all of it: they wait for the host between kernels"
                )
            rest = difference - max(0.0, caches)
            if rest > _SMALL * whole:
                others = "no measured op's time: ops without one," if hot.left_out else "no op's time:"
                yield (
                    f"host time between ops: {duration(rest)} are in {others} memory allocated and released, page "
                    "faults, the replay's own loop"
                )
            return
        if hot.overhead_ns > _SMALL * whole:
            yield (
                f"host time: each isolated call pays for the call itself, {duration(hot.overhead_ns)} in all; the "
                "replay issues ops in one function"
            )
        if -difference > hot.overhead_ns:
            yield (
                f"overlap: the replay is {duration(-difference)} shorter than the sum: its ops ran at the same time, "
                "or found in the caches what a loop over one op does not leave there"
            )

    def lines(self) -> Iterator[str]:
        """As text."""
        yield printable(f"reconciliation of {self.region}")
        for each in (self.hot, self.cold):
            if each.total_ns is None:
                yield f"  isolated, {each.inputs + ':':<6}{'not measured':>12}  no call has a time"
                continue
            bounds = "" if each.low_ns is None else f", between {duration(each.low_ns)} and {duration(each.high_ns)}"
            share = "" if self.whole.median <= 0 else f" ({each.total_ns / self.whole.median:.1%} of the replay)"
            yield (
                f"  isolated, {each.inputs + ':':<6}{duration(each.total_ns):>12}  sum over {call_count(each.calls)}"
                f"{bounds}{share}"
            )
        interval = self.whole.interval
        known = "" if interval is None else f", between {duration(interval.low)} and {duration(interval.high)}"
        if self.whole.median > 0:
            yield f"  whole replay:   {duration(self.whole.median):>12}  median of {self.whole.count} replays{known}"
        else:
            yield f"  whole replay:   {'not measured':>12}  the clock did not advance"
        if self.captured_ns is None:
            yield f"  captured:       {'not measured':>12}  {self.captured_reason}"
        else:
            yield f"  captured:       {duration(self.captured_ns):>12}  including the recorder's own work"
        if self.program is not None:
            found = self.program.statistics
            yield printable(
                f"  program itself: {duration(found.median):>12}  median of {counted(found.count, 'run')} of "
                f"{self.program.what}, each in a process of its own, without a recorder"
            )
        yield from (f"  {sentence}" for sentence in self.explain())

    def as_json(self) -> dict[str, Any]:
        """For the report's JSON, times in nanoseconds."""
        return {
            "region": self.region,
            "isolated_hot": vars(self.hot),
            "isolated_cold": vars(self.cold),
            "whole_replay_ns": self.whole.median if self.whole.median > 0 else None,
            "whole_replay_host_ns": self.host_ns,
            "captured_ns": self.captured_ns,
            "captured_reason": self.captured_reason or None,
            "program": None if self.program is None else vars(self.program),
            "explanation": list(self.explain()),
        }
