"""`opreplay-benchmark --per-op`, and benchmarks against a baseline: `--baseline`, `--fail-above`, `--noise-floor`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import (
    INTERRUPTED,
    emit,
    is_given,
    option,
    reader_may_leave,
    refuse,
    said_if_possible,
    say,
    stdout,
    together,
)

if TYPE_CHECKING:
    from replayfmt.benchmark.baseline import BaselineComparison, Document
    from replayfmt.benchmark.measure import Progress
    from replayfmt.benchmark.per_op.measuring import OnMeasured
    from replayfmt.benchmark.per_op.results import GroupBy, OpOptions, PerOpRun
    from replayfmt.benchmark.per_op.roofline import PeaksOf
    from replayfmt.benchmark.run_report import Report
    from replayfmt.replay.plan import Plan
    from replayfmt.replay.ranks import Ranks


baseline_options = together(
    option(
        "--baseline FILE",
        "Compare each row with that of the same name in FILE, which --benchmark-out wrote: faster, slower, or no "
        "measurable difference.",
    ),
    option(
        "--fail-above PERCENT",
        "With --baseline: exit with 1 if a row, or the total of ops, is slower than there by more than that (5% "
        "or 5), with 4 if none is and one cannot be judged, or more than 10% has no partner there. If a row "
        "fails, everything is measured once more, and it has to fail again.",
    ),
    option(
        "--noise-floor",
        "Measure everything twice, as if it were two versions, and print for each row how large a difference may "
        "be that means nothing. --benchmark-out keeps that for --baseline.",
    ),
)


@dataclass(frozen=True)
class BaselineFlags:
    """The values of the flags. `document` is the baseline's content."""

    path: str | None
    document: Document | None
    fail_above: float | None
    noise_floor: bool

    @staticmethod
    def of(baseline: str | None, fail_above: str | None, noise_floor: bool) -> BaselineFlags:
        """Read the baseline. Raises UsageError if it is none, and for --fail-above without it."""
        from replayfmt.benchmark.baseline import read_baseline
        from replayfmt.benchmark.statistics import parse_share

        if fail_above is not None and baseline is None:
            raise UsageError(f"--fail-above={fail_above} needs --baseline=FILE: there is nothing to compare with")
        above = None if fail_above is None else parse_share("--fail-above", fail_above)
        return BaselineFlags(baseline, None if baseline is None else read_baseline(baseline), above, noise_floor)

    def apply(self, measure: Callable[[], Report]) -> tuple[Report, list[str], int]:
        """Measure, once or twice, and compare; a row has to fail both times. Returns the report, the lines to print
        below it, and the exit code: 0 if the gate passes.

        Raises UsageError if the baseline has no row of this measurement.
        """
        from replayfmt.benchmark.baseline import EXIT_CODES, compare_with_baseline, confirmed, gate_verdict

        report = measure()
        again = measure() if self.noise_floor else None
        if self.path is None or self.document is None:
            return report, [] if again is None else self._floor(report, again), 0
        comparison = alone = compare_with_baseline(self.path, self.document, report.document())
        above = self.fail_above
        failures = [] if above is None else comparison.failures(above)
        second: BaselineComparison | None = None
        lines: list[str] = []
        if failures and again is None:
            again = measure()
        if again is not None:
            floor = self._floor(report, again)
            lines += floor if self.noise_floor else []
            comparison = compare_with_baseline(self.path, self.document, report.document())
        lines += comparison.lines()
        passed: list[str] = []
        if failures and above is not None and again is not None:
            second = compare_with_baseline(self.path, self.document, again.document())
            failures, passed = confirmed(alone, comparison, second, above)
            lines.append(f"measured again, since a row failed: {len(failures)} failed both times")
        report.sections["baseline"] = comparison.as_json()
        if above is not None:
            failures += comparison.unmatched()
            hidden = comparison.hidden(above, second)
            report.sections["baseline"] |= {
                "fail_above": above,
                "verdict": gate_verdict(failures),
                "exit_code": EXIT_CODES[gate_verdict(failures)],
                "failures": [asdict(each) for each in failures],
                "passed_again": passed,
                "hidden": hidden,
            }
            lines += [f"WARNING: {each}" for each in hidden]
        lines += [f"passed the second time: {each}" for each in passed]
        return report, [*lines, *(f"FAILED: {failure}" for failure in failures)], EXIT_CODES[gate_verdict(failures)]

    @staticmethod
    def _floor(report: Report, again: Report) -> list[str]:
        """Give the rows of a report their noise floors, from a second measurement; returns the lines that say so."""
        from replayfmt.benchmark.baseline import noise_floor, noise_lines

        found = noise_floor(report.document(), again.document())
        shares = {row.name: row.apart for row in found.rows}
        for row in report.rows:
            if row["name"] in shares:
                row["noise_floor"] = shares[row["name"]]
        report.sections["noise_floor"] = found.as_json()
        return list(noise_lines(found))


def show_report(report: Report, form: str, lines: Iterable[str] | None = None) -> None:
    """Print a report, for people its lines or others; beside rows for programs, warnings go to stderr."""
    if form == "console":
        for line in report.lines() if lines is None else lines:
            say(line)
    else:
        emit(report.text(form), end="")
    for warning in report.warnings():
        say(f"WARNING: {warning}", err=form != "console")


def show_below(lines: list[str], form: str) -> None:
    """Print them: below the table on stdout, beside a document for programs on stderr."""
    for line in lines:
        say(line, err=form != "console")


_DEFAULT_MIN_TIME = "0.05s"
# Flags for measuring whole replays.
_WHOLE_ONLY = ("benchmark_repetitions", "benchmark_warmup", "device_profiling_mode", "device_profiling_output")
_CHOOSE_OPS = ("kernel", "op_limit")  # also those that --energy and --energy-windows run
_OF_ROOFLINES = ("roofline", "peak_flops", "peak_bandwidth")
_NEEDS_PER_OP = ("ops", "op_instances", "group_by", "top", "stop_on_error", "verbose", *_OF_ROOFLINES)


per_op_options = together(
    option(
        "--per-op",
        "Measure every op on its own, on its inputs in the replay, and estimate its share of the "
        "workload, the most expensive first; with --scope, only ops in these scopes. "
        "--benchmark-min-time is then the minimum for each op; default "
        f"{_DEFAULT_MIN_TIME}.",
    ),
    option(
        "--kernel PATTERN",
        "With --per-op: only operators whose name (aten::mm or aten::mm.default) matches the shell pattern.",
    ),
    option("--ops A:B", "With --per-op: only ops with ordinals from A up to, not including, B."),
    option("--op-limit N", "With --per-op: only the first N of those that match.", type=click.IntRange(min=1)),
    option(
        "--op-instances",
        "With --per-op: measure ops with the same kernel, shapes, strides and numbers once and count them, or "
        "measure each one.",
        type=["unique", "all"],
        default="unique",
    ),
    option(
        "--cuda-graph",
        "On a CUDA device, or another that has graphs: launch the whole replay, each scope of --scope, or "
        "with --per-op the calls of an op, as one graph, so that the device does not wait for the host between "
        "ops; the time to issue them is reported separately. What cannot be put into a graph is measured as "
        "without the flag, with the reason.",
    ),
    option(
        "--roofline",
        "With --per-op: print achieved FLOP/s and B/s of each op, the share of what its device can do for such an "
        "op, and what bounds it. Peaks are measured once and kept in the user's cache, or given.",
    ),
    option(
        "--peak-flops FLOPS",
        "With --roofline: the floating-point operations a second that the device can do (19.5T), instead of "
        "measuring it.",
    ),
    option(
        "--peak-bandwidth BYTES",
        "With --roofline: the bytes a second that the device can move (2.0T), instead of measuring it.",
    ),
    option(
        "--group-by",
        "With --per-op: one row for each operator, each signature, or each scope (the ops directly in it). "
        "Default: a row for each op that is measured.",
        type=["kernel", "signature", "scope"],
    ),
    option(
        "--top N",
        "With --per-op: the table shows only the N most expensive rows, and those that could not be measured. "
        "JSON, CSV, --benchmark-out and --baseline have all rows.",
        type=click.IntRange(min=1),
    ),
    option("--stop-on-error", "With --per-op: stop at the first op that fails."),
    option(
        "--verbose",
        "With --per-op: print with each op on stderr, as soon as it is measured, each argument's name, schema "
        "type and value, and each result.",
    ),
)


@dataclass(frozen=True)
class PerOpFlags:
    options: OpOptions
    group_by: GroupBy | None
    top: int | None
    verbose: bool
    peaks: PeaksOf | None

    @staticmethod
    def of(context: click.Context, verify: Any) -> PerOpFlags | None:
        """From the command's parameters; None without --per-op. Raises UsageError for flags that do not fit
        together."""
        values = context.params
        if not values["per_op"]:
            windows = values["energy"] or values["energy_windows"] is not None
            refuse(context, _NEEDS_PER_OP if windows else (*_CHOOSE_OPS, *_NEEDS_PER_OP), "needs --per-op")
            return None
        refuse(context, _WHOLE_ONLY, "is for whole replays; it does not go with --per-op")
        from replayfmt.benchmark.per_op.results import OpOptions
        from replayfmt.benchmark.statistics import op_precision, parse_min_time
        from replayfmt.dump.selection import parse_range

        chosen = is_given(context, "benchmark_min_time")
        floor = parse_min_time(values["benchmark_min_time"] if chosen else _DEFAULT_MIN_TIME)
        options = OpOptions(
            floor,
            verify,
            values["kernel"],
            values["op_limit"],
            values["op_instances"] == "all",
            values["scope"],
            values["stop_on_error"],
            op_precision(values["benchmark_precision"], values["benchmark_max_time"], floor),
            values["inputs"],
            values["cuda_graph"],
            None if values["ops"] is None else parse_range(values["ops"]),
        )
        return PerOpFlags(options, values["group_by"], values["top"], values["verbose"], _peaks(values))


def run_per_op(
    plan: Plan,
    flags: PerOpFlags,
    form: str,
    progress: Progress | None,
    write: Callable[[str], None] | None,
    against: BaselineFlags,
    ranks: Ranks | None = None,
) -> int:
    """Measure and print; `write` receives the JSON for --benchmark-out. With `ranks` each measures a part of the ops,
    and rank 0 prints. Returns the exit code: 1 if a requested op was not run or differs from the capture, else that of
    the gate `against` its baseline."""
    from replayfmt.benchmark.measure import unseen
    from replayfmt.benchmark.per_op.measuring import measure_ops
    from replayfmt.benchmark.per_op.op_report import describe, make_op_report, measured_row, progress_lines
    from replayfmt.benchmark.per_op.results import MeasuredOp

    runs: list[PerOpRun] = []

    def show(op: MeasuredOp, place: int, of: int) -> None:
        if form == "jsonl" and not runs:  # a second measurement only confirms a gate
            with reader_may_leave():
                emit(json.dumps({"kind": "measured", "place": place, "of": of, **measured_row(op)}))
                stdout().flush()
        if form == "console" or flags.verbose:
            with said_if_possible():
                columns = sys.maxsize if flags.verbose else shutil.get_terminal_size().columns
                lines = progress_lines(op, place, of, columns)
                for line in (*lines, *(describe(op, plan.reader) if flags.verbose else ())):
                    say(line, err=True)

    def measure(on_measured: OnMeasured | None) -> PerOpRun:
        return measure_ops(plan, flags.options, progress=progress or unseen, on_measured=on_measured, ranks=ranks)

    if ranks is not None and ranks.rank:
        while ranks.next():
            measure(None)
        return 0

    def measured() -> Report:
        if not runs or not runs[-1].interrupted:
            if ranks is not None:
                ranks.next(True)
            runs.append(measure(show))
        return make_op_report(runs[-1], plan, group_by=flags.group_by, top=flags.top, peaks=flags.peaks)

    report, below, code = against.apply(measured)
    if ranks is not None:
        ranks.next(False)
    if write is not None:
        write(report.json())
    with reader_may_leave():
        show_report(report, form)
        show_below(below, form)
    if runs[-1].interrupted:
        return INTERRUPTED
    return code if all(run.complete for run in runs) else 1


def _peaks(values: dict[str, Any]) -> PeaksOf | None:
    from replayfmt.benchmark.per_op.roofline import Peaks, parse_rate

    given = {name: values[name] for name in ("peak_flops", "peak_bandwidth") if values[name] is not None}
    if not values["roofline"]:
        for name in given:
            raise UsageError(f"{_flag(name)} needs --roofline")
        return None
    if values["group_by"] is not None:
        raise UsageError("--roofline places single ops; it does not go with --group-by")
    rates = {name: parse_rate(_flag(name), text) for name, text in given.items()}
    flops, bandwidth = rates.get("peak_flops"), rates.get("peak_bandwidth")
    return lambda device, threads, precision: Peaks(device, threads, flops, bandwidth, precision)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
