"""Runs a plan repeatedly and keeps the time of every single replay.

Repetitions run one after the other: each replay restores its state untimed, then runs the whole capture between the
start and the stop of a stopwatch, or of one stopwatch per measured scope. Nothing is verified while anything is timed:
verified replays run before and after.

With --inputs=cold a buffer larger than the last-level cache is rewritten, untimed, before each measured replay or call
(`CacheFlush`); hot inputs are the same buffers each time. With --cuda-graph the work is also launched as one graph of
its device (`require_graphs`), without the gaps in which that waits for the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from replayfmt.collector import collector_paused
from replayfmt.errors import OpReplayError, ReplayMismatch, UsageError
from replayfmt.format.validation import count_of
from replayfmt.pytorch.accelerators import NoGraphs, device_module, is_accelerator, new_graph
from replayfmt.replay.plan import Plan
from replayfmt.replay.replay_graph import NotGraphCapturable, WholeGraph
from replayfmt.replay.results import ReplayResult, VerifyMode
from replayfmt.replay.run.execute import OnScope

from .machine import BackgroundLoad, GpuWatch, largest_cache
from .meters import Clock, MeasuredRegion, Readings, ReplayTimer, ScopeWatch, find_regions, stopwatch_for, whole_capture
from .statistics import MOST_ITERATIONS, MinTime, Precision, StoppingRule, TimeStatistics, summarize

FLAG = "--cuda-graph"


def require_graphs(devices: Sequence[torch.device]) -> torch.device:
    """The one accelerator that a replay works on. Raises UsageError if there is none, or if it has no graphs."""
    found = [device for device in devices if is_accelerator(device)]
    if not found:
        works_on = ", ".join(map(str, devices)) or "no device"
        raise UsageError(
            f"{FLAG} needs a device that has graphs, such as a CUDA device, and the replay works on {works_on}: "
            "leave it out, or replay on one with --device"
        )
    if len(found) > 1:
        raise UsageError(f"{FLAG} measures one device, and the replay works on {', '.join(map(str, found))}")
    try:
        new_graph(found[0])
    except (NoGraphs, RuntimeError) as problem:
        raise UsageError(f"{FLAG}: {problem}: leave it out") from problem
    return found[0]


Inputs = Literal["hot", "cold"]
INPUTS: tuple[Inputs, ...] = ("hot", "cold")
# The buffer is this many times as large as the cache: what is replaced is the cache's choice, not always the oldest.
_TIMES_THE_CACHE = 2
# Where the size of the cache is not known; larger than the last-level caches of most processors.
_UNKNOWN_CACHE_BYTES = 256 << 20
_MIB = 1 << 20


def default_inputs(devices: Sequence[torch.device]) -> Inputs:
    """What isolated ops are measured with unless asked otherwise: cold on accelerators, hot elsewhere."""
    return "cold" if any(map(is_accelerator, devices)) else "hot"


class CacheFlush:
    """Replaces the content of the caches of some devices; the host's are among them only if it is a device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Allocates the buffers."""
        self._buffers: list[torch.Tensor] = []
        described = []
        for device in devices:
            if device.type == "meta":
                continue
            cache, size = _cache_and_flush(device)
            self._buffers.append(torch.zeros(size, dtype=torch.uint8, device=device))
            of = f"its last-level cache has {cache / _MIB:.4g} MiB" if cache else "the size of its caches is not known"
            described.append(f"{device}: {size / _MIB:.4g} MiB are rewritten before each; {of}")
        self.description = "; ".join(described) or "nothing is rewritten, because no device with a cache takes part"

    def __call__(self) -> None:
        """Read and write every byte of the buffers; on accelerators, issue the work that does."""
        for buffer in self._buffers:
            buffer.add_(1)


def flush_bytes(devices: Sequence[torch.device]) -> int:
    """How many bytes empty the caches of each of these devices when they are rewritten there."""
    return max(_cache_and_flush(device)[1] for device in devices)


def _cache_and_flush(device: torch.device) -> tuple[int | None, int]:
    cache = _device_cache(device) if is_accelerator(device) else largest_cache(Path("/"))
    return cache, _TIMES_THE_CACHE * cache if cache else _UNKNOWN_CACHE_BYTES


def _device_cache(device: torch.device) -> int | None:
    """Bytes of an accelerator's last-level cache; None if PyTorch does not say."""
    properties = getattr(device_module(device.type), "get_device_properties", None)
    size = getattr(properties(device), "L2_cache_size", 0) if properties is not None else 0
    return int(size) or None


def describe_inputs(inputs: Inputs, flush: CacheFlush | None, calls: str) -> str:
    """One line for reports: what the figures hold for. `calls` names what is repeated."""
    if inputs == "hot" or flush is None:
        return f"hot: the same buffers in each of the {calls}, so what fits into the caches stays there"
    return f"cold: {flush.description}"


# Restoring state is untimed and may take many times as long as the replay: --benchmark-min-time counts timed seconds,
# and measuring stops after this many times as much real time. Rule and number are Google Benchmark's.
PATIENCE = 5
# Objects created since the last collection that justify an untimed collection between two replays.
_MUCH_GARBAGE = 20_000


@dataclass(frozen=True)
class Options:
    """How to measure. `warmup` counts untimed replays before each repetition's first timed one. With `precision`,
    replays go on after `min_time` until the medians of all reported rows are known that well, or its time is up. With
    `cuda_graph` each row is measured again as one graph of the device, where it can be one."""

    min_time: MinTime = field(default_factory=lambda: MinTime(seconds=0.5))
    repetitions: int = 1
    warmup: int = 2
    verify: VerifyMode = "auto"
    scopes: tuple[str, ...] = ()
    precision: Precision | None = None
    inputs: Inputs = "hot"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        count_of("--benchmark-repetitions", self.repetitions, 1, MOST_ITERATIONS)
        count_of("--benchmark-warmup", self.warmup, 0, MOST_ITERATIONS)


@dataclass(frozen=True)
class Sample:
    """One repetition of one region: the time of each of its iterations, in nanoseconds, in order.

    `host` is set if `real` is the devices' time: how long the host took to issue the work.
    """

    real: np.ndarray
    cpu: np.ndarray
    host: np.ndarray | None

    @staticmethod
    def of(iterations: Sequence[Readings]) -> Sample:
        host = [each.host_ns for each in iterations if each.host_ns is not None]
        return Sample(
            np.array([each.real_ns for each in iterations], dtype=np.float64),
            np.array([each.cpu_ns for each in iterations], dtype=np.float64),
            np.array(host, dtype=np.float64) if len(host) == len(iterations) else None,
        )

    def statistics(self) -> TimeStatistics:
        """Statistics of the iterations' real times."""
        return summarize(self.real)


@dataclass(frozen=True)
class GraphMeasurement:
    """A region in one graph of its device. `samples` are its launches, empty if `reason` says why there is no graph;
    `compared` says how the graph was found to compute what its ops do."""

    samples: list[Sample] = field(default_factory=list)
    compared: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Measurement:
    """One region with its repetitions, all with the same number of iterations. `in_graph` is None if no graph was asked
    for."""

    region: MeasuredRegion
    samples: list[Sample]
    in_graph: GraphMeasurement | None = None

    @property
    def reported(self) -> list[Sample]:
        """The samples that its figures are from."""
        return self.in_graph.samples if self.in_graph is not None and self.in_graph.samples else self.samples


@dataclass(frozen=True)
class Run:
    """A finished benchmark whose verifications passed.

    `measurements` has one entry per requested row. `whole` is that of the entire replay, even if only scopes were
    requested. `before` and `after` are the results of the verified replays, None if verification is off. `cut_short` is
    the number of elapsed seconds if measuring gave up before it had the requested timed seconds, else None;
    `interrupted` is set if the user ended it, after which the complete repetitions are left. `inputs`
    says what was in the caches; `step_ns` is the smallest step of the clock that the times are from, None if unknown;
    `meters` describes every clock (`Stopwatch.describe`), `gpus` the states of the GPUs (`GpuWatch.rows`).
    `others_share` is `BackgroundLoad.end` of the measurement; None for one of several ranks, which load each other.
    """

    options: Options
    measurements: list[Measurement]
    whole: Measurement
    before: ReplayResult | None
    after: ReplayResult | None
    cut_short: float | None
    inputs: str = ""
    step_ns: float | None = None
    meters: list[dict[str, Any]] = field(default_factory=list)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    others_share: float | None = None
    interrupted: bool = False


# The current activity, how many are done, of how many (None: not yet known).
Progress = Callable[[str, int, int | None], None]


def unseen(_what: str, _done: int, _of: int | None) -> None:
    """Progress that is not shown."""


# A plan of a capture that was cut to the scopes of a name.
PlanOfScope = Callable[[str], AbstractContextManager[Plan]]


def measure(
    plan: Plan,
    options: Options,
    *,
    clock: Clock | None = None,
    progress: Progress | None = None,
    plan_of_scope: PlanOfScope | None = None,
    align: Callable[[], None] | None = None,
) -> Run:
    """Benchmark a plan.

    `clock` replaces the host's clocks; graphs of scopes need `plan_of_scope`. `align` is
    called, untimed, right before each replay, also before those that warm up. Raises
    UsageError and ReplayRefused for scopes that cannot be measured and for devices without graphs, before anything
    runs; ReplayFailed if a replay fails; ReplayMismatch if a verified replay does not match.
    """
    regions = find_regions(plan.reader, options.scopes)
    if options.cuda_graph:
        require_graphs(plan.devices)
    runner = _Runner(
        plan, whole_capture(plan.reader), regions, options, timed_by(plan, clock), progress or unseen, align=align
    )
    before = runner.verify("before")
    gpus = GpuWatch(plan.devices)
    gpus.begin()
    others = BackgroundLoad()
    iterations, cut_short = runner.first_repetition()
    interrupted = False
    try:
        for _ in range(1, options.repetitions):
            runner.repetition(iterations)
    except KeyboardInterrupt:  # what was measured until now is worth reporting
        if align is not None:
            raise  # other ranks wait for this one
        interrupted = True
    whole = Measurement(runner.whole_region, runner.whole_samples)
    scopes = [Measurement(watch.region, samples) for watch, samples in zip(runner.watches, runner.samples, strict=True)]
    measurements = scopes or [whole]
    if options.cuda_graph and not interrupted:
        measurements = [replace(each, in_graph=_in_graph(each.region, runner, plan_of_scope)) for each in measurements]
    gpus.end()
    others_share = others.end() if align is None else None
    after = runner.verify("after")
    meters = runner.meters()
    given = (options, measurements, whole, before, after, cut_short, runner.inputs)
    return Run(*given, *meters, gpus.rows(), others_share, interrupted)


def _in_graph(region: MeasuredRegion, runner: _Runner, plan_of_scope: PlanOfScope | None) -> GraphMeasurement:
    """The launches of a region in one graph: of the whole replay, or of a capture that was cut to a scope."""
    try:
        if region.name is None:
            opened: AbstractContextManager[Plan] = nullcontext(runner.plan)
        elif plan_of_scope is not None:
            opened = plan_of_scope(region.name)
        else:
            raise NotGraphCapturable("a graph of a scope needs a capture that was cut to it")
        with opened as plan:
            graph = WholeGraph(plan)
            launches = _Runner(plan, region, [], runner.options, timed_by(plan, runner.clock), runner.progress, graph)
            iterations, _cut_short = launches.first_repetition()
            for _ in range(1, runner.options.repetitions):
                launches.repetition(iterations)
            return GraphMeasurement(launches.whole_samples, graph.compared)
    except (NotGraphCapturable, OpReplayError) as error:
        return GraphMeasurement(reason=str(error).partition("\n")[0])


def timed_by(plan: Plan, clock: Clock | None) -> Clock:
    """The clock of a benchmark, which also times the streams that the plan uses besides the default ones."""
    clock = clock or Clock()
    streams = plan.context.streams
    return clock if streams is None else replace(clock, streams=streams.besides_default)


class _Runner:
    """The replays of one benchmark, in order, and their times so far."""

    def __init__(
        self,
        plan: Plan,
        whole: MeasuredRegion,
        regions: list[MeasuredRegion],
        options: Options,
        clock: Clock,
        progress: Progress,
        graph: WholeGraph | None = None,
        align: Callable[[], None] | None = None,
    ) -> None:
        """With `graph` that is launched instead of replaying op by op."""
        self.plan, self.options, self.clock, self.progress = plan, options, clock, progress
        self._graph = graph
        self.whole_region = whole
        self.whole_samples: list[Sample] = []
        self.watches = [ScopeWatch(region, stopwatch_for(plan.devices, clock)) for region in regions]
        flush = CacheFlush(plan.devices) if options.inputs == "cold" else None
        self.inputs = describe_inputs(options.inputs, flush, "replays")
        before = [each for each in (flush, align) if each is not None]
        self._timer = ReplayTimer(stopwatch_for(plan.devices, clock), self.watches, before)
        self.samples: list[list[Sample]] = [[] for _ in regions]

    def meters(self) -> tuple[float | None, list[dict[str, Any]]]:
        """`Run.step_ns` and `Run.meters`."""
        return self._timer.stopwatch.step_ns(), self._timer.stopwatch.describe()

    def verify(self, when: str) -> ReplayResult | None:
        """One verified, untimed replay; None if verification is off. Raises ReplayMismatch."""
        if self.options.verify == "none":
            return None
        self.progress(f"verifying {when} timing", 0, None)
        return require_match(self.plan.execute(verify=self.options.verify), f"{when} timing")

    def first_repetition(self) -> tuple[int, float | None]:
        """Run the repetition that determines the number of iterations; returns that number, and `Run.cut_short`."""
        goal, precision = self.options.min_time, self.options.precision
        if goal.iterations is not None and precision is None:
            self.repetition(goal.iterations)
            return goal.iterations, None
        goal_ns = (goal.seconds or 0.0) * 1e9
        narrow = [] if precision is None else [StoppingRule(precision.share) for _ in self.watches or (None,)]
        timed = waited = 0.0
        before = self.clock.real()

        def enough(times: list[list[float]]) -> bool:
            nonlocal timed, waited, before
            done, last = len(times[0]), times[0][-1]
            timed += last
            now = self.clock.real()
            waited += now - before if done > 1 else last  # the first one was preceded by warm-ups
            before = now
            if done >= MOST_ITERATIONS:
                return True
            if done < goal.iterations if goal.iterations is not None else timed < goal_ns:
                return goal.iterations is None and waited >= PATIENCE * goal_ns
            if precision is None or waited >= precision.cap_s * 1e9:
                return True
            return all([each(row) for each, row in zip(narrow, times[1:] or times, strict=True)])

        done = self._repeat(enough, None)
        return done, waited / 1e9 if timed < goal_ns else None

    def repetition(self, iterations: int) -> None:
        """Warm up, then time `iterations` replays."""
        self._repeat(lambda times: len(times[0]) >= iterations, iterations)

    def _repeat(self, enough: Callable[[list[list[float]]], bool], of: int | None) -> int:
        """Warm up, then replay until `enough` says so of the real times so far: of the whole, and of each scope."""
        on_scope = followed_by(self.watches)
        whole: list[Readings] = []
        scopes: list[list[Readings]] = [[] for _ in self.watches]
        times: list[list[float]] = [[] for _ in range(len(self.watches) + 1)]
        label = f"repetition {len(self.whole_samples) + 1} of {self.options.repetitions}"
        with collector_off():
            for done in range(self.options.warmup):
                self.progress(f"{label}: warming up", done, self.options.warmup)
                self._replay(on_scope)
            self.progress(label, 0, of)
            while not whole or not enough(times):
                whole.append(self._replay(on_scope))
                for readings, watch in zip(scopes, self.watches, strict=True):
                    readings.append(watch.end_replay())
                for column, readings in zip(times, (whole, *scopes), strict=True):
                    column.append(readings[-1].real_ns)
                if gc.get_count()[0] > _MUCH_GARBAGE:
                    gc.collect()
                self.progress(label, len(whole), of)
        self.whole_samples.append(Sample.of(whole))
        for samples, readings in zip(self.samples, scopes, strict=True):
            samples.append(Sample.of(readings))
        return len(whole)

    def _replay(self, on_scope: OnScope | None) -> Readings:
        """One timed replay of the whole capture."""
        self._timer.begin_replay()
        if self._graph is not None:
            self._graph.replay(self._timer)
            return self._timer.read()
        require_match(self.plan.execute(verify="none", on_scope=on_scope, timer=self._timer), "while it was timed")
        return self._timer.read()


def followed_by(watches: Sequence[ScopeWatch]) -> OnScope | None:
    """The cheapest callback of a replay that serves all watches: None if there are none."""
    if len(watches) < 2:
        return watches[0] if watches else None
    several = tuple(watches)

    def every(event: str, name: str, path: str, ordinal: int) -> None:
        for watch in several:
            watch(event, name, path, ordinal)

    return every


def require_match(result: ReplayResult, when: str) -> ReplayResult:
    """The result of a replay. Raises ReplayMismatch if it does not match the capture."""
    if result.outcome != "ok":
        raise ReplayMismatch(
            f"the replay did not match the capture {when}, so there are no times to report: {result.divergence}"
        )
    return result


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect, then keep Python's cyclic garbage collector from running on its own."""
    gc.collect()
    with collector_paused():
        yield
