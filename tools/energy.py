"""opreplay-energy: integrate a power log over the windows of a measurement, and compare kernels with the whole."""

from __future__ import annotations

import click

from replayfmt.errors import UsageError

from .command import Seconds, reader_may_leave, run_tool, say, tool


@tool(
    "opreplay-energy",
    (
        "opreplay-energy --capture=model.opreplay windows.jsonl power.csv -o gpu_energy_report.json",
        "Joules of every kernel and of the whole:",
    ),
    ("opreplay-energy --zone=Europe/Berlin --gpu=0 windows.jsonl power.csv", "A log in local time, one GPU of it:"),
)
@click.option("--output", "-o", "out", metavar="FILE", help="Write the report to FILE as JSON (docs/energy.md).")
@click.option(
    "--capture", metavar="FILE", type=click.Path(), help="Refuse windows that were not measured on this capture."
)
@click.option(
    "--zone",
    metavar="ZONE",
    help="The zone of times in the log that name none: UTC, Europe/Berlin, +02:00. Default: that of the machine that "
    "the windows were measured on.",
)
@click.option("--gpu", "gpus", multiple=True, metavar="GPU", help="Only this GPU of the log; default: all. Repeatable.")
@click.option(
    "--clock-offset",
    default="0",
    show_default=True,
    metavar="SECONDS|auto",
    help="Add this to the times in the log; auto: find it from the first rise of power from idle to load.",
)
@click.option(
    "--power-averaging",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="Over how long the source averages power (many boards: about a second); a WARNING says if windows are "
    "shorter.",
)
@click.option(
    "--min-samples",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="A window of fewer samples has no joules. Below 10 a WARNING marks the report.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
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

    POWER is the log (CSV), WINDOWS the file that opreplay-benchmark --energy-windows wrote. Prints joules and watts of
    idle, the whole model and each kernel, and what the kernels add up to. Needs neither PyTorch's devices nor the
    capture.

    Exits with 0 if it integrated, 1 if the output cannot be written, 2 for files that are not what they should be or
    do not belong together, 3 if the capture is missing, unreadable or not valid.
    """
    from datetime import timedelta, timezone

    from replayfmt.benchmark.energy.power_log_file import read_power_log, zone_named
    from replayfmt.benchmark.energy.report import make_energy_report
    from replayfmt.benchmark.energy.windows import read_windows
    from replayfmt.benchmark.output import output_file, refuse_input
    from replayfmt.benchmark.same_capture import require_same_capture
    from replayfmt.format.reader import open_capture

    measured = read_windows(windows)
    if capture is not None:
        with open_capture(capture) as reader:
            require_same_capture(windows, measured.context.get("capture_session"), reader)
    own = timezone(timedelta(seconds=measured.utc_offset_s))
    text = zone or f"{own}, that of the machine that was measured"
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


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
