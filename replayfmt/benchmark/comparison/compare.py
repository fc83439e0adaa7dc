"""Original against substituted kernels: the whole replay, its scopes, and each substituted signature.

A round replays four times: with the original and with the substituted kernels, timed as a whole; then once more with
each, with a stopwatch per signature around every substituted call (on both sides, so both bear its cost). The side that
goes first alternates from round to round. The replacements are checked against the originals first; then a verified
replay with the substituted kernels comes before the first round and another after the last.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replayfmt.errors import ReplayMismatch, SubstitutionFailed, UsageError
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import ReplayResult
from replayfmt.replay.substitution.call_sites import CallSite, KernelStandIn
from replayfmt.replay.substitution.replace import Replace
from replayfmt.replay.substitution.table import Substitutions

from ..gpu_state import GpuWatch
from ..measure import PATIENCE, Options, Progress, collector_off, timed_by
from ..meters.meter import Clock
from ..meters.stopwatch import Readings, ReplayTimer, ScopeWatch, Stopwatch, stopwatch_for
from ..scopes import MeasuredRegion, find_regions, whole_capture
from ..statistics import SMALLEST_FOR_INTERVAL
from .paired import Comparison, compare


@dataclass(frozen=True)
class Compared:
    """One row: the whole replay, a scope, or a signature.

    `cpu` has the CPU time of each round, original and substituted, in nanoseconds. `calls` is the number of substituted
    calls of a signature per replay, None for other rows; `replacement` names what was called.
    """

    name: str
    comparison: Comparison
    cpu: tuple[np.ndarray, np.ndarray]
    calls: int | None = None
    replacement: str = ""


@dataclass(frozen=True)
class CompareRun:
    """A finished comparison. `cut_short` is as in measure.Run."""

    options: Options
    whole: MeasuredRegion
    rows: list[Compared]
    rounds: int
    before: ReplayResult | None
    after: ReplayResult | None
    cut_short: float | None
    gpus: list[dict[str, Any]] = field(default_factory=list)


class _Timed:
    """Puts a stopwatch around every substituted call, to the original or to its replacement."""

    def __init__(self, plan: Plan, table: Substitutions, *, replaced: bool, watch: Callable[[], Stopwatch]) -> None:
        self.watches: dict[tuple[str, str], Stopwatch] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self._table, self._replaced, self._make = table, replaced, watch
        self._failures = Replace(plan.reader, table, plan.describe)
        self._counted: set[int] = set()

    @property
    def reason(self) -> str:
        return self._table.reason

    def call(self, site: CallSite) -> tuple[Hashable | None, Callable[..., Any]] | None:
        replacement = self._table.find(site.signature_id, site.metas, site.ordinal)
        if replacement is None:
            return None
        text = self._table.index.text((site.signature_id, site.metas), site.ordinal)
        key = (text, replacement.label)
        if key not in self.watches:
            self.watches[key], self.calls[key] = self._make(), 0
        if site.ordinal not in self._counted:
            self._counted.add(site.ordinal)
            self.calls[key] += 1
        function = site.wrap(replacement.call) if self._replaced else site.original
        return None, _timed(function, self.watches[key])

    def failure(self, ordinal: int, error: BaseException) -> SubstitutionFailed | None:
        return self._failures.failure(ordinal, error) if self._replaced else None

    def reset(self) -> None:
        for watch in self.watches.values():
            watch.reset()


def _timed(function: Callable[..., Any], watch: Stopwatch) -> Callable[..., Any]:
    start, stop = watch.start, watch.stop

    def timed(*args: Any, **kwargs: Any) -> Any:
        start()
        result = function(*args, **kwargs)
        stop()
        return result

    return timed


@dataclass
class _Side:
    """One side's replacements and the times of its replays so far."""

    plain: KernelStandIn | None
    timed: _Timed
    whole: list[Readings] = field(default_factory=list)
    scopes: list[list[Readings]] = field(default_factory=list)
    signatures: dict[tuple[str, str], list[Readings]] = field(default_factory=dict)


def measure_both(
    plan: Plan, options: Options, *, clock: Clock | None = None, progress: Progress | None = None
) -> CompareRun:
    """Compare a plan's substitutions with the kernels they replace.

    Raises UsageError if the plan has none, or for scopes that cannot be measured; SubstitutionRejected, ReplayMismatch
    and ReplayFailed as a replay does.
    """
    if plan.substitution is None:
        raise UsageError("--compare needs --replay-kernel-substitution: there is nothing to compare with")
    return _Comparing(plan, plan.substitution.table, options, timed_by(plan, clock), progress or _unseen).run()


def _unseen(_what: str, _done: int, _of: int | None) -> None:
    """Progress that is not shown."""


class _Comparing:
    """The replays of one comparison, in order."""

    def __init__(self, plan: Plan, table: Substitutions, options: Options, clock: Clock, progress: Progress) -> None:
        self._plan, self._options, self._clock, self._progress = plan, options, clock, progress
        self._whole = whole_capture(plan.reader)
        self._regions = find_regions(plan.reader, options.scopes)
        assert plan.substitution is not None
        self._sides = [
            _Side(
                stand_in,
                _Timed(plan, table, replaced=stand_in is not None, watch=lambda: stopwatch_for(plan.devices, clock)),
                scopes=[[] for _ in self._regions],
            )
            for stand_in in (None, plan.substitution.replace)
        ]

    def run(self) -> CompareRun:
        before = self._verify("before")
        with collector_off():
            for side in self._sides:
                for done in range(self._options.warmup):
                    self._progress("warming up", done, self._options.warmup)
                    self._replay(side)
                    self._replay_timed(side)
            for side in self._sides:
                side.whole.clear()
                side.signatures.clear()
                for times in side.scopes:
                    times.clear()
            gpus = GpuWatch(self._plan.devices)
            gpus.begin()
            cut_short = self._rounds()
            gpus.end()
        after = self._verify("after")
        rounds = len(self._sides[0].whole)
        return CompareRun(self._options, self._whole, self._rows(), rounds, before, after, cut_short, gpus.rows())

    def _rounds(self) -> float | None:
        """Run rounds until there are enough; returns the elapsed seconds if they had to be cut short, else None."""
        goal = self._options.min_time
        goal_ns = (goal.seconds or 0.0) * 1e9
        began = self._clock.real()
        while True:
            done = len(self._sides[0].whole)
            self._progress("comparing", done, goal.iterations)
            order = self._sides if done % 2 == 0 else self._sides[::-1]
            for replay in (self._replay, self._replay_timed):
                for side in order:
                    replay(side)
            gc.collect(0)
            waited = self._clock.real() - began
            timed = sum(times.real_ns for side in self._sides for times in side.whole)
            if goal.iterations is not None:
                if done + 1 >= goal.iterations:
                    return None
            elif done + 1 < SMALLEST_FOR_INTERVAL:
                continue  # a few more rounds make the difference between a verdict and none
            elif timed >= goal_ns:
                return None
            elif waited >= 2 * PATIENCE * goal_ns:
                return waited / 1e9

    def _verify(self, when: str) -> ReplayResult | None:
        if self._options.verify == "none":
            if when == "before" and self._plan.substitution is not None:
                self._plan.substitution.check()
            return None
        self._progress(f"verifying {when} timing", 0, None)
        return self._matched(self._plan.execute(verify=self._options.verify), f"{when} timing")

    def _matched(self, result: ReplayResult, when: str) -> ReplayResult:
        if result.outcome != "ok":
            raise ReplayMismatch(
                f"the replay did not match the capture {when}, so there are no times to report: {result.divergence}"
            )
        return result

    def _replay(self, side: _Side) -> None:
        """One replay timed as a whole, with its scopes."""
        watches = [ScopeWatch(region, stopwatch_for(self._plan.devices, self._clock)) for region in self._regions]
        timer = ReplayTimer(stopwatch_for(self._plan.devices, self._clock), watches)
        timer.begin_replay()

        def every(event: str, name: str, path: str, ordinal: int) -> None:
            for watch in watches:
                watch(event, name, path, ordinal)

        result = self._plan.run_with(side.plain, on_scope=every if watches else None, timer=timer, keep=True)
        self._matched(result, "while it was timed")
        side.whole.append(timer.stopwatch.read())
        for times, watch in zip(side.scopes, watches, strict=True):
            times.append(watch.end_replay())

    def _replay_timed(self, side: _Side) -> None:
        """One replay with a stopwatch around every substituted call."""
        side.timed.reset()
        self._matched(self._plan.run_with(side.timed, keep=True), "while it was timed")
        for key, watch in side.timed.watches.items():
            side.signatures.setdefault(key, []).append(watch.read())

    def _rows(self) -> list[Compared]:
        original, substituted = self._sides
        rows = [_row("whole replay", original.whole, substituted.whole)]
        rows += [
            _row(f"scope {region.name}", mine, theirs)
            for region, mine, theirs in zip(self._regions, original.scopes, substituted.scopes, strict=True)
        ]
        return rows + _signature_rows(original, substituted)


def _row(
    name: str,
    original: Sequence[Readings],
    substituted: Sequence[Readings],
    calls: int | None = None,
    replacement: str = "",
) -> Compared:
    real = [[times.real_ns for times in side] for side in (original, substituted)]
    mine, theirs = (np.array([times.cpu_ns for times in side], dtype=np.float64) for side in (original, substituted))
    return Compared(name, compare(*real), (mine, theirs), calls, replacement)


def _signature_rows(original: _Side, substituted: _Side) -> list[Compared]:
    """The signatures, those that take the most time first."""
    rows = [
        _row(text, times, substituted.signatures[text, label], original.timed.calls[text, label], label)
        for (text, label), times in original.signatures.items()
    ]
    return sorted(rows, key=lambda row: -float(row.comparison.original.sum()))
