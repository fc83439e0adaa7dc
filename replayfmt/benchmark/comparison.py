"""Original against substituted kernels: the whole replay, its scopes, and each substituted signature.

A round replays four times: with the original and with the substituted kernels, timed as a whole; then once more with
each, with a stopwatch per signature around every substituted call (on both sides, so both bear its cost). The side that
goes first alternates. The replacements are checked against the originals first; then a verified replay with the
substituted kernels comes before the first round and another after the last. `make_compare_report` makes a table, Google
Benchmark's JSON and CSV of it: the JSON has two rows for everything compared, `BM_original/...` and
`BM_substituted/...`, and `comparisons` with the ratios, intervals and verdicts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from replayfmt.errors import SubstitutionFailed, UsageError
from replayfmt.format.validation import aligned, csv_text, printable
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.kernels import CallSite, KernelStandIn
from replayfmt.replay.results import ReplayResult
from replayfmt.replay.substitution.table import Substitutions

from .machine import GpuWatch
from .measure import (
    PATIENCE,
    Measurement,
    Options,
    Progress,
    Run,
    Sample,
    collector_off,
    followed_by,
    require_match,
    timed_by,
    unseen,
)
from .meters import (
    Clock,
    MeasuredRegion,
    Readings,
    ReplayTimer,
    ScopeWatch,
    Stopwatch,
    find_regions,
    stopwatch_for,
    whole_capture,
)
from .run_report import Report, crowded, csv_field, iteration_fields, plan_context, run_caveats
from .statistics import CONFIDENCE, SMALLEST_FOR_INTERVAL, PairedComparison, compare_pairs, duration


@dataclass(frozen=True)
class ComparedRow:
    """One row: the whole replay, a scope, or a signature.

    `cpu` has the CPU time of each round, original and substituted, in nanoseconds. `calls` is the number of substituted
    calls of a signature per replay, None for other rows; `replacement` names what was called.
    """

    name: str
    comparison: PairedComparison
    cpu: tuple[np.ndarray, np.ndarray]
    calls: int | None = None
    replacement: str = ""


@dataclass(frozen=True)
class CompareRun:
    """A finished comparison. `cut_short` is as in measure.Run."""

    options: Options
    whole: MeasuredRegion
    rows: list[ComparedRow]
    rounds: int
    before: ReplayResult | None
    after: ReplayResult | None
    cut_short: float | None
    gpus: list[dict[str, Any]] = field(default_factory=list)


class _Timed:
    """Puts a stopwatch around every substituted call, to the original or to its replacement."""

    def __init__(self, table: Substitutions, *, replaced: bool, watch: Callable[[], Stopwatch]) -> None:
        self.watches: dict[tuple[str, str], Stopwatch] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self._table, self._replaced, self._make = table, replaced, watch
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
        return self._table.failure(ordinal, error) if self._replaced else None

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
        raise UsageError(
            "--compare needs --replay-kernel-substitution or --autotune=again: there is nothing to compare with"
        )
    return _ComparisonRunner(plan, plan.substitution.table, options, timed_by(plan, clock), progress or unseen).run()


class _ComparisonRunner:
    """The replays of one comparison, in order."""

    def __init__(self, plan: Plan, table: Substitutions, options: Options, clock: Clock, progress: Progress) -> None:
        self._plan, self._options, self._clock, self._progress = plan, options, clock, progress
        self._whole = whole_capture(plan.reader)
        self._regions = find_regions(plan.reader, options.scopes)
        assert plan.substitution is not None
        self._sides = [
            _Side(
                stand_in,
                _Timed(table, replaced=stand_in is not None, watch=lambda: stopwatch_for(plan.devices, clock)),
                scopes=[[] for _ in self._regions],
            )
            for stand_in in (None, plan.substitution.table)
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
        return require_match(self._plan.execute(verify=self._options.verify), f"{when} timing")

    def _replay(self, side: _Side) -> None:
        """One replay timed as a whole, with its scopes."""
        watches = [ScopeWatch(region, stopwatch_for(self._plan.devices, self._clock)) for region in self._regions]
        timer = ReplayTimer(stopwatch_for(self._plan.devices, self._clock), watches)
        timer.begin_replay()
        result = self._plan.run_with(side.plain, on_scope=followed_by(watches), timer=timer, keep=True)
        require_match(result, "while it was timed")
        side.whole.append(timer.read())
        for times, watch in zip(side.scopes, watches, strict=True):
            times.append(watch.end_replay())

    def _replay_timed(self, side: _Side) -> None:
        """One replay with a stopwatch around every substituted call."""
        side.timed.reset()
        require_match(self._plan.run_with(side.timed, keep=True), "while it was timed")
        for key, watch in side.timed.watches.items():
            side.signatures.setdefault(key, []).append(watch.read())

    def _rows(self) -> list[ComparedRow]:
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
) -> ComparedRow:
    real = [[times.real_ns for times in side] for side in (original, substituted)]
    mine, theirs = (np.array([times.cpu_ns for times in side], dtype=np.float64) for side in (original, substituted))
    found = compare_pairs(*real)
    if (
        all(times.host_ns is None for times in (*original, *substituted))
        and found.verdict in _DECIDED
        and crowded(1, None)
    ):
        slower = 0 if found.verdict == "faster" else 1
        had = float((mine, theirs)[slower].sum()) / max(float(sum(real[slower])), 1.0)
        if had < _LEAST_CPU:
            reason = f"the machine was busy, and the {_SIDES[slower]} side had a processor for {had:.0%} of its time"
            found = replace(found, reason=reason)
    return ComparedRow(name, found, (mine, theirs), calls, replacement)


def _signature_rows(original: _Side, substituted: _Side) -> list[ComparedRow]:
    """The signatures, those that take the most time first."""
    rows = [
        _row(text, times, substituted.signatures[text, label], original.timed.calls[text, label], label)
        for (text, label), times in original.signatures.items()
    ]
    return sorted(rows, key=lambda row: -float(row.comparison.original.sum()))


_SIDES = ("original", "substituted")
# Work of the host that has a processor for less of its time waits for one, on a machine that others use.
_LEAST_CPU = 0.8
# An interval whose ends are this far apart can hide differences that matter.
_WIDE = 1.2
_DECIDED = ("faster", "slower")
_CSV_FIELDS = (
    "name",
    "replacement",
    "calls",
    "rounds",
    "original_ns",
    "substituted_ns",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "reason",
)


class CompareReport(Report):
    """A comparison: the section `comparisons` has a dict for each row, times in nanoseconds per replay."""

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.sections["comparisons"]
        return found

    def csv(self) -> str:
        """A line for each row compared. Unknown values are empty."""
        return csv_text(_CSV_FIELDS, ([csv_field(each[name]) for name in _CSV_FIELDS] for each in self.comparisons))

    def lines(self) -> Iterator[str]:
        yield from self.head()
        yield from _table(self.comparisons)
        yield ""
        yield from (
            f"{each['name']}: not known: {each['reason']}"
            for each in self.comparisons
            if each["verdict"] == "not known"
        )
        yield (
            f"medians over {self.context['rounds']} rounds, each with one replay of either side; a ratio below 1 is "
            f"faster; the interval contains the median ratio with {CONFIDENCE:.0%} confidence"
        )


def make_compare_report(run: CompareRun, plan: Plan) -> CompareReport:
    """The report of a comparison of `plan`'s substitutions."""
    assert plan.substitution is not None and plan.substitution.report is not None
    whole = run.rows[0].comparison
    sample = Sample(whole.substituted, whole.substituted, None)
    as_run = Run(run.options, [], Measurement(run.whole, [sample]), run.before, run.after, run.cut_short, gpus=run.gpus)
    verified = "not verified: --verify=none" if run.before is None else run.before.verification.text
    context = {
        **plan_context(plan),
        "min_time": str(run.options.min_time),
        "warmup_iterations": run.options.warmup,
        "rounds": run.rounds,
        "confidence": CONFIDENCE,
        "gpus": run.gpus,
        "verified": verified,
        "warnings": [*run_caveats(as_run, plan.reader, plan.devices), *_too_wide(run.rows)],
    }
    comparisons = [_comparison(row) for row in run.rows]
    rows = [
        row
        for index, (comparison, compared) in enumerate(zip(comparisons, run.rows, strict=True))
        for row in _benchmark_rows(comparison, index, compared)
    ]
    return CompareReport(context, rows, {"comparisons": comparisons})


def _too_wide(rows: list[ComparedRow]) -> list[str]:
    """Warnings about rounds that vary so much that only large differences could be detected."""
    found = []
    for row in rows:
        interval = row.comparison.interval
        if interval is not None and interval.high / interval.low > _WIDE and row.comparison.verdict not in _DECIDED:
            found.append(
                f"{row.name}: the ratio is only known to be between {_ratio(interval.low)} and "
                f"{_ratio(interval.high)}: smaller differences cannot be seen; measure more rounds, or stop "
                f"other programs"
            )
    return found


def _comparison(row: ComparedRow) -> dict[str, Any]:
    found = row.comparison
    return {
        "name": row.name,
        "replacement": row.replacement or None,
        "calls": row.calls,
        "original_ns": float(np.median(found.original)),
        "substituted_ns": float(np.median(found.substituted)),
        "confidence": None if found.interval is None else found.interval.confidence,
        **found.fields(),
    }


def _benchmark_rows(comparison: dict[str, Any], index: int, row: ComparedRow) -> Iterator[dict[str, Any]]:
    sides = (row.comparison.original, row.comparison.substituted)
    for side, times, cpu in zip(_SIDES, sides, row.cpu, strict=True):
        yield {
            **iteration_fields(f"BM_{side}/{comparison['name']}", index, _SIDES.index(side)),
            "iterations": comparison["rounds"],
            "real_time": float(times.mean()),
            "cpu_time": float(cpu.mean()),
            "time_unit": "ns",
            "median_real_time": float(np.median(times)),
            "samples": {"real_time": times.tolist(), "cpu_time": cpu.tolist()},
        }


def _table(comparisons: list[dict[str, Any]]) -> Iterator[str]:
    heads = ("original", "substituted", "median ratio", "95% interval", "")
    cells = [
        [
            duration(each["original_ns"]),
            duration(each["substituted_ns"]),
            _ratio(each["ratio"]),
            "-" if each["ratio_low"] is None else f"{_ratio(each['ratio_low'])} to {_ratio(each['ratio_high'])}",
            each["verdict"],
        ]
        for each in comparisons
    ]
    for name, line in zip(("", *map(_named, comparisons)), aligned((heads, *cells)), strict=True):
        if name:
            yield name
        yield f"  {line}".rstrip()


def _named(comparison: dict[str, Any]) -> str:
    name = printable(comparison["name"])
    if comparison["calls"] is None:
        return name
    calls = comparison["calls"]
    return f"{name} by {printable(comparison['replacement'])}, {calls} call{'s' if calls != 1 else ''}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
