"""`opreplay-benchmark --energy-windows`: run the windows that a power log is integrated over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import say

if TYPE_CHECKING:
    from replayfmt.benchmark.measure import Progress
    from replayfmt.replay.plan import Plan

_FLAG = "--energy-windows"
# Flags of other measurements.
_NOT_WITH_WINDOWS = (
    "benchmark_min_time",
    "benchmark_precision",
    "benchmark_max_time",
    "benchmark_warmup",
    "benchmark_repetitions",
    "benchmark_format",
    "benchmark_out",
    "inputs",
    "replay_scope",
    "per_op",
    "compare",
    "reconcile",
    "baseline",
    "fail_above",
    "noise_floor",
    "device_profiling_mode",
    "device_profiling_output",
)


def energy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --energy-windows, --power-interval and --power-averaging."""
    for option in (
        click.option(
            "--power-averaging",
            type=click.FloatRange(min=0, max=60),
            default=1.0,
            show_default=True,
            metavar="SECONDS",
            help="With --energy-windows: over how long the source averages power. Work runs for so long before each "
            "window, and windows are no shorter.",
        ),
        click.option(
            "--power-interval",
            type=click.FloatRange(min=1e-4, max=60),
            default=0.04,
            show_default=True,
            metavar="SECONDS",
            help="With --energy-windows: the time between two samples of the power log. Windows hold at least 10.",
        ),
        click.option(
            "--energy-windows",
            metavar="FILE",
            help="Run nothing, the whole replay, and each distinct op (--op-filter and --op-limit choose some), each "
            "again and again, and write to FILE what ran when. Log the power meanwhile; opreplay-energy integrates it.",
        ),
    ):
        function = option(function)
    return function


def check_energy_windows(context: click.Context) -> None:
    """Raises UsageError for flags that do not go with --energy-windows, or that need it."""

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    if context.params["energy_windows"] is None:
        for name in ("power_interval", "power_averaging"):
            if given(name):
                raise UsageError(f"--{name.replace('_', '-')} needs {_FLAG}")
        return
    for name in _NOT_WITH_WINDOWS:
        if given(name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with {_FLAG}")


def run_energy_windows(
    make_plan: Callable[[bool], Plan],
    context: click.Context,
    verify: Any,
    progress: Progress | None,
    write: Callable[[str], None],
) -> int:
    """Run the windows, and `write` their file. Returns the exit code: 1 if a requested op has no window."""
    from datetime import datetime

    from replayfmt.benchmark.energy.running import WindowOptions, WindowRunner
    from replayfmt.benchmark.energy.windows import WindowsFile
    from replayfmt.benchmark.reports.rows import plan_context

    values = context.params
    options = WindowOptions(
        values["power_interval"], values["power_averaging"], verify, values["op_filter"], values["op_limit"]
    )
    runner = WindowRunner(options, progress=progress)
    with make_plan(False) as plan:
        told = plan_context(plan)
        runner.idle_and_whole(plan)
    with make_plan(True) as plan:
        runner.ops(plan)
    offset = datetime.now().astimezone().utcoffset()
    assert offset is not None
    settings = {
        "power_interval_s": options.interval_s,
        "power_averaging_s": options.averaging_s,
        "distinct_ops": runner.distinct_ops,
        "selected_ops": runner.selected_ops,
    }
    write(WindowsFile(told | settings, int(offset.total_seconds()), runner.windows, runner.not_run).text())
    ops = sum(window.role == "op" for window in runner.windows)
    say(f"{values['energy_windows']}: {len(runner.windows)} windows, of {ops} ops, {options.window_s:g} s or more each")
    for each in runner.not_run:
        say(f"not run: {each['name']}: {each['reason']}")
    say(f"integrate a power log over them with: opreplay-energy {values['energy_windows']} POWER.csv")
    return 1 if runner.not_run else 0
