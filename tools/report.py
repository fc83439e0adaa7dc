"""opreplay-report: a capture, and what was measured of it, as one page."""

from __future__ import annotations

import os
from contextlib import ExitStack

import click

from replayfmt.format.validation import counted

from .command import reader_may_leave, run_tool, say, tool


@tool(
    "opreplay-report",
    ("opreplay-report step.opreplay -o report.html", "What is in a capture:"),
    (
        "opreplay-report --benchmark=whole.json --benchmark=per_op.json step.opreplay -o report.html",
        "With what opreplay-benchmark measured (--benchmark-out):",
    ),
    (
        "opreplay-report --probes=run step.opreplay -o report.html",
        "With what a probe of opreplay-probe run -o run found in a kernel:",
    ),
    ("opreplay-report --plots=pictures step.opreplay -o report.html", "With its pictures as files of their own:"),
)
@click.option("--output", "-o", "out", metavar="FILE", required=True, help="Write the page to FILE.")
@click.option(
    "--benchmark",
    "benchmarks",
    multiple=True,
    metavar="FILE",
    help="Add times that opreplay-benchmark --benchmark-out wrote: of whole replays, or of single ops (--per-op). "
    "Repeatable: one of each.",
)
@click.option(
    "--run",
    "runs",
    multiple=True,
    metavar="FILE",
    help="Say whether a replay was verified, as opreplay-run --format=jsonl > FILE printed. Repeatable.",
)
@click.option(
    "--replayed",
    metavar="TRACE",
    help="Show a replay in the timeline, below the capture, from the trace that --device-profiling-output of "
    "opreplay-run or opreplay-benchmark wrote.",
)
@click.option("--energy", metavar="FILE", help="Add the joules of a report that opreplay-energy wrote.")
@click.option(
    "--baseline",
    metavar="FILE",
    help="Compare each row of --benchmark with that of the same name in FILE, which --benchmark-out wrote.",
)
@click.option(
    "--probes",
    multiple=True,
    metavar="DIR",
    help="Add what a probe cost a kernel, and the schedules of block_sched, from a folder of opreplay-probe run. "
    "Repeatable.",
)
@click.option(
    "--plots",
    metavar="DIR",
    help="Write each picture of the page to this folder as well, as SVG and PNG. Needs matplotlib.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.argument("capture", metavar="CAPTURE", type=click.Path())
def cli(
    capture: str,
    out: str,
    benchmarks: tuple[str, ...],
    runs: tuple[str, ...],
    replayed: str | None,
    energy: str | None,
    baseline: str | None,
    probes: tuple[str, ...],
    plots: str | None,
    force: bool,
) -> int:
    """Write one HTML page about CAPTURE and its measurements.

    The page works offline and has tables that sort and filter, and pictures, for a screen, a phone or paper. Making it
    needs neither PyTorch nor the captured devices.

    Exits with 0 if the page is written, 1 if it cannot be, 2 for wrong usage and measurements that are damaged or of
    another capture, 3 if CAPTURE is missing, unreadable or not valid.
    """
    from replayfmt.benchmark.baseline import read_baseline
    from replayfmt.benchmark.result_files import output_file, refuse_input
    from replayfmt.format.reader import open_capture
    from replayfmt.report.contents import ReportInputs, make_contents
    from replayfmt.report.measurements import read_benchmark, read_energy, read_run
    from replayfmt.report.page import make_page
    from replayfmt.report.plots import plot_folder
    from replayfmt.report.probe_section import read_probe_run
    from replayfmt.report.timelines import ReplayedTrace
    from replayfmt.version import own_version

    logs = (os.path.join(each, "event.log") for each in probes)
    sources = [each for each in (capture, *benchmarks, *runs, replayed, energy, baseline, *logs) if each is not None]
    for given in sources:
        refuse_input("--output", out, given, "the capture" if given == capture else "a file that is to be read")
    with open_capture(capture) as reader, output_file("--output", out, force) as file:
        inputs = ReportInputs(
            [(f"--benchmark={path}", read_benchmark("--benchmark", path, reader)) for path in benchmarks],
            None if baseline is None else (baseline, read_baseline(baseline)),
            None if energy is None else read_energy("--energy", energy, reader),
            [read_probe_run("--probes", path, reader) for path in probes],
            [read_run("--run", path, reader) for path in runs],
            None if replayed is None else ReplayedTrace(replayed, reader),
        )
        contents = make_contents(reader, inputs)
        page = make_page(contents, own_version())
        with ExitStack() as opened:
            pictures = (
                None if plots is None else opened.enter_context(plot_folder(plots, contents, [out, *sources], force))
            )
            file.write(page)
            written = [] if pictures is None else pictures.commit()
    with reader_may_leave():
        say(f"{out}: {counted(len(page.encode()), 'byte')}; open it in a browser")
        for path in written:
            say(f"written: {path}", err=True)
        for each in [] if pictures is None else pictures.missing:
            say(f"no picture {each.name}: {each.reason}", err=True)
    return 0


def main() -> None:
    """The console script."""
    run_tool(cli)


if __name__ == "__main__":
    main()
