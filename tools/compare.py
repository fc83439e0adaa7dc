"""`opreplay-benchmark --compare`: the flags it is compatible with, and its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from replayfmt.errors import UsageError

from .command import say
from .replay_flags import ReplayFlags

if TYPE_CHECKING:
    from replayfmt.benchmark.measure import Options, Progress
    from replayfmt.replay.plan import Plan

# Flags of measurements other than comparisons.
_NOT_WITH_COMPARE = (
    "benchmark_repetitions",
    "benchmark_precision",
    "benchmark_max_time",
    "inputs",
    "cuda_graph",
    "baseline",
    "fail_above",
    "noise_floor",
    "device_profiling_mode",
    "device_profiling_output",
)


def refuse_with_compare(context: click.Context, flags: ReplayFlags, per_op: bool) -> None:
    """Raises UsageError for flags that do not go with --compare, and if there is nothing to compare with."""
    if not flags.replay_kernel_substitution:
        raise UsageError("--compare needs --replay-kernel-substitution: there is nothing to compare with")
    if per_op:
        raise UsageError("--compare and --per-op are two ways to measure; give one of them")
    for name in _NOT_WITH_COMPARE:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --compare, which measures in rounds")


def run_compare(
    plan: Plan, options: Options, form: str, progress: Progress | None, write: Callable[[str], None] | None
) -> None:
    """Measure and print; `write` receives the JSON for --benchmark-out."""
    from replayfmt.benchmark.comparison.compare import measure_both
    from replayfmt.benchmark.comparison.report import make_compare_report

    report = make_compare_report(measure_both(plan, options, progress=progress), plan)
    if write is not None:
        write(report.json())
    if form == "console":
        for line in report.lines():
            say(line)
    else:
        click.echo(report.json() if form == "json" else report.csv(), nl=False)
    for warning in report.context["warnings"]:
        say(f"WARNING: {warning}", err=form != "console")
