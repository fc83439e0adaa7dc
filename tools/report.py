"""opreplay-report: a capture, and what was measured of it, as one page."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from replayfmt.dump.listings import signature_groups
from replayfmt.dump.selection import Selection
from replayfmt.errors import OpReplayError, UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import counted

from .command import Seconds, console_script, option, reader_may_leave, say, tool

_SHORTEST_SECONDS = 0.0005  # for each op, however many there are
_SHARE_OF_OPS = 0.6  # of the time to measure; the rest goes to whole replays


@tool(
    "opreplay-report",
    ("opreplay-report step.opreplay -o report.html", "What is in a capture:"),
    ("opreplay-report --measure=60 step.opreplay -o report.html", "With its replays measured first:"),
    (
        "opreplay-report --benchmark=whole.json --benchmark=per_op.json step.opreplay -o report.html",
        "With what opreplay-benchmark measured (--benchmark-out):",
    ),
    (
        "opreplay-report --probes=run step.opreplay -o report.html",
        "With what a probe of opreplay-probe run -o run found in a kernel:",
    ),
    ("opreplay-report --plots=pictures step.opreplay -o report.html", "With its pictures as files of their own:"),
    ("opreplay-report --benchmark=whole.json out/ -o report.html", "All ranks of a job, from its folder:"),
)
@option("-o --output FILE", "Write the page to FILE.", name="out", required=True)
@option(
    "--benchmark FILE",
    "Add times that opreplay-benchmark --benchmark-out wrote: of whole replays, or of single ops (--per-op). "
    "Repeatable: one of each.",
    many="benchmarks",
)
@option(
    "--measure SECONDS",
    "First measure here for about that long: whole replays, and each op on its own against what the device could "
    "reach. Starts opreplay-benchmark, which needs PyTorch.",
    name="measure_seconds",
    type=Seconds(min=1, max=86_400),
)
@option(
    "--replay-options OPTIONS",
    "With --measure: options of opreplay-benchmark for it, such as '--device=cuda:0 --allow-code'.",
    default="",
    show_default=False,
)
@option(
    "--run FILE",
    "Say whether a replay was verified, as opreplay-run --format=jsonl > FILE printed. Repeatable.",
    many="runs",
)
@option(
    "--replayed TRACE",
    "Show a replay in the timeline, below the capture, from the trace that --device-profiling-output of opreplay-run "
    "or opreplay-benchmark wrote.",
)
@option("--energy FILE", "Add the joules of a report that opreplay-energy wrote.")
@option(
    "--baseline FILE",
    "Compare each row of --benchmark with that of the same name in FILE, which --benchmark-out wrote.",
)
@option(
    "--compare B",
    "Add a section on where the capture B parts from this one, and on what is faster or slower there.",
    name="other",
)
@option(
    "--probes DIR",
    "Add what a probe cost a kernel, and the schedules of block_sched, from a folder of opreplay-probe run. "
    "Repeatable.",
    multiple=True,
)
@option("--plots DIR", "Write each picture of the page to this folder as well, as SVG and PNG. Needs matplotlib.")
@option("--force", "Replace existing files.")
@click.argument("capture", metavar="CAPTURE", type=click.Path())
def cli(
    capture: str,
    out: str,
    benchmarks: tuple[str, ...],
    measure_seconds: float | None,
    replay_options: str,
    runs: tuple[str, ...],
    replayed: str | None,
    energy: str | None,
    baseline: str | None,
    other: str | None,
    probes: tuple[str, ...],
    plots: str | None,
    force: bool,
) -> int:
    """Write one HTML page about CAPTURE and its measurements.

    The page begins with what stands out. It works offline and has tables that sort and filter, and pictures, for a
    screen, a phone or paper. Making it needs neither PyTorch nor the captured devices, unless it measures. Of a
    folder with the files of all ranks the page compares these.

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

    if os.path.isdir(capture):
        of_one = {
            "--measure": measure_seconds, "--replay-options": replay_options, "--run": runs, "--replayed": replayed,
            "--energy": energy, "--baseline": baseline, "--compare": other, "--probes": probes, "--plots": plots,
        }  # fmt: skip
        _report_ranks(capture, out, benchmarks, force, [flag for flag, value in of_one.items() if value])
        return 0
    if replay_options and measure_seconds is None:
        raise UsageError("--replay-options is for --measure")
    if measure_seconds is not None and benchmarks:
        raise UsageError("--measure measures what --benchmark gives; leave one of them out")
    logs = (os.path.join(each, "event.log") for each in probes)
    sources = [
        each for each in (capture, *benchmarks, *runs, replayed, energy, baseline, other, *logs) if each is not None
    ]
    for given in sources:
        refuse_input("--output", out, given, "the capture" if given == capture else "a file that is to be read")
    with (
        open_capture(capture) as reader,
        output_file("--output", out, force) as file,
        tempfile.TemporaryDirectory() as folder,
    ):
        if measure_seconds is not None:
            benchmarks = _measured(reader, measure_seconds, replay_options, Path(folder))
        compared = None
        if other is not None:
            from replayfmt.compare.comparison import compare

            compared = compare(capture, other, times=True)
        inputs = ReportInputs(
            [(f"--benchmark={path}", read_benchmark(path, reader)) for path in benchmarks],
            None if baseline is None else (baseline, read_baseline(baseline)),
            None if energy is None else read_energy(energy, reader),
            [read_probe_run(path, reader) for path in probes],
            [read_run(path, reader) for path in runs],
            None if replayed is None else ReplayedTrace(replayed, reader),
            compared,
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


def _report_ranks(folder: str, out: str, benchmarks: tuple[str, ...], force: bool, others: list[str]) -> None:
    """The page of a job's folder. `others` are the flags that were given for the capture of one rank."""
    from replayfmt.benchmark.result_files import output_file, refuse_input
    from replayfmt.format.rank_files import rank_file
    from replayfmt.format.reader import open_capture
    from replayfmt.report.measurements import read_benchmark
    from replayfmt.report.page import make_page
    from replayfmt.report.rank_contents import make_rank_contents
    from replayfmt.version import own_version

    if others:
        raise UsageError(f"{others[0]} is for the capture of one rank; {folder} is the folder of a job")
    if len(benchmarks) > 1:
        raise UsageError(f"--benchmark can be given once for {folder}: what opreplay-benchmark measured on all ranks")
    benchmark = None
    if benchmarks:
        (path,) = benchmarks
        refuse_input("--output", out, path, "a file that is to be read")
        with open_capture(rank_file(folder, 0)) as reader:
            benchmark = f"--benchmark={path}", read_benchmark(path, reader)
    with output_file("--output", out, force) as file:
        page = make_page(make_rank_contents(folder, benchmark), own_version())
        file.write(page)
    with reader_may_leave():
        say(f"{out}: {counted(len(page.encode()), 'byte')}; open it in a browser")


class NotMeasured(OpReplayError):
    """opreplay-benchmark ended without results, and has said why."""


def _measured(reader: CaptureReader, seconds: float, options: str, folder: Path) -> tuple[str, ...]:
    """Files with whole replays, and with single ops. Raises NotMeasured."""
    try:
        given = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--replay-options={options}: {error}") from None
    distinct = len(signature_groups(reader, Selection())) or 1
    for_ops = max(_SHORTEST_SECONDS, seconds * _SHARE_OF_OPS / distinct)
    for_wholes = seconds * (1 - _SHARE_OF_OPS)
    files = []
    for name, each_seconds, flags in (
        ("whole.json", for_wholes, ()),
        ("per_op.json", for_ops, ("--per-op", "--roofline")),
    ):
        files.append(str(folder / name))
        least, most = f"--benchmark-min-time={each_seconds / 2:.6g}s", f"--benchmark-max-time={each_seconds:.6g}s"
        fitting = [each for each in given if flags or not each.startswith("--peak-")]  # those are of single ops
        command = ["benchmark", *flags, least, most, f"--benchmark-out={files[-1]}", *fitting, reader.path]
        say(f"measuring: opreplay-{shlex.join(command)}", err=True)
        done = subprocess.run(
            [sys.executable, "-m", "replayfmt", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            say(done.stderr.rstrip(), err=True)
        if done.returncode == UsageError.exit_code:
            raise UsageError(f"--replay-options={options}: opreplay-benchmark does not take them, as it says above")
        if done.returncode:
            raise NotMeasured(f"--measure: opreplay-benchmark ended with {done.returncode}, as it says above")
    return tuple(files)


main = console_script(cli)

if __name__ == "__main__":
    main()
