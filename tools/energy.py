"""opreplay-energy: integrate a power log over the windows of a measurement, and compare kernels with the whole.

Also `opreplay-benchmark --energy-windows`, which runs the windows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from replayfmt.errors import UsageError

from .command import INTERRUPTED, Seconds, console_script, option, reader_may_leave, refuse, say, together, tool
from .replay_flags import plan_of_scope

if TYPE_CHECKING:
    from replayfmt.benchmark.energy.power_log import PowerLog
    from replayfmt.benchmark.energy.running import WindowRunner
    from replayfmt.benchmark.energy.sampler import Sampler
    from replayfmt.benchmark.energy.windows import WindowsFile
    from replayfmt.benchmark.measure import Progress
    from replayfmt.benchmark.meters import MeasuredRegion
    from replayfmt.replay.plan import Plan

    from .replay_flags import ReplayFlags


_FLAG = "--energy-windows"
# Flags of other measurements.
_NOT_WITH_WINDOWS = (
    *(f"benchmark_{name}" for name in ("min_time", "precision", "max_time", "warmup", "repetitions", "format", "out")),
    *("inputs", "cuda_graph", "per_op", "compare", "reconcile", "program_runs", "baseline", "fail_above"),
    *("noise_floor", "device_profiling_mode", "device_profiling_output"),
)


energy_options = together(
    option(
        "--energy-windows FILE",
        "Run nothing, then the whole replay, each scope (or --scope), and each distinct op (--kernel "
        "and --op-limit choose some), each again and again in a window of its own, and write to FILE what ran "
        "when. Log the power meanwhile; opreplay-energy integrates it.",
    ),
    option(
        "--energy",
        "Measure joules of the whole replay, of each scope (or --scope), and of each distinct op "
        "(--kernel and --op-limit choose some), in windows as with --energy-windows, while a process of its "
        "own samples power and energy counters through zeus. With --program also those of the program itself.",
    ),
    option(
        "--energy-source",
        "With --energy: whose energy. gpu: NVML or AMD SMI; soc: a system on a chip (Jetson, Apple); cpu: "
        "processors and their memory (RAPL). auto: for a replay on an accelerator gpu or soc, for one without "
        "cpu, soc or gpu, whichever is there.",
        type=["auto", "gpu", "soc", "cpu"],
        default="auto",
    ),
    option(
        "--power-interval SECONDS",
        "With --energy or --energy-windows: the time between two samples of power. Windows hold at least 10.",
        type=Seconds(min=1e-4, max=60),
        default=0.04,
    ),
    option(
        "--power-averaging SECONDS",
        "With --energy or --energy-windows: over how long the source averages power. Work runs for so long before "
        "each window, and windows are no shorter.",
        type=Seconds(min=0, max=60),
        default=1.0,
    ),
    option("--energy-out FILE", "With --energy: write the report to FILE as JSON."),
    option("--power-log-out FILE", "With --energy: keep the log of the sampled power (CSV) as FILE."),
)


def check_energy_windows(context: click.Context) -> None:
    """Raises UsageError for flags that do not go with --energy-windows, or that need it."""
    energy, windows = context.params["energy"], context.params["energy_windows"] is not None
    if not energy:
        refuse(context, ("energy_out", "power_log_out", "energy_source"), "needs --energy")
    if not energy and not windows:
        return refuse(context, ("power_interval", "power_averaging"), f"needs --energy or {_FLAG}")
    if energy and windows:
        raise UsageError(f"--energy samples the power itself, {_FLAG} leaves that to another program; give one of them")
    report, log = context.params["energy_out"], context.params["power_log_out"]
    if report is not None and log is not None and os.path.realpath(report) == os.path.realpath(log):
        raise UsageError(f"--energy-out and --power-log-out are the same file: {report}")
    refuse(context, _NOT_WITH_WINDOWS, f"does not go with {'--energy' if energy else _FLAG}")


@dataclass(frozen=True)
class Work:
    """What is measured: a capture, as its flags say."""

    capture: str
    flags: ReplayFlags
    scopes: tuple[str, ...]
    program: str | None
    context: click.Context
    progress: Progress | None

    def __post_init__(self) -> None:
        from replayfmt.benchmark.energy.running import script_words

        if self.program is not None:
            script_words(self.program)  # the program is measured last, minutes later


def run_energy_windows(work: Work, write: Callable[[str], None]) -> int:
    """Run the windows, and `write` their file. Returns the exit code: 1 if requested work has no window."""
    from replayfmt.format.validation import counted

    with work.flags.plan(work.capture) as plan:
        found = _windows(work, plan, None)
    write(found.text())
    path = work.context.params["energy_windows"]
    ops = sum(window.role == "op" for window in found.windows)
    windows = counted(len(found.windows), "window")
    say(f"{path}: {windows}, of {counted(ops, 'op')}, {found.context['window_s']:g} s or more each")
    for each in found.not_run:
        say(f"not run: {each['name']}: {each['reason']}")
    say(f"integrate a power log over them with: opreplay-energy {path} POWER.csv")
    return _code(found)


def run_energy(work: Work, write: Callable[[str], None] | None, keep_log: Callable[[str], None] | None) -> int:
    """Run the windows while the power is sampled, and print the report; `write` receives its JSON, `keep_log` the log.
    Returns the exit code: 1 if requested work has no window."""
    from datetime import UTC
    from pathlib import Path

    from replayfmt.benchmark.energy.energy_report import make_energy_report
    from replayfmt.benchmark.energy.power_log import read_power_log
    from replayfmt.benchmark.energy.sampler import sampling

    values = work.context.params
    with tempfile.TemporaryDirectory() as directory, work.flags.plan(work.capture) as plan:
        log = Path(directory) / "power.csv"
        try:
            with sampling(log, values["power_interval"], _kinds(values["energy_source"], plan)) as sampler:
                found = _windows(work, plan, sampler)
        finally:
            if keep_log is not None and log.exists() and log.stat().st_size:
                keep_log(log.read_text(encoding="utf-8"))
        power = read_power_log(log, zone=UTC)
        warnings = _not_of_the_work(power, plan)
    report = make_energy_report(
        found, power, offset_s=0.0, averaging_s=values["power_averaging"], source=sampler.source, warnings=warnings
    )
    if write is not None:
        write(report.json())
    for line in report.lines():
        say(line)
    return _code(found)


def _code(found: WindowsFile) -> int:
    if found.context["interrupted"]:
        say("interrupted: the other ops were not measured", err=True)
        return INTERRUPTED
    return 1 if found.not_run else 0


def _uses_accelerator(plan: Plan) -> bool:
    from replayfmt.pytorch.accelerators import is_accelerator

    return any(is_accelerator(device) for device in plan.devices)


def _kinds(source: str, plan: Plan) -> tuple[str, ...]:
    """Kinds of sources, the best for this work first."""
    if source != "auto":
        return (source,)
    return ("gpu", "soc") if _uses_accelerator(plan) else ("cpu", "soc", "gpu")


def _not_of_the_work(power: PowerLog, plan: Plan) -> list[str]:
    """A warning if what was sampled is not what worked."""
    processors = any(name.startswith("cpu:") for name in power.gpus)
    if any(name.startswith("soc") for name in power.gpus) or processors != _uses_accelerator(plan):
        return []
    if processors:
        return ["the replay works on an accelerator, and this is the energy of the processors"]
    return ["the replay uses no accelerator, and this is the energy of GPUs that had nothing to do"]


def _windows(work: Work, plan: Plan, sampler: Sampler | None) -> WindowsFile:
    """Run all windows. `plan` is that of the whole capture."""
    from replayfmt.benchmark.energy.running import WindowOptions, WindowRunner
    from replayfmt.benchmark.energy.windows import WindowsFile
    from replayfmt.benchmark.machine import GpuWatch
    from replayfmt.benchmark.meters import entered_scopes, find_regions
    from replayfmt.benchmark.run_report import plan_context

    values = work.context.params
    began_offset_s = _utc_offset_s()
    options = WindowOptions(
        values["power_interval"],
        values["power_averaging"],
        work.flags.verify,
        values["kernel"],
        values["op_limit"],
        0.0 if sampler is None else sampler.counter_period_s or 0.0,
    )
    require_source = (lambda: None) if sampler is None else sampler.require_running
    runner = WindowRunner(options, progress=work.progress, require_source=require_source)
    told = plan_context(plan)
    gpus = GpuWatch(plan.devices)
    regions = find_regions(plan.reader, work.scopes or entered_scopes(plan.reader))
    runner.idle_and_whole(plan, gpus.begin)
    plan.close()  # so that its memory is not held twice
    for region in regions:
        _scope(work, region, runner)
    with work.flags.plan(work.capture, keep_going=True) as each:
        runner.ops(each)
    if work.program is not None and not runner.interrupted:
        runner.program(work.program)
    gpus.end()
    offset_s = _utc_offset_s()
    settings = {
        "gpus": gpus.rows(),
        "power_interval_s": options.interval_s,
        "power_averaging_s": options.averaging_s,
        "counter_period_s": None if sampler is None else sampler.counter_period_s,
        "window_s": options.window_s,
        "distinct_ops": runner.distinct_ops,
        "selected_ops": runner.selected_ops,
        "interrupted": runner.interrupted,
        "utc_offset_changed": offset_s != began_offset_s,
    }
    return WindowsFile(told | settings, offset_s, runner.windows, runner.not_run)


def _utc_offset_s() -> int:
    """That of this machine's zone now: daylight saving time may begin or end while windows run."""
    from datetime import datetime

    offset = datetime.now().astimezone().utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _scope(work: Work, region: MeasuredRegion, runner: WindowRunner) -> None:
    """A window for a scope, of a capture cut to it; one that cannot be cut out or replayed apart is listed."""
    from replayfmt.errors import OpReplayError

    name = str(region.name)
    if not region.ops:
        return
    try:
        with plan_of_scope(work.capture, work.flags, name) as alone:
            runner.scope(alone, name, region.passes)
    except OpReplayError as error:
        runner.require_source()
        why = str(error).partition("\n")[0]
        runner.not_run.append({"role": "scope", "name": name, "count": region.passes, "reason": why})


@tool(
    "opreplay-energy",
    (
        "opreplay-energy --capture=model.opreplay windows.jsonl power.csv -o gpu_energy_report.json",
        "Joules of every kernel and of the whole:",
    ),
    ("opreplay-energy --zone=Europe/Berlin --gpu=0 windows.jsonl power.csv", "A log in local time, one GPU of it:"),
)
@option("-o --output FILE", "Write the report to FILE as JSON (docs/power.md).", name="out")
@option("--capture FILE", "Refuse windows that were not measured on this capture.", type=click.Path())
@option(
    "--zone ZONE",
    "The zone of times in the log that name none: UTC, Europe/Berlin, +02:00. Default: that of the machine that the "
    "windows were measured on.",
)
@option("--gpu GPU", "Only this GPU of the log; default: all. Repeatable.", many="gpus")
@option(
    "--clock-offset SECONDS|auto",
    "Add this to the times in the log; auto: find it from the first rise of power from idle to load.",
    default="0",
)
@option(
    "--power-averaging SECONDS",
    "Over how long the source averages power (many boards: about a second); a WARNING says if windows are shorter.",
    type=Seconds(min=0),
)
@option(
    "--min-samples N",
    "A window of fewer samples has no joules. Below 10 a WARNING marks the report.",
    type=click.IntRange(min=0),
    default=10,
)
@option("--force", "Replace an existing file.")
@click.argument("windows", metavar="WINDOWS", type=click.Path())
@click.argument("power", metavar="POWER", type=click.Path())
def cli(
    windows: str,
    power: str,
    out: str | None,
    capture: str | None,
    zone: str | None,
    gpus: tuple[str, ...],
    clock_offset: str,
    power_averaging: float | None,
    min_samples: int,
    force: bool,
) -> int:
    """Integrate a power log over the windows of a measurement.

    POWER is the log (CSV), WINDOWS the file that opreplay-benchmark --energy-windows wrote, or one of
    full_model_timing.json and isolated_kernels_timing.json with the other beside it. Prints joules and watts of
    idle, the whole model and each kernel, and what the kernels add up to. Needs neither PyTorch's devices nor the
    capture.

    Exits with 0 if it integrated, 1 if the output cannot be written, 2 for files that are not what they should be or
    do not belong together, 3 if the capture is missing, unreadable or not valid.
    """
    from datetime import UTC, timedelta, timezone

    from replayfmt.benchmark.energy.energy_report import make_energy_report
    from replayfmt.benchmark.energy.power_log import read_power_log, zone_named
    from replayfmt.benchmark.energy.windows import read_windows
    from replayfmt.benchmark.result_files import output_file, refuse_input, require_same_capture
    from replayfmt.format.reader import open_capture

    measured = read_windows(windows, zone_named(zone) if zone else UTC)
    if capture is not None:
        with open_capture(capture) as reader:
            require_same_capture(windows, measured.context.get("capture_session"), reader)
    own = timezone(timedelta(seconds=measured.utc_offset_s))
    text = zone or f"{own}, that of the " + (
        "timings" if "timings" in measured.context else "machine that was measured"
    )
    offset = None if clock_offset == "auto" else _seconds(clock_offset)
    # Local times on both sides of a change to daylight saving time need the zone's name.
    known = None if measured.context.get("utc_offset_changed") else own
    log = read_power_log(power, zone=zone_named(zone) if zone else known, gpus=gpus, zone_text=text)
    report = make_energy_report(measured, log, offset_s=offset, averaging_s=power_averaging, least_samples=min_samples)
    if out is not None:
        for given, what in ((windows, "the file of windows"), (power, "the power log"), (capture, "the capture")):
            if given is not None:
                refuse_input("--output", out, given, what)
        with output_file("--output", out, force) as file:
            file.write(report.json())
    with reader_may_leave():
        for line in report.lines():
            say(line)
    return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e9:
        raise UsageError(f"--clock-offset={text}: expected a number of seconds, for instance -0.25, or auto")
    return value


main = console_script(cli)

if __name__ == "__main__":
    main()
