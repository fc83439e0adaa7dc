"""opreplay-benchmark: replay a capture repeatedly and measure how long it takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from replayfmt.errors import UsageError

from .baseline import BaselineFlags, baseline_options, show_below
from .command import reader_may_leave, run_tool, say, tool
from .compare import refuse_with_compare, run_compare
from .energy_windows import Work, check_energy_windows, energy_options, run_energy, run_energy_windows
from .memory import check_memory, memory_option
from .per_op import PerOpFlags, per_op_options, run_per_op
from .precision_flags import precision_options
from .profiling_flags import profiled, profiling_options, profiling_request
from .reconcile import check_reconcile, reconcile_options, run_reconcile
from .replay_flags import ReplayFlags, replay_options
from .scope_parts import plan_of_scope

if TYPE_CHECKING:
    from replayfmt.benchmark.inputs import Inputs
    from replayfmt.benchmark.measure import Options, PlanOfScope
    from replayfmt.benchmark.reports.rows import Report
    from replayfmt.replay.plan import Plan

_OUT = "--benchmark-out"
_REDRAW_S = 0.2


@tool(
    "opreplay-benchmark",
    ("opreplay-benchmark --replay-scope=execute step.opreplay", "Time one scope:"),
    ("opreplay-benchmark --per-op --group-by=kernel --top=8 step.opreplay", "Time every op on its own:"),
    (
        "opreplay-benchmark --compare --replay-kernel-substitution=aten::mm=my_mm.py step.opreplay",
        "Is my kernel faster?",
    ),
)
@replay_options
@click.option(
    "--replay-scope",
    multiple=True,
    metavar="NAME",
    help="Report the time inside the scopes of this name or full path (execute/step 3), instead of the whole "
    "replay's; everything still runs. Passes are summed, nested ones count once. With --per-op: measure only "
    "the ops inside them. Repeatable.",
)
@click.option(
    "--benchmark-min-time",
    default="0.5s",
    show_default=True,
    metavar="Nx|SECONDSs",
    help="Time N replays (20x), or as many as take that many seconds in total (0.5s): with seconds, or with "
    "--benchmark-precision, more of them until the median is known well enough.",
)
@precision_options
@click.option(
    "--benchmark-warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="N",
    help="Untimed replays before each repetition.",
)
@click.option(
    "--benchmark-repetitions",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Measure N times, and add rows with mean, median, standard deviation and variation.",
)
@click.option(
    "--benchmark-format",
    type=click.Choice(["console", "json", "csv"]),
    default="console",
    show_default=True,
    help="Format of stdout: a table, or Google Benchmark's JSON or CSV.",
)
@click.option("--benchmark-out", metavar="FILE", help="Write the results to FILE as Google Benchmark's JSON.")
@baseline_options
@click.option(
    "--compare",
    is_flag=True,
    help="With --replay-kernel-substitution: measure original and substituted kernels in alternation, and "
    "report for the whole replay, its scopes and each signature whether there is a difference.",
)
@reconcile_options
@memory_option
@energy_options
@per_op_options
@profiling_options
@click.argument("capture", metavar="CAPTURE", type=click.Path())
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str,
    flags: ReplayFlags,
    replay_scope: tuple[str, ...],
    benchmark_min_time: str,
    benchmark_precision: str | None,
    benchmark_max_time: str | None,
    inputs: Inputs | None,
    cuda_graph: bool,
    benchmark_warmup: int,
    benchmark_repetitions: int,
    benchmark_format: str,
    benchmark_out: str | None,
    baseline: str | None,
    fail_above: str | None,
    noise_floor: bool,
    compare: bool,
    reconcile: bool,
    memory: bool,
    program: str | None,
    program_runs: int,
    energy: bool,
    energy_source: str,
    energy_out: str | None,
    power_log_out: str | None,
    energy_windows: str | None,
    power_interval: float,
    power_averaging: float,
    device_profiling_mode: str | None,
    device_profiling_output: str | None,
    force: bool,
    **_per_op: object,
) -> int:
    """Replay CAPTURE repeatedly and report how long it takes.

    Verifies before and after timing.

    With --per-op, measure each of its ops on its own instead; with --compare, substituted kernels against the
    original ones.

    Exits with 0 if it ran and matched, 1 if it was refused, failed or did not match (then there are no results), or if
    --fail-above fails a row, 2 for wrong usage, 3 if CAPTURE is missing, unreadable or not valid.
    """
    from replayfmt.benchmark.min_time import parse_min_time
    from replayfmt.benchmark.precision import whole_precision

    min_time = parse_min_time(benchmark_min_time)
    profiling = profiling_request(device_profiling_mode, device_profiling_output, force, capture)
    if benchmark_out and profiling and os.path.realpath(benchmark_out) == os.path.realpath(profiling.output):
        raise UsageError(f"{_OUT} and --device-profiling-output are the same file: {benchmark_out}")
    check_energy_windows(context)
    check_memory(context)
    per_op = PerOpFlags.of(context, flags.verify)
    if compare:
        refuse_with_compare(context, flags, per_op is not None)
    from replayfmt.benchmark.measure import Options
    from replayfmt.benchmark.output import output_file, refuse_input

    if per_op is None:
        precision = whole_precision(benchmark_precision, benchmark_max_time, min_time)
        options = Options(
            min_time,
            benchmark_repetitions,
            benchmark_warmup,
            flags.verify,
            replay_scope,
            precision,
            inputs or "hot",
            cuda_graph,
        )
    check_reconcile(context, replay_scope)
    against = BaselineFlags.of(baseline, fail_above, noise_floor)
    if benchmark_out is not None:
        refuse_input(_OUT, benchmark_out, capture)
    with ExitStack() as stack:
        out = stack.enter_context(output_file(_OUT, benchmark_out, force)) if benchmark_out is not None else None
        if energy:
            kept = []
            for flag, path in (("--energy-out", energy_out), ("--power-log-out", power_log_out)):
                if path is not None:
                    refuse_input(flag, path, capture)
                kept.append(None if path is None else stack.enter_context(output_file(flag, path, force)).write)
            work = Work(capture, flags, replay_scope, program, context, stack.enter_context(_progress()))
            return run_energy(work, *kept)
        if energy_windows is not None:
            refuse_input("--energy-windows", energy_windows, capture)
            file = stack.enter_context(output_file("--energy-windows", energy_windows, force))
            work = Work(capture, flags, replay_scope, program, context, stack.enter_context(_progress()))
            return run_energy_windows(work, file.write)
        if reconcile:
            run_reconcile(
                lambda keep_going: flags.plan(capture, keep_going=keep_going),
                options,
                benchmark_format,
                stack.enter_context(_progress()),
                out.write if out is not None else None,
                program,
                program_runs,
            )
            return 0
        plan = stack.enter_context(flags.plan(capture, keep_going=per_op is not None))
        if per_op is not None:
            progress = stack.enter_context(_progress())
            return run_per_op(plan, per_op, benchmark_format, progress, out.write if out is not None else None, against)
        if compare:
            progress = stack.enter_context(_progress())
            run_compare(plan, options, benchmark_format, progress, out.write if out is not None else None)
            return 0
        stack.enter_context(profiled(profiling, plan))
        report, below, passes = against.apply(
            lambda: _measure(plan, options, lambda name: plan_of_scope(capture, flags, name))
        )
        if memory:
            from replayfmt.benchmark.memory import MemoryReport

            found = MemoryReport.of(plan)
            report.sections["memory"] = found.as_json()
        if out is not None:
            out.write(report.json())
        with reader_may_leave():
            _show(report, benchmark_format)
            if memory and benchmark_format == "console":
                for line in found.lines():
                    say(line)
            show_below(below, benchmark_format)
    return 0 if passes else 1


def _measure(plan: Plan, options: Options, of_scope: PlanOfScope) -> Report:
    """Run the benchmark; progress goes to stderr if that is a terminal."""
    from replayfmt.benchmark.measure import measure
    from replayfmt.benchmark.reports.rows import make_report

    with _progress() as progress:
        return make_report(measure(plan, options, progress=progress, plan_of_scope=of_scope), plan)


def _show(report: Report, form: str) -> None:
    """Print the results on stdout; in formats for programs, warnings go to stderr."""
    from replayfmt.benchmark.reports.console import print_report

    if form == "console":
        print_report(report)
        return
    click.echo(report.json() if form == "json" else report.csv(), nl=False)
    for warning in report.warnings():
        say(f"WARNING: {warning}", err=True)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A progress bar on stderr if that is a terminal, None otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn())
    # No redraw thread: it would wake up during timing. The bar is drawn between replays.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("")
        drawn = 0.0

        def show(what: str, done: int, of: int | None) -> None:
            nonlocal drawn
            now = bar.get_time()
            if now - drawn >= _REDRAW_S or not done:
                bar.update(task, description=what, completed=done, total=of, refresh=True)
                drawn = now

        yield show


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
