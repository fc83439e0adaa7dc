"""What measuring ops one by one finds, and its rows by kernel, signature or scope.

`MeasuredOp` has an op's verdict, times and work. `make_rows` groups them, the most expensive first. A row's time is the
sum over its ops of calls times the median of a call; its bounds are the same sum over the ends of the medians'
intervals. Its rank is certain if no other row's bounds overlap its own.

`Reconciliation` puts the sums of single times, with hot and with cold inputs, beside the replay, the capture and the
program itself, and explains what the figures tell about the difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted, printable
from replayfmt.replay.results import Verdict, VerifyMode

from ..measure import FLAG, Inputs, Measurement, Run
from ..statistics import (
    MinTime,
    Precision,
    TimeStatistics,
    call_count,
    duration,
    low_quantile,
    possible_places,
    summarize,
)
from .groups import CallWork, OpGroup, SelectedOps

FAILURES = ("failed", "mismatched")
SEVERITY: tuple[Verdict, ...] = ("ok", "skipped", "refused", "mismatched", "failed")
STATUSES = ("ok", "unmeasurable", *SEVERITY[1:])  # of `MeasuredOp.status`, the worst last


@dataclass(frozen=True)
class OpOptions:
    """What to measure and how: `min_time` is per op, in calls or seconds, and is extended if it is too short to rank
    ops by; with `precision` until the median is known that well, or its time is up. `inputs` is None for the default of
    the devices; see `choose` for the selection. With `cuda_graph` calls are launched in device graphs where they can
    be."""

    min_time: MinTime = field(default_factory=lambda: MinTime(seconds=0.05))
    verify: VerifyMode = "auto"
    pattern: str | None = None
    limit: int | None = None
    every: bool = False
    scopes: tuple[str, ...] = ()
    stop_on_error: bool = False
    precision: Precision | None = None
    inputs: Inputs | None = None
    cuda_graph: bool = False
    ops: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        if self.cuda_graph and self.inputs == "cold":
            raise UsageError(
                f"{FLAG} launches many calls at once, which find the same inputs in the caches: leave --inputs=cold out"
            )


@dataclass
class MeasuredOp:
    """One group of ops with its verdict. `times` are nanoseconds per call, None if no call was measured, or if
    `unmeasurable` says why the `samples` are no measurement.

    `verdict` is the worst of the group's ops; `reason` is that op's, and `ordinal` where it was measured.
    """

    group: OpGroup
    verdict: Verdict = "ok"
    reason: str = ""
    ordinal: int | None = None
    calls: int = 0
    times: TimeStatistics | None = None
    cpu_ns: float | None = None  # mean per call, of the whole process
    host_ns: float | None = None  # per call, if `times` are the devices'
    returned: tuple[str, ...] | None = None  # what a call returned here, a text per result
    samples: tuple[float, ...] = ()  # nanoseconds per call, in order
    unmeasurable: str = ""
    work: CallWork | None = None  # of one call
    graph_calls: int | None = None  # in each graph, if `times` are those of calls in graphs
    no_graph: str = ""  # why it was asked for and could not be
    exposed: str = ""  # why `times` hold waiting of the device for the host
    on_device: bool | None = None  # whether a call gives the device anything to do; None: it is work of the host
    eager_ns: float | None = None  # the median of calls one by one, if `times` are those of calls in graphs
    measured_on: str = ""  # rank and device, if the ops are shared out over ranks

    @property
    def status(self) -> str:
        """The verdict; `unmeasurable` for an op that ran as captured and has no time."""
        return "unmeasurable" if self.unmeasurable and self.verdict == "ok" else self.verdict

    @property
    def why(self) -> str:
        """The reason for the status; empty for an op that was measured."""
        return self.unmeasurable if self.status == "unmeasurable" else self.reason

    @property
    def estimated_ns(self) -> float | None:
        """Count times the median: its share of the workload, in nanoseconds."""
        return None if self.times is None else self.group.count * self.times.median


@dataclass
class PerOpRun:
    """All chosen groups, in order of appearance; `stopped` if an error ended the run before the last, `interrupted` if
    the user did.

    `verified` says how results were compared, `differs` whether any did, also of ops that the chosen ones depend on;
    `overhead_ns` is the measured time of a call that does nothing. `inputs` says what was in the caches, `meters`
    describes every clock (`Stopwatch.describe`), `gpus` the states of the GPUs (`GpuWatch.rows`), `others_share`
    is as in `Run`. `event_pair_ns` lies between two events of a device with nothing between them, and was subtracted.
    """

    options: OpOptions
    chosen: SelectedOps
    ops: list[MeasuredOp]
    verified: str
    overhead_ns: float
    stopped: bool = False
    differs: bool = False
    inputs: str = ""
    meters: list[dict[str, Any]] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    others_share: float | None = None
    event_pair_ns: float = 0.0
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        """Whether everything requested was measured, and nothing differed from the capture."""
        return not (self.differs or self.chosen.unsupported.calls or any(op.verdict != "ok" for op in self.ops))

    @property
    def successful(self) -> int:
        return sum(op.verdict == "ok" for op in self.ops)

    @property
    def failed(self) -> int:
        """Ops that were attempted and raised, or returned other results than captured."""
        return sum(op.verdict in FAILURES for op in self.ops)

    @property
    def refused(self) -> Counter[str]:
        """Ops that were not attempted, by reason."""
        return Counter(op.reason for op in self.ops if op.verdict in ("refused", "skipped"))

    @property
    def not_measured(self) -> Counter[str]:
        """Calls of ops that have no times, by status."""
        found: Counter[str] = Counter()
        for op in self.ops:
            if op.times is None:
                found[op.status] += op.group.count
        return found

    @property
    def measured_device_ns(self) -> int:
        """The captured device time of the measured ops' calls."""
        return sum(op.group.device_ns for op in self.ops if op.times is not None)

    @property
    def estimated_ns(self) -> float | None:
        """The sum over all measured ops, in nanoseconds; None if there are none."""
        known = [op.estimated_ns for op in self.ops if op.estimated_ns is not None]
        return sum(known) if known else None


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
    def shortest_ns(self) -> float | None:
        """Likewise, of the `low_quantile` of each op's times."""
        return sum(calls * low_quantile(op.samples) for op, calls in self.members) if self.members else None

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
    ranked = [row for row in ordered if row.members]
    for row, places in zip(ranked, possible_places([row.bounds_ns for row in ranked]), strict=True):
        row.ranks = places
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
        row = OpRow("", [(op, op.group.count) for op in run.ops if op.times is not None])
        low, high = (row.members and row.bounds_ns) or (None, None)
        left_out = run.not_measured.total() + run.chosen.unsupported.calls.total()
        return IsolatedTotal(inputs, row.estimated_ns, low, high, row.calls, left_out, run.overhead_ns * row.calls)


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
