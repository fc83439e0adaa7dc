"""Every op of a capture measured on its own, on its inputs in the replay.

The capture is walked through once, op by op; if only some ops are chosen, only they and the ops they depend on are run.
If ops do not depend on each other (most imports) and nothing can be compared, one op of each signature is run. The
first time that an op of each signature can run, it is run apart from the replay until there are enough times: warmed
up, with the tensors it writes restored between calls (`sampling` has how). A loop of calls finds inputs and code in the
caches (unless they are flushed: `inputs`), which a whole replay may not: the sum of isolated times is an estimate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.slices import Slice
from replayfmt.replay.results import Verdict
from replayfmt.replay.run.isolated import IsolatedOp, call_repeatedly

from ..gpu_state import GpuWatch
from ..inputs import CacheFlush, default_inputs, describe_inputs
from ..measure import Progress, further_readings
from ..meters.meter import Clock, MakeMeter, NotMeasured
from ..meters.registered import METERS
from ..meters.stopwatch import Readings, stopwatch_for
from ..min_time import MOST_ITERATIONS
from ..precision import NarrowEnough
from ..statistics import SMALLEST_FOR_INTERVAL, TimeStatistics, summarize, why_unmeasurable
from .graphs import NoGraph, OpGraph, RecordGraph, graph_of, graphs_of
from .groups import Chosen, choose
from .results import FAILURES, SEVERITY, MeasuredOp, OpOptions, PerOpRun
from .sampling import Sampler, Shape
from .work import work_of

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
_ONCE = "it acts on an object whose address is its argument, which cannot be repeated"
_PATIENCE = 5  # restoring is untimed: give up after this many times the requested time, as for a whole replay

# Makes what takes samples: of devices, a clock, meters and what empties the caches.
MakeSampler = Callable[[Sequence[torch.device], Clock, Sequence[MakeMeter], CacheFlush | None], Sampler]
# The group just measured, its position from 1, and the number of groups.
OnMeasured = Callable[[MeasuredOp, int, int], None]


def measure_ops(
    plan: Plan,
    options: OpOptions,
    *,
    clock: Clock | None = None,
    progress: Progress,
    on_measured: OnMeasured | None = None,
    meters: Sequence[MakeMeter] = METERS,
    record_graph: RecordGraph | None = None,
    make_sampler: MakeSampler = Sampler,
) -> PerOpRun:
    """Measure a plan's ops one by one, with `meters`; the plan must be made with keep_going. `record_graph` replaces
    the graphs of the plan's device, `make_sampler` what takes the samples.

    If there is something to compare with, a verified replay determines the verdicts first. Raises UsageError if no op
    is chosen.
    """
    if options.cuda_graph and record_graph is None:
        record_graph = graphs_of(plan.devices)
    chosen = choose(
        plan.reader,
        pattern=options.pattern,
        limit=options.limit,
        every=options.every,
        scopes=options.scopes,
        progress=progress,
    )
    measurement = _OpMeasurement(plan, options, chosen, clock or Clock(), progress, on_measured, meters, make_sampler)
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


class _Stop(Exception):
    """An op failed, and measuring stops there."""


class _OpMeasurement:
    """One pass through a capture that measures each group at its first occurrence."""

    def __init__(
        self,
        plan: Plan,
        options: OpOptions,
        chosen: Chosen,
        clock: Clock,
        progress: Progress,
        on_measured: OnMeasured | None,
        meters: Sequence[MakeMeter],
        make_sampler: MakeSampler,
    ) -> None:
        self._plan, self._options, self._chosen, self._progress = plan, options, chosen, progress
        self._clock, self._on_measured = clock, on_measured
        self.record_graph: RecordGraph | None = None
        inputs = options.inputs or ("hot" if options.cuda_graph else default_inputs(plan.devices))
        self._flush = CacheFlush(plan.devices) if inputs == "cold" else None
        self._inputs = describe_inputs(inputs, self._flush, "calls")
        self._sampler = make_sampler(plan.devices, clock, meters, self._flush)
        self._gpus = GpuWatch(plan.devices)
        self._ops = {group.first_ordinal: MeasuredOp(group) for group in chosen.groups}
        self._reported = 0
        self._verdicts: dict[int, tuple[Verdict, str]] = {}
        self._differs = False

    def run(self) -> PerOpRun:
        only = None if self._chosen.everything else self._plan.slice(self._chosen.by_ordinal)
        verification = self._plan.verification(self._options.verify, only)
        verified = verification.text if self._options.verify != "none" else "not verified: --verify=none"
        if verification.mode != "none":
            self._progress("verifying before timing", 0, None)
            result = self._plan.execute(verify=self._options.verify, keep_going=True, only=only)
            verified, self._differs = result.verified, result.divergence is not None
            self._verdicts = {each.ordinal: (each.verdict, each.reason) for each in result.verdicts or ()}
        overhead = self._overhead()
        self._gpus.begin()
        stopped = False
        was_on = gc.isenabled()
        gc.disable()
        try:
            if verification.mode == "none" and self._plan.reader.session.policies.get("import") in _SINGLE_CALLS:
                self._each_alone()
            else:
                self._examine(only)
        except _Stop:
            stopped = True
        finally:
            if was_on:
                gc.enable()
        self._gpus.end()
        return self._finished(verified, overhead, stopped)

    def _examine(self, only: Slice | None) -> None:
        for each in self._plan.examine(self._op, only):
            if self._verdicts.get(each.ordinal, ("ok", ""))[0] == "ok":
                self._verdicts[each.ordinal] = each.verdict, each.reason

    def _each_alone(self) -> None:
        """Measure independent calls: one of each group, with only its content; if that cannot be run, the others of the
        group."""
        self._examine(self._plan.slice(self._ops))
        others = {
            ordinal
            for ordinal, group in self._chosen.by_ordinal.items()
            if ordinal not in self._ops and self._ops[group.first_ordinal].ordinal is None
        }
        if others:
            self._examine(self._plan.slice(others))

    def _op(self, op: IsolatedOp) -> None:
        """Measure an op that was reached, if its group needs it."""
        group = self._chosen.by_ordinal.get(op.ordinal)
        if group is None:
            return
        measured = self._ops[group.first_ordinal]
        if self._plan.runs_once(op.signature):
            self._verdicts[op.ordinal] = "refused", _ONCE
        verdict, _reason = self._verdicts.get(op.ordinal, ("ok", ""))
        if verdict == "ok" and measured.times is None and measured.verdict != "failed":
            self._progress(group.kernel.qualified_name, self._reported, len(self._ops))
            measured.ordinal, measured.verdict = op.ordinal, "ok"
            try:
                self._time(op, measured)
            except (Exception, SystemExit, GeneratorExit) as error:
                # Any exception of an op is its verdict, and the replay continues.
                verdict = measured.verdict = "failed"
                reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
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
        measured.further = {
            quantity: readings if isinstance(readings, NotMeasured) else float(readings.mean())
            for quantity, readings in further_readings(samples).items()
        }

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

    def _narrow(self) -> NarrowEnough | None:
        return None if self._options.precision is None else NarrowEnough(self._options.precision.share)

    def _unmeasurable(self, statistics: TimeStatistics, calls: int) -> str:
        """Why times are no measurement if each is that of `calls` calls."""
        step = self._sampler.step_ns
        step = None if step is None else step / calls
        return why_unmeasurable(statistics, step, noise=self._options.precision is not None)

    def _enough(
        self, calls: int, times: list[float], timed_ns: float, waited_ns: float, narrow: NarrowEnough | None
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

    def _finished(self, verified: str, overhead: float, stopped: bool) -> PerOpRun:
        """Give each group the worst verdict of its ops; report those that could not be measured."""
        for ordinal, group in self._chosen.by_ordinal.items():
            verdict, reason = self._verdicts.get(ordinal, ("ok", ""))
            measured = self._ops[group.first_ordinal]
            if SEVERITY.index(verdict) > SEVERITY.index(measured.verdict) or (
                verdict == measured.verdict and not measured.reason
            ):
                measured.verdict, measured.reason = verdict, reason
        for measured in self._ops.values():
            if measured.ordinal is None:
                if measured.verdict == "ok":
                    measured.verdict, measured.reason = "skipped", _STOPPED
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
            self._gpus.rows(),
            self._sampler.pair_ns,
        )
