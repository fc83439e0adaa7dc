"""`opreplay-benchmark --per-op`: its flags, and its output during and after the measurement of single ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .baseline import BaselineFlags, show_below
from .command import reader_may_leave, said_if_possible, say

if TYPE_CHECKING:
    from replayfmt.benchmark.measure import Progress
    from replayfmt.benchmark.per_op.results import OpOptions, PerOpRun
    from replayfmt.benchmark.per_op.roofline import PeaksOf
    from replayfmt.benchmark.per_op.rows import GroupBy
    from replayfmt.benchmark.reports.rows import Report
    from replayfmt.replay.plan import Plan

_DEFAULT_MIN_TIME = "0.05s"
# Flags for measuring whole replays.
_WHOLE_ONLY = ("benchmark_repetitions", "benchmark_warmup", "device_profiling_mode", "device_profiling_output")
_CHOOSE_OPS = ("op_filter", "op_limit")  # also those that --energy and --energy-windows run
_NEEDS_PER_OP = (
    "op_filter",
    "op_limit",
    "op_instances",
    "group_by",
    "top",
    "stop_on_error",
    "verbose",
    "roofline",
    "peak_flops",
    "peak_bandwidth",
)


def per_op_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --per-op and the flags that go with it."""
    for option in (
        click.option(
            "--verbose",
            is_flag=True,
            help="With --per-op: print each op on stderr as soon as it is measured, with each argument's "
            "name, schema type and value, and each result.",
        ),
        click.option("--stop-on-error", is_flag=True, help="With --per-op: stop at the first op that fails."),
        click.option(
            "--top",
            type=click.IntRange(min=1),
            metavar="N",
            help="With --per-op: print only the N most expensive rows. Ops that could not be measured are "
            "always listed.",
        ),
        click.option(
            "--group-by",
            type=click.Choice(["kernel", "signature", "scope"]),
            help="With --per-op: one row for each operator, each signature, or each scope (the ops directly in "
            "it). Default: a row for each op that is measured.",
        ),
        click.option(
            "--peak-bandwidth",
            metavar="BYTES",
            help="With --roofline: the bytes a second that the device can move (2.0T), instead of measuring it.",
        ),
        click.option(
            "--peak-flops",
            metavar="FLOPS",
            help="With --roofline: the floating-point operations a second that the device can do (19.5T), instead of "
            "measuring it.",
        ),
        click.option(
            "--roofline",
            is_flag=True,
            help="With --per-op: print achieved FLOP/s and B/s of each op, the share of what its device can do for "
            "such an op, and what bounds it. Peaks are measured once and kept in the user's cache, or given.",
        ),
        click.option(
            "--cuda-graph",
            is_flag=True,
            help="On a CUDA device, or another that has graphs: launch the whole replay, each scope of --replay-scope, "
            "or with --per-op the calls of an op, as one graph, so that the device does not wait for the host between "
            "ops; the time to issue them is reported separately. What cannot be put into a graph is measured as "
            "without the flag, with the reason.",
        ),
        click.option(
            "--op-instances",
            type=click.Choice(["unique", "all"]),
            default="unique",
            show_default=True,
            help="With --per-op: measure ops with the same kernel, shapes, strides and numbers once and count "
            "them, or measure each one.",
        ),
        click.option(
            "--op-limit",
            type=click.IntRange(min=1),
            metavar="N",
            help="With --per-op: only the first N of those that match.",
        ),
        click.option(
            "--op-filter",
            metavar="PATTERN",
            help="With --per-op: only operators whose name (aten::mm or aten::mm.default) matches the shell pattern.",
        ),
        click.option(
            "--per-op",
            is_flag=True,
            help="Measure every op on its own, on its inputs in the replay, and estimate its share of the "
            "workload, the most expensive first; with --replay-scope, only ops in these scopes. "
            "--benchmark-min-time is then the minimum for each op; default "
            f"{_DEFAULT_MIN_TIME}.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class PerOpFlags:
    """The values of the flags."""

    options: OpOptions
    group_by: GroupBy | None
    top: int | None
    verbose: bool
    peaks: PeaksOf | None

    @staticmethod
    def of(context: click.Context, verify: Any) -> PerOpFlags | None:
        """From the command's parameters; None without --per-op. Raises UsageError for flags that do not fit
        together."""
        given = {
            name
            for name in context.params
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        }
        values = context.params
        if not values["per_op"]:
            for name in _NEEDS_PER_OP:
                chooses_windows = (values["energy"] or values["energy_windows"] is not None) and name in _CHOOSE_OPS
                if name in given and not chooses_windows:
                    raise UsageError(f"{_flag(name)} needs --per-op")
            return None
        for name in _WHOLE_ONLY:
            if name in given:
                raise UsageError(f"{_flag(name)} is for whole replays; it does not go with --per-op")
        from replayfmt.benchmark.min_time import parse_min_time
        from replayfmt.benchmark.per_op.results import OpOptions
        from replayfmt.benchmark.precision import op_precision

        floor = parse_min_time(values["benchmark_min_time"] if "benchmark_min_time" in given else _DEFAULT_MIN_TIME)
        options = OpOptions(
            floor,
            verify,
            values["op_filter"],
            values["op_limit"],
            values["op_instances"] == "all",
            values["replay_scope"],
            values["stop_on_error"],
            op_precision(values["benchmark_precision"], values["benchmark_max_time"], floor),
            values["inputs"],
            values["cuda_graph"],
        )
        return PerOpFlags(options, values["group_by"], values["top"], values["verbose"], _peaks(values))


def run_per_op(
    plan: Plan,
    flags: PerOpFlags,
    form: str,
    progress: Progress | None,
    write: Callable[[str], None] | None,
    against: BaselineFlags,
) -> int:
    """Measure and print; `write` receives the JSON for --benchmark-out. Returns the exit code: 1 if a requested op was
    not run, differs from the capture, or fails `against` its baseline."""
    from replayfmt.benchmark.per_op.measuring import measure_ops
    from replayfmt.benchmark.per_op.report import make_op_report
    from replayfmt.benchmark.per_op.results import MeasuredOp
    from replayfmt.benchmark.per_op.table import describe, progress_line

    def show(op: MeasuredOp, place: int, of: int) -> None:
        with said_if_possible():
            say(progress_line(op, place, of), err=True)
            for line in describe(op, plan.reader):
                say(line, err=True)

    runs: list[PerOpRun] = []

    def measured() -> Report:
        shown = show if flags.verbose else None
        runs.append(measure_ops(plan, flags.options, progress=progress or _unseen, on_measured=shown))
        return make_op_report(runs[-1], plan, group_by=flags.group_by, top=flags.top, peaks=flags.peaks)

    report, below, passes = against.apply(measured)
    if write is not None:
        write(report.json())
    with reader_may_leave():
        _show(report, form)
        show_below(below, form)
    return 0 if passes and all(run.complete for run in runs) else 1


def _show(report: Report, form: str) -> None:
    from replayfmt.benchmark.per_op.table import table_lines

    if form == "console":
        for line in table_lines(report):
            say(line)
    else:
        click.echo(report.json() if form == "json" else report.csv(), nl=False)
    for warning in report.context["warnings"]:
        say(f"WARNING: {warning}", err=form != "console")


def _unseen(_what: str, _done: int, _of: int | None) -> None:
    """Progress that is not shown."""


def _peaks(values: dict[str, Any]) -> PeaksOf | None:
    """The peaks of a device, with --roofline."""
    from replayfmt.benchmark.peaks import Peaks, parse_rate

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
