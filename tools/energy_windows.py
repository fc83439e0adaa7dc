"""`opreplay-benchmark --energy-windows`: run the windows that a power log is integrated over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError

from .command import say

if TYPE_CHECKING:
    from replayfmt.benchmark.energy.windows import WindowsFile
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
    """Add --energy, --energy-windows and the flags that go with them."""
    for option in (
        click.option(
            "--power-log-out", metavar="FILE", help="With --energy: keep the log of the sampled power (CSV) as FILE."
        ),
        click.option("--energy-out", metavar="FILE", help="With --energy: write the report to FILE as JSON."),
        click.option(
            "--power-averaging",
            type=click.FloatRange(min=0, max=60),
            default=1.0,
            show_default=True,
            metavar="SECONDS",
            help="With --energy or --energy-windows: over how long the source averages power. Work runs for so long "
            "before each window, and windows are no shorter.",
        ),
        click.option(
            "--power-interval",
            type=click.FloatRange(min=1e-4, max=60),
            default=0.04,
            show_default=True,
            metavar="SECONDS",
            help="With --energy or --energy-windows: the time between two samples of power. Windows hold at least 10.",
        ),
        click.option(
            "--energy",
            is_flag=True,
            help="Measure joules of the whole replay and of each distinct op (--op-filter and --op-limit choose some), "
            "in windows as with --energy-windows, while a process of its own samples the power of the GPUs through "
            "zeus.",
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

    energy, windows = context.params["energy"], context.params["energy_windows"] is not None
    if not energy:
        for name in ("energy_out", "power_log_out"):
            if given(name):
                raise UsageError(f"--{name.replace('_', '-')} needs --energy")
    if not energy and not windows:
        for name in ("power_interval", "power_averaging"):
            if given(name):
                raise UsageError(f"--{name.replace('_', '-')} needs --energy or {_FLAG}")
        return
    if energy and windows:
        raise UsageError(f"--energy samples the power itself, {_FLAG} leaves that to another program; give one of them")
    for name in _NOT_WITH_WINDOWS:
        if given(name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with {'--energy' if energy else _FLAG}")


def run_energy_windows(
    make_plan: Callable[[bool], Plan],
    context: click.Context,
    verify: Any,
    progress: Progress | None,
    write: Callable[[str], None],
) -> int:
    """Run the windows, and `write` their file. Returns the exit code: 1 if a requested op has no window."""
    found = _windows(make_plan, context, verify, progress)
    write(found.text())
    path = context.params["energy_windows"]
    ops = sum(window.role == "op" for window in found.windows)
    say(f"{path}: {len(found.windows)} windows, of {ops} ops, {found.context['window_s']:g} s or more each")
    for each in found.not_run:
        say(f"not run: {each['name']}: {each['reason']}")
    say(f"integrate a power log over them with: opreplay-energy {path} POWER.csv")
    return 1 if found.not_run else 0


def run_energy(
    make_plan: Callable[[bool], Plan],
    context: click.Context,
    verify: Any,
    progress: Progress | None,
    write: Callable[[str], None] | None,
    keep_log: Callable[[str], None] | None,
) -> int:
    """Run the windows while the power is sampled, and print the report; `write` receives its JSON, `keep_log` the log.
    Returns the exit code: 1 if a requested op has no window."""
    import tempfile
    from datetime import UTC
    from pathlib import Path

    from replayfmt.benchmark.energy.power_log import read_power_log
    from replayfmt.benchmark.energy.report import make_energy_report
    from replayfmt.benchmark.energy.sampler import sampling

    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "power.csv"
        try:
            with sampling(log, context.params["power_interval"]):
                found = _windows(make_plan, context, verify, progress)
        finally:
            if keep_log is not None and log.exists() and log.stat().st_size:
                keep_log(log.read_text(encoding="utf-8"))
        power = read_power_log(log, zone=UTC)
    report = make_energy_report(found, power, offset_s=0.0, averaging_s=context.params["power_averaging"])
    if write is not None:
        write(report.json())
    for line in report.lines():
        say(line)
    return 1 if found.not_run else 0


def _windows(
    make_plan: Callable[[bool], Plan], context: click.Context, verify: Any, progress: Progress | None
) -> WindowsFile:
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
        "window_s": options.window_s,
        "distinct_ops": runner.distinct_ops,
        "selected_ops": runner.selected_ops,
    }
    return WindowsFile(told | settings, int(offset.total_seconds()), runner.windows, runner.not_run)
