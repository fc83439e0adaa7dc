"""Every op of a capture measured on its own, on its inputs in the replay.

The capture is walked through once, op by op; if only some ops are chosen, only they and the ops they depend on are run.
If ops do not depend on each other (most imports) and nothing can be compared, one op of each signature is run.

A sample is a few calls, timed together. On an accelerator calls are issued behind a *cover*, work that keeps the device
busy meanwhile; otherwise the time between two events of an idle device would be the time that the host takes to issue
what lies between them. With --cuda-graph, many calls of an op are launched as one graph of the device instead.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from replayfmt.collector import collector_paused
from replayfmt.errors import first_line
from replayfmt.pytorch.accelerators import captured, is_accelerator, spinning
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.records import Slice
from replayfmt.replay.ranks import Ranks
from replayfmt.replay.results import Verdict
from replayfmt.replay.run.steps import IsolatedOp, call_repeatedly

from ..machine import BackgroundLoad, GpuWatch
from ..measure import CacheFlush, Progress, default_inputs, describe_inputs, require_graphs
from ..meters import Clock, Readings, Stopwatch, stopwatch_for
from ..statistics import (
    MOST_ITERATIONS,
    SMALLEST_FOR_INTERVAL,
    StoppingRule,
    TimeStatistics,
    summarize,
    why_unmeasurable,
)
from .groups import CallWork, SelectedOps, select_ops, work_of
from .results import FAILURES, SEVERITY, MeasuredOp, OpOptions, PerOpRun

# A launch of a graph takes some microseconds on the host: the calls in it take much longer.
_GRAPH_NS = 500_000
_MOST_CALLS_IN_GRAPH = 1000
_SHOWN = 200

# Records what a function does into a graph, and returns what launches that. Raises NoGraph.
RecordGraph = Callable[[Callable[[], None]], Callable[[], None]]


class NoGraph(Exception):
    """Work that cannot be put into a graph; the message says why."""


@dataclass(frozen=True)
class OpGraph:
    """`calls` calls of an op in one graph. `restoring` launches as many times putting back what it writes, None if it
    writes nothing."""

    calls: int
    launch: Callable[[], None]
    restoring: Callable[[], None] | None


def graphs_of(devices: Sequence[torch.device]) -> RecordGraph:
    """What records graphs on the device of a plan. Raises UsageError if there is none."""
    device = require_graphs(devices)

    def record(work: Callable[[], None]) -> Callable[[], None]:
        return _record(work, device)

    return record


def _record(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    stream = torch.Stream(device)
    torch.accelerator.synchronize(device)
    with stream:
        work()  # what a first use sets up is no part of the graph
    torch.accelerator.synchronize(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            graph = captured(device, work)
        except Exception as error:  # each operator has its own way to say so
            cause = error.__context__ or error  # ending the graph fails, too
            raise NoGraph(f"{type(cause).__name__}: {first_line(cause)[:_SHOWN]}") from error
    if any("empty" in str(each.message) for each in said):
        raise NoGraph("it launches nothing on the device's stream, so its graph is empty")
    replay: Callable[[], None] = graph.replay
    return replay


def graph_of(op: IsolatedOp, call_ns: float, record: RecordGraph) -> OpGraph:
    """A graph of calls that take `call_ns` each. Raises NoGraph."""
    calls = int(min(max(_GRAPH_NS / max(call_ns, 1.0), 1.0), _MOST_CALLS_IN_GRAPH))

    def restore() -> None:
        for _ in range(calls):
            op.restore()

    def run() -> None:
        for _ in range(calls):
            op.restore()
            op.calls(1)

    if not op.writes:
        return OpGraph(calls, record(lambda: op.calls(calls)), None)
    op.restore()
    memory = op.addresses()
    graph = OpGraph(calls, record(run), record(restore))
    op.restore()
    if op.addresses() != memory:
        raise NoGraph("it moves the memory that it writes, whose addresses a graph keeps")
    return graph


# Calls that leave their inputs unchanged are timed together for at least this long, so that reading the clock does not
# matter.
_SAMPLE_NS = 20_000
_MOST_CALLS = 10_000
# On an accelerator: what the host may take to issue a sample, and how many calls with events of their own are in it.
_ISSUE_NS = 200_000
_MOST_PAIRS = 8
_FIRST_COVER_NS = 30_000
_LONGEST_COVER_NS = 5_000_000
_EMPTY_PAIRS = 11
# No kernel of an accelerator takes less than twice this.
_NO_KERNEL_NS = 400
_EXPOSED = "the device waited for the host while the op was timed: it came to the op before everything was issued"

Cover = Callable[[float], None]  # issues work that takes about so many nanoseconds


@dataclass(frozen=True)
class Shape:
    """A sample: `pairs` of begin and end with `calls` calls in each."""

    pairs: int = 1
    calls: int = 1

    @property
    def total(self) -> int:
        return self.pairs * self.calls


class Sampler:
    """Takes samples of ops; `flush` empties the caches before each call."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        clock: Clock,
        flush: CacheFlush | None,
        covers: Sequence[Cover] | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """`covers` replaces those of the accelerators among `devices`, `watch` what times them."""
        self.watch = watch or stopwatch_for(devices, clock)
        self._hosts = stopwatch_for((), clock)
        self._clock, self._flush = clock, flush
        self._accelerators = [device for device in devices if is_accelerator(device)]
        self._covers = [spinning(device) for device in self._accelerators] if covers is None else list(covers)
        self._cover_ns: float = _FIRST_COVER_NS
        self.pair_ns = 0.0  # between two events with nothing between them
        self.begin(on_host=False)
        if self._covers:
            self.pair_ns = statistics.median(self._taken(self.watch, lambda: None) for _ in range(_EMPTY_PAIRS))
            self.why_exposed = ""

    def begin(self, *, on_host: bool) -> None:
        """Another op follows; `on_host`: it works on no accelerator, so its time is the host's."""
        self._watch: Stopwatch = self._hosts if on_host else self.watch
        self._covered = bool(self._covers) and not on_host
        self.why_exposed = ""

    @property
    def step_ns(self) -> float | None:
        """The smallest step of the clock that the times are from; None if it is not known."""
        return self._watch.step_ns()

    def works_on_device(self, call_ns: float) -> bool:
        """Whether a call that takes so long launches anything; always, where times are not those of a covered
        device."""
        return not self._covered or bool(self.why_exposed) or call_ns >= _NO_KERNEL_NS

    def shape(self, op: IsolatedOp, first: Readings, share_ns: float) -> Shape:
        """The sample of an op whose `first` call is known; `share_ns` is the time that one sample should take.

        Memory has to be restored, or caches flushed, between any two calls: such calls have events of their own.
        """
        wanted = max(_SAMPLE_NS, share_ns) / max(first.real_ns, 1.0)
        if not self._covered:
            return (
                Shape() if op.writes or self._flush is not None else Shape(calls=int(max(1, min(wanted, _MOST_CALLS))))
            )
        several = int(max(1, min(wanted, _ISSUE_NS / max(first.host_ns or first.cpu_ns, 1.0))))
        if op.writes or self._flush is not None:
            return Shape(pairs=min(several, _MOST_PAIRS))
        return Shape(calls=several)

    def sample(self, op: IsolatedOp, shape: Shape) -> tuple[Readings, float]:
        """The readings of one call, and for how long the sample was timed, in nanoseconds."""
        while True:
            began = self._clock.real()
            self._synchronize()
            watch, ahead = self._watch, True
            watch.reset()
            start, stop = watch.start, watch.stop
            for _ in range(shape.pairs):
                op.restore()
                if self._flush is not None:
                    self._flush()
                if self._covered:
                    self._cover()
                else:
                    self._synchronize()
                start()
                op.calls(shape.calls)
                stop()
                ahead = ahead and not (self._covered and watch.began())
            self._synchronize()
            if ahead or not self._lengthen():
                break
        found = watch.read()
        if not self._covered:
            return found.per(shape.total), found.real_ns
        # Covers are part of it: what takes little on the device would otherwise take very long to measure.
        spent = float(self._clock.real() - began)
        return replace(found, real_ns=self._without_pairs(found.real_ns, shape.pairs)).per(shape.total), spent

    def launch(self, work: Callable[[], None]) -> float:
        """Nanoseconds of what one launch does, such as that of a graph."""
        return self._without_pairs(self._taken(self.watch, work), 1)

    def _without_pairs(self, taken_ns: float, pairs: int) -> float:
        return max(taken_ns - pairs * self.pair_ns, 0.0)

    def _taken(self, watch: Stopwatch, work: Callable[[], None]) -> float:
        while True:
            self._synchronize()
            watch.reset()
            if self._covers:
                self._cover()
            watch.start()
            work()
            watch.stop()
            ahead = not (self._covers and watch.began())
            self._synchronize()
            if ahead or not self._lengthen():
                return watch.read().real_ns

    def _cover(self) -> None:
        for cover in self._covers:
            cover(self._cover_ns)

    def _lengthen(self) -> bool:
        """Whether a longer cover may help; it stays for the ops that follow. One that did not help does not."""
        if self.why_exposed:
            return False
        if self._cover_ns >= _LONGEST_COVER_NS:
            self._cover_ns, self.why_exposed = _FIRST_COVER_NS, _EXPOSED
            return False
        self._cover_ns = min(2 * self._cover_ns, _LONGEST_COVER_NS)
        return True

    def _synchronize(self) -> None:
        for device in self._accelerators:
            torch.accelerator.synchronize(device)


# A sample takes at least this part of the time for an op: every one is kept and reported.
_SAMPLES_AT_MOST = 250
_LEAST_SAMPLES = 11
# However little is requested: with less time, short ops swap ranks from run to run, and an interval needs six samples.
# Ops for which that many samples take long have fewer, and no interval.
_FLOOR_NS = 5e6
_FLOOR_SAMPLES = SMALLEST_FOR_INTERVAL
_LONG_NS = 1e9
_WARMUP_CALLS = 3
_OVERHEAD_CALLS = 1000
# Imports of these kinds contain single calls, none of which uses another's results.
_SINGLE_CALLS = ("kineto", "tracelens")
_STOPPED = "an op before it failed, and that ended the measurement"
_INTERRUPTED = "the measurement was interrupted before it"
_ONCE = "it acts on an object whose address is its argument, which cannot be repeated"
_PATIENCE = 5  # restoring is untimed: give up after this many times the requested time, as for a whole replay

# Makes what takes samples: of devices, a clock and what empties the caches.
MakeSampler = Callable[[Sequence[torch.device], Clock, CacheFlush | None], Sampler]
# The group just measured, its position from 1, and the number of groups.
OnMeasured = Callable[[MeasuredOp, int, int], None]


def measure_ops(
    plan: Plan,
    options: OpOptions,
    *,
    clock: Clock | None = None,
    progress: Progress,
    on_measured: OnMeasured | None = None,
    record_graph: RecordGraph | None = None,
    make_sampler: MakeSampler = Sampler,
    ranks: Ranks | None = None,
) -> PerOpRun:
    """Measure a plan's ops one by one; the plan must be made with keep_going. `record_graph` replaces
    the graphs of the plan's device, `make_sampler` what takes the samples. Each of several `ranks` measures a part of
    the ops on its own device; rank 0 returns all of them.

    If there is something to compare with, a verified replay determines the verdicts first. Raises UsageError if no op
    is chosen.
    """
    if options.cuda_graph and record_graph is None:
        record_graph = graphs_of(plan.devices)
    chosen = select_ops(
        plan.reader,
        pattern=options.pattern,
        limit=options.limit,
        every=options.every,
        scopes=options.scopes,
        ops=options.ops,
        progress=progress,
    )
    measurement = _OpMeasurement(plan, options, chosen, clock or Clock(), progress, on_measured, make_sampler, ranks)
    measurement.record_graph = record_graph
    return measurement.run()


def _shown(result: Any) -> tuple[str, ...]:
    if result is None:
        return ()
    return tuple(map(_text, result)) if isinstance(result, tuple) else (_text(result),)


def _text(value: Any) -> str:
    """A replayed result, formatted as captured ones are."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}] on {value.device}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def _nothing(_inputs: list[Any], _on_scope: None) -> list[Any]:
    return []


# What a rank tells of an op that it measured, besides its work.
_TOLD = (
    "verdict", "reason", "ordinal", "calls", "cpu_ns", "host_ns", "returned", "samples", "unmeasurable", "graph_calls",
    "no_graph", "exposed", "on_device", "eager_ns", "measured_on",
)  # fmt: skip


def _told_work(work: CallWork | None) -> dict[str, Any] | None:
    if work is None:
        return None
    return {**vars(work), "dtype": work.dtype and str(work.dtype).removeprefix("torch."), "device": str(work.device)}


class _Stop(Exception):
    """An op failed, and measuring stops there."""


class _OpMeasurement:
    """One pass through a capture that measures each group at its first occurrence."""

    def __init__(
        self,
        plan: Plan,
        options: OpOptions,
        chosen: SelectedOps,
        clock: Clock,
        progress: Progress,
        on_measured: OnMeasured | None,
        make_sampler: MakeSampler,
        ranks: Ranks | None,
    ) -> None:
        self._plan, self._options, self._chosen, self._progress = plan, options, chosen, progress
        self._clock, self._on_measured = clock, on_measured
        self.record_graph: RecordGraph | None = None
        inputs = options.inputs or ("hot" if options.cuda_graph else default_inputs(plan.devices))
        self._flush = CacheFlush(plan.devices) if inputs == "cold" else None
        self._inputs = describe_inputs(inputs, self._flush, "calls")
        self._sampler = make_sampler(plan.devices, clock, self._flush)
        self._gpus = GpuWatch(plan.devices)
        self._others_share: float | None = None
        self._ops = {group.first_ordinal: MeasuredOp(group) for group in chosen.groups}
        self._ranks = ranks
        self._others = {
            first for place, first in enumerate(self._ops) if ranks is not None and place % ranks.world != ranks.rank
        }  # measured by other ranks
        self._other_gpus: list[dict[str, Any]] = []
        self._reported = 0
        self._verdicts: dict[int, tuple[Verdict, str]] = {}
        self._differs = False

    def run(self) -> PerOpRun:
        only = None if self._chosen.everything else self._plan.preparation.slice(self._chosen.by_ordinal)
        verification = self._plan.verification(self._options.verify, only)
        verified = verification.text if self._options.verify != "none" else "not verified: --verify=none"
        if verification.mode != "none":
            self._progress("verifying before timing", 0, None)
            result = self._plan.execute(verify=self._options.verify, keep_going=True, only=only)
            verified, self._differs = result.verified, result.divergence is not None
            self._verdicts = {each.ordinal: (each.verdict, each.reason) for each in result.verdicts or ()}
        overhead = self._overhead()
        self._gpus.begin()
        load = BackgroundLoad()
        stopped = interrupted = False
        try:
            with collector_paused():
                if verification.mode == "none" and self._plan.reader.session.policies.get("import") in _SINGLE_CALLS:
                    self._each_alone()
                else:
                    self._examine(only)
        except _Stop:
            stopped = True
        except KeyboardInterrupt:  # what was measured until now is worth reporting
            interrupted = True
        self._gpus.end()
        self._others_share = load.end() if self._ranks is None else None
        for ordinal, group in self._chosen.by_ordinal.items():
            self._worsen(self._ops[group.first_ordinal], *self._verdicts.get(ordinal, ("ok", "")))
        if self._ranks is not None:
            self._put_together(self._ranks)
        return self._finished(verified, overhead, stopped, interrupted)

    def _examine(self, only: Slice | None) -> None:
        for each in self._plan.examine(self._op, only):
            if self._verdicts.get(each.ordinal, ("ok", ""))[0] == "ok":
                self._verdicts[each.ordinal] = each.verdict, each.reason

    def _each_alone(self) -> None:
        """Measure independent calls: one of each group, with only its content; if that cannot be run, the others of the
        group."""
        self._examine(self._plan.preparation.slice(self._ops))
        others = {
            ordinal
            for ordinal, group in self._chosen.by_ordinal.items()
            if ordinal not in self._ops and self._ops[group.first_ordinal].ordinal is None
        }
        if others:
            self._examine(self._plan.preparation.slice(others))

    def _op(self, op: IsolatedOp) -> None:
        """Measure an op that was reached, if its group needs it."""
        group = self._chosen.by_ordinal.get(op.ordinal)
        if group is None:
            return
        measured = self._ops[group.first_ordinal]
        if self._plan.preparation.runs_once(op.signature):
            self._verdicts[op.ordinal] = "refused", _ONCE
        verdict, _reason = self._verdicts.get(op.ordinal, ("ok", ""))
        if group.first_ordinal in self._others:
            return
        if verdict == "ok" and measured.times is None and measured.verdict != "failed":
            self._progress(group.kernel.qualified_name, self._reported, len(self._ops))
            measured.ordinal, measured.verdict = op.ordinal, "ok"
            try:
                self._time(op, measured)
            except (Exception, SystemExit, GeneratorExit) as error:
                # Any exception of an op is its verdict, and the replay continues.
                verdict = measured.verdict = "failed"
                reason = f"{type(error).__name__}: {first_line(error)}"
                self._verdicts[op.ordinal] = verdict, reason
                measured.reason = reason
            self._report(measured)
        if self._options.stop_on_error and verdict in FAILURES:
            raise _Stop

    def _time(self, op: IsolatedOp, measured: MeasuredOp) -> None:
        for _ in range(_WARMUP_CALLS):
            op.restore()
            op.calls(1)
        op.restore()
        called = op.called()
        measured.returned = _shown(called.result)
        measured.work = work_of(measured.group.kernel, called)
        del called
        sampler = self._sampler
        on_host = any(map(is_accelerator, self._plan.devices)) and not is_accelerator(measured.work.device)
        sampler.begin(on_host=on_host)
        first, _spent = sampler.sample(op, Shape())
        share = (self._options.min_time.seconds or 0.0) * 1e9 / _SAMPLES_AT_MOST
        shape = sampler.shape(op, first, share)
        samples: list[Readings] = []
        times: list[float] = []
        timed, began = 0.0, self._clock.real()
        narrow = self._narrow()
        while not self._enough(shape.total * len(times), times, timed, self._clock.real() - began, narrow):
            readings, spent = sampler.sample(op, shape)
            samples.append(readings)
            times.append(readings.real_ns)
            timed += spent
        host = [each.host_ns for each in samples if each.host_ns is not None]
        measured.calls, measured.samples = shape.total * len(times), tuple(times)
        measured.exposed = sampler.why_exposed
        statistics = summarize(times)
        measured.on_device = None if on_host else sampler.works_on_device(statistics.median)
        if measured.on_device is not False:  # else less than can be told apart is an answer
            measured.unmeasurable = self._unmeasurable(statistics, shape.total)
        measured.times = None if measured.unmeasurable else statistics
        measured.cpu_ns = float(np.mean([each.cpu_ns for each in samples]))
        measured.host_ns = float(np.mean(host)) if host else None
        if self.record_graph is not None and not on_host:
            try:
                self._time_graph(graph_of(op, statistics.median, self.record_graph), op, measured)
            except NoGraph as error:
                measured.no_graph = str(error)
            op.restore()

    def _time_graph(self, graph: OpGraph, op: IsolatedOp, measured: MeasuredOp) -> None:
        """Replace the times by those of calls in a graph; what the host took to issue each call stays."""
        times: list[float] = []
        timed, began = 0.0, self._clock.real()
        narrow = self._narrow()
        self._sampler.begin(on_host=False)
        while not self._enough(graph.calls * len(times), times, timed, self._clock.real() - began, narrow):
            op.restore()
            taken = self._sampler.launch(graph.launch)
            put_back = 0.0 if graph.restoring is None else self._sampler.launch(graph.restoring)
            times.append((taken - put_back) / graph.calls)
            timed += taken
        statistics = summarize(times)
        measured.exposed = self._sampler.why_exposed
        measured.eager_ns = None if measured.times is None else measured.times.median
        measured.unmeasurable = self._unmeasurable(statistics, graph.calls)
        measured.times = None if measured.unmeasurable else statistics
        measured.calls, measured.samples, measured.graph_calls = graph.calls * len(times), tuple(times), graph.calls

    @staticmethod
    def _worsen(measured: MeasuredOp, verdict: Verdict, reason: str) -> None:
        """A group has the worst verdict of its ops, and of the ranks that looked at them."""
        if SEVERITY.index(verdict) > SEVERITY.index(measured.verdict) or (
            verdict == measured.verdict and not measured.reason
        ):
            measured.verdict, measured.reason = verdict, reason

    def _put_together(self, ranks: Ranks) -> None:
        """Tell rank 0 what was measured here; it notes what the others tell."""
        own = {}
        device = str(self._plan.devices[0]) if self._plan.devices else "cpu"
        for first, measured in self._ops.items():
            if first not in self._others:
                measured.measured_on = f"rank {ranks.rank}, {device}"
                own[first] = {name: getattr(measured, name) for name in _TOLD} | {"work": _told_work(measured.work)}
        said = {"differs": self._differs, "gpus": self._gpus.rows(), "ops": own}
        for rank, heard in enumerate(ranks.gather(f"ops/{ranks.turns}", said)):
            if rank == ranks.rank:
                continue
            self._differs |= heard["differs"]
            self._other_gpus += heard["gpus"]
            for first, fields in heard["ops"].items():
                measured = self._ops[int(first)]
                work = fields.pop("work")
                seen_here = measured.verdict, measured.reason
                for name, value in fields.items():
                    setattr(measured, name, value)
                self._worsen(measured, *seen_here)
                measured.work = None if work is None else self._heard_work(work)
                if measured.samples and not measured.unmeasurable:
                    measured.times = summarize(measured.samples)
                if measured.ordinal is not None:
                    self._report(measured)

    def _heard_work(self, said: dict[str, Any]) -> CallWork:
        """Of a call on another rank, as if it were of this one's device, whose peaks are known here."""
        on_device = is_accelerator(torch.device(said["device"]))
        device = self._plan.devices[0] if on_device else torch.device("cpu")
        dtype = None if said["dtype"] is None else getattr(torch, said["dtype"])
        return CallWork(**{**said, "dtype": dtype, "device": device})

    def _narrow(self) -> StoppingRule | None:
        return None if self._options.precision is None else StoppingRule(self._options.precision.share)

    def _unmeasurable(self, statistics: TimeStatistics, calls: int) -> str:
        """Why times are no measurement if each is that of `calls` calls."""
        step = self._sampler.step_ns
        step = None if step is None else step / calls
        return why_unmeasurable(statistics, step, noise=self._options.precision is not None)

    def _enough(
        self, calls: int, times: list[float], timed_ns: float, waited_ns: float, narrow: StoppingRule | None
    ) -> bool:
        samples, goal, precision = len(times), self._options.min_time, self._options.precision
        if waited_ns < _LONG_NS and (timed_ns < _FLOOR_NS or samples < _FLOOR_SAMPLES):
            return False
        if goal.iterations is not None:
            floor = calls >= goal.iterations
        else:
            wanted = (goal.seconds or 0.0) * 1e9
            if samples < _LEAST_SAMPLES:
                return samples > 0 and waited_ns >= _PATIENCE * max(wanted, 1e9)
            floor = timed_ns >= wanted
            # Restoring takes several times as long as many an op that writes its inputs: such an op has no more time.
            most = _PATIENCE * wanted if precision is None else min(_PATIENCE * wanted, precision.cap_s * 1e9)
            if waited_ns >= most or calls >= MOST_ITERATIONS:
                return True
        if not floor or precision is None or narrow is None:
            return floor
        return narrow(times) or waited_ns >= precision.cap_s * 1e9

    def _overhead(self) -> float:
        """The time of a call that does nothing, measured like the others."""
        watch = stopwatch_for((), self._clock)
        for _ in range(2):  # the first one warms up
            watch.reset()
            watch.start()
            call_repeatedly(_nothing, (), _OVERHEAD_CALLS)
            watch.stop()
        return watch.read().real_ns / _OVERHEAD_CALLS

    def _report(self, measured: MeasuredOp) -> None:
        self._reported += 1
        if self._on_measured is not None:
            self._on_measured(measured, self._reported, len(self._ops))

    def _finished(self, verified: str, overhead: float, stopped: bool, interrupted: bool) -> PerOpRun:
        """Report the groups that could not be measured."""
        for measured in self._ops.values():
            if measured.status == "ok" and measured.times is None:
                measured.verdict, measured.reason = "skipped", _INTERRUPTED if interrupted else _STOPPED
            elif measured.ordinal is not None:
                continue
            if not interrupted:
                self._report(measured)
        return PerOpRun(
            self._options,
            self._chosen,
            list(self._ops.values()),
            verified,
            overhead,
            stopped,
            self._differs,
            self._inputs,
            self._sampler.watch.describe(),
            self._gpus.rows() + self._other_gpus,
            self._others_share,
            self._sampler.pair_ns,
            interrupted,
        )
