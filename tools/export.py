"""opreplay-export: write a capture in a form that other tools read: calls to replay, or tables."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader, open_capture

from .command import console_script, is_given, option, record_bar, refuse, say, tool
from .replay_flags import ReplayFlags, flag_of, replay_options, selection_options

if TYPE_CHECKING:
    from replayfmt.dump.selection import OpSelection
    from replayfmt.export.perfetto import TimelineCounts
    from replayfmt.export.replay_zip import Exported

_TASKS = ("kernel-task", "flashinfer-bench", "kernelbench")
_TABLE_FORMATS = ("csv", "parquet")
# Flags that only some formats take.
_ONLY_FOR = {
    "unique": ("replay-zip",),
    "partial": ("replay-zip",),
    "table": _TABLE_FORMATS,
    "replayed": ("perfetto",),
    "benchmark": ("perfetto", "chakra", *_TASKS),
    "power_log": ("perfetto",),
    "zone": ("perfetto",),
    "inputs": _TASKS,
    "size_limit": _TASKS,
    **dict.fromkeys((field.name for field in fields(ReplayFlags)), _TASKS),
}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@tool(
    "opreplay-export",
    ("opreplay-export step.opreplay step.zip", "TraceLens EventReplay IR and a script that replays it:"),
    ("opreplay-export --format=perfetto step.opreplay step.json", "A timeline for Perfetto and chrome://tracing:"),
    ("opreplay-export --format=kernel-task --kernel=aten::addmm step.opreplay task", "A task for authors of kernels:"),
    ("opreplay-export --format=chakra out/ traces", "Chakra traces of all ranks, for ASTRA-sim:"),
    ("opreplay-export --format=csv --table=kernels step.opreplay kernels.csv", "A row for each kernel:"),
)
@option(
    "--format",
    "replay-zip: TraceLens EventReplay IR, a script that replays it with only PyTorch, a README. kernel-task: a "
    "folder with the calls of a --kernel, or the ops of a --scope or of --ops as one function, with inputs, expected "
    "outputs, the reference and a judge that needs only PyTorch. flashinfer-bench, kernelbench: also in that form. "
    "perfetto: a timeline, as Chrome's JSON, of all ranks for their folder. chakra: execution traces of all ranks, for "
    "simulators. csv, parquet: a table.",
    name="form",
    type=["replay-zip", *_TASKS, "perfetto", "chakra", *_TABLE_FORMATS],
    default="replay-zip",
)
@option(
    "--table",
    "With --format=csv or parquet: a row for each op, each distinct signature, each kernel (operator), or each device "
    "kernel of an imported profiler trace, with its tier.",
    type=["ops", "signatures", "kernels", "device-kernels"],
    default="ops",
)
@option(
    "--replayed TRACE",
    "With --format=perfetto: also show a replay, from the trace that --device-profiling-output of opreplay-run or "
    "opreplay-benchmark wrote; it begins with the capture's first op. Repeatable.",
    multiple=True,
)
@option(
    "--benchmark FILE",
    "With --format=perfetto: also show the times of isolated calls, one after the other in capture order, from the "
    "file that opreplay-benchmark --per-op --benchmark-out wrote. With a kernel task: the share of each workload. "
    "With --format=chakra: the times of ops; {rank} in the name stands for each rank.",
)
@option(
    "--power-log FILE",
    "With --format=perfetto: also show the power of this log (CSV, docs/power.md), which was sampled during the "
    "capture.",
)
@option("--zone ZONE", "With --power-log: the zone of times that name none: UTC, +02:00.")
@selection_options
@option(
    "--inputs",
    "With --format=kernel-task: the inputs that the program had, from a verified replay; synthesized ones; or none, "
    "which check.py then makes.",
    type=["captured", "synthesized", "none"],
    default="captured",
)
@option(
    "--size-limit BYTES",
    "With --format=kernel-task: inputs and outputs take so much at most (K, M, G). The calls that take the most time "
    "come first.",
    default="256M",
)
@option("--unique", "One entry, with its count, for calls that have the same arguments.")
@option("--partial", "Leave out calls that the format cannot express, instead of refusing; they are listed.")
@option("--force", "Replace an existing file or task.")
@replay_options
@click.argument("capture", metavar="CAPTURE", type=click.Path())
@click.argument("out", metavar="OUT", type=click.Path())
@click.pass_context
def cli(
    context: click.Context,
    /,
    capture: str,
    out: str,
    form: str,
    table: Any,
    replayed: tuple[str, ...],
    benchmark: str | None,
    power_log: str | None,
    zone: str | None,
    wanted: OpSelection,
    unique: bool,
    partial: bool,
    force: bool,
    inputs: Any,
    size_limit: str,
    flags: ReplayFlags,
) -> None:
    """Write CAPTURE to OUT for other tools.

    What replay-zip cannot express (collectives, sparse tensors, what the capture itself lacks) is refused, and all of
    it listed. Exits with 0 if OUT was written, 1 if it was refused or could not be written, 2 for wrong usage, 3 if
    CAPTURE is missing, unreadable or not valid.
    """
    for name, formats in _ONLY_FOR.items():
        if is_given(context, name) and form not in formats:
            raise UsageError(f"{flag_of(name)} is for --format={' and '.join(formats)}")

    if form == "chakra":
        _chakra(capture, out, wanted, benchmark, force)
        return
    if form in _TASKS:
        _kernel_task(capture, out, wanted, inputs, size_limit, flags, force, form, benchmark)
        return
    if form == "perfetto" and os.path.isdir(capture):
        _timeline_of_ranks(context, capture, out, wanted, force)
        return
    with open_capture(capture) as reader:
        if form in _TABLE_FORMATS:
            _table(reader, out, table, form, wanted, force)
            return
        if form == "perfetto":
            _timeline(reader, out, wanted, replayed, benchmark, power_log, zone, force)
            return
        from replayfmt.export.replay_zip import export_replay_zip

        with record_bar("exporting", reader.record_count) as on_record:
            exported = export_replay_zip(
                reader, out, wanted, unique=unique, partial=partial, force=force, on_record=on_record
            )
    _report(out, exported)


def _kernel_task(
    capture: str,
    out: str,
    wanted: OpSelection,
    inputs: Any,
    size_limit: str,
    flags: ReplayFlags,
    force: bool,
    form: Any,
    benchmark: str | None,
) -> None:
    matched = re.fullmatch(r"(\d{1,12})([KMG]?)", size_limit)
    if matched is None:
        raise UsageError(f"--size-limit={size_limit}: expected a number of bytes such as 64M")
    if wanted.everything:
        raise UsageError("--format=kernel-task: name what is to be replaced with --kernel, --scope or --ops")
    flags.refuse_other_kernels("the task's outputs are those of the captured kernels")
    from replayfmt.export.kernel_task import write_task
    from replayfmt.export.task_workloads import TaskOptions

    limit = int(matched[1]) * _SIZES[matched[2]]
    other = None if form == "kernel-task" else form
    with flags.plan(capture, keep_going=True) as plan:
        measured = None
        if benchmark is not None:
            from replayfmt.report.measurements import read_benchmark

            measured = read_benchmark(benchmark, plan.reader)
        options = TaskOptions(inputs, limit, flags.verify, flags.allow_code, force, other, measured)
        done = write_task(plan, out, wanted, options)
    say(f"replayed  {done.verified}")
    for sentence in done.left_out:
        say(f"left out  {sentence}")
    say(f"{out}: {done.workloads:,} workloads of {done.calls:,} calls, {done.bytes:,} bytes")


def _chakra(source: str, out: str, wanted: OpSelection, benchmark: str | None, force: bool) -> None:
    from replayfmt.export.chakra import export_chakra
    from replayfmt.report.measurements import IsolatedTimes, read_benchmark, read_isolated

    if not wanted.everything:
        raise UsageError("--format=chakra takes whole files: cut the part out first, with opreplay-trim")

    def times(reader: CaptureReader) -> IsolatedTimes | None:
        if benchmark is None:
            return None
        path = benchmark.replace("{rank}", str(reader.session.rank))
        return read_isolated(f"--benchmark={path}", read_benchmark(path, reader))

    counts = export_chakra(source, out, times=times, force=force)
    for reason, count in counts.unknown.items():
        say(f"left out  {count:,} {reason}")
    if counts.untimed:
        say(f"note      {counts.untimed:,} ops have no known duration, and take none in a simulation")
    for operator, count in counts.unsimulated.items():
        say(f"note      ASTRA-sim does not simulate {operator} ({count:,})")
    nodes = ", ".join(f"{count:,} {kind}" for kind, count in counts.nodes.items())
    say(f"{out}: {counts.ranks} ranks, {nodes}; {counts.views:,} ops that only view memory are left out")


def _table(reader: CaptureReader, out: str, table: Any, form: Any, wanted: OpSelection, force: bool) -> None:
    from replayfmt.dump.selection import resolve_selection
    from replayfmt.export.tables import export_table

    ordinals = None if wanted.everything else resolve_selection(reader, wanted).ordinals
    rows = export_table(reader, out, table, form, ordinals, force=force)
    say(f"{out}: {rows:,} rows of {table}")


def _timeline_of_ranks(context: click.Context, folder: str, out: str, wanted: OpSelection, force: bool) -> None:
    from replayfmt.export.perfetto import export_perfetto_ranks

    refuse(
        context,
        ("replayed", "benchmark", "power_log", "zone"),
        "does not go with the folder of all ranks; give it one file",
    )
    if not wanted.everything:
        raise UsageError("the timeline of all ranks has whole files: cut the part out first, with opreplay-trim")
    _say_timeline(out, export_perfetto_ranks(folder, out, force=force))


def _say_timeline(out: str, counts: TimelineCounts, *more: str) -> None:
    if counts.untimed:
        say(f"note      {counts.untimed:,} ops have no known duration: they are instants")
    for reason, count in counts.left_out.items():
        say(f"left out  {count:,} {reason}")
    shown = (
        f"{counts.ops + counts.untimed:,} ops",
        f"{counts.kernels:,} device kernels",
        f"{counts.counters:,} samples",
    )
    say(f"{out}: {', '.join((*shown, *more))}")


def _timeline(
    reader: CaptureReader,
    out: str,
    wanted: OpSelection,
    replayed: tuple[str, ...],
    benchmark: str | None,
    power_log: str | None,
    zone: str | None,
    force: bool,
) -> None:
    from replayfmt.benchmark.result_files import refuse_input
    from replayfmt.dump.selection import resolve_selection
    from replayfmt.export.perfetto import PowerSeries, export_perfetto
    from replayfmt.report.measurements import read_benchmark, read_isolated
    from replayfmt.report.timelines import ReplayedTrace

    for given in (benchmark, power_log):
        if given is not None:
            refuse_input("OUT", out, given, "a file that is to be read")
    isolated = None
    if benchmark is not None:
        flag = f"--benchmark={benchmark}"
        isolated = read_isolated(flag, read_benchmark(benchmark, reader))
    traces = [ReplayedTrace(path, reader) for path in replayed]
    power = []
    if zone is not None and power_log is None:
        raise UsageError("--zone is for --power-log")
    if power_log is not None:
        from replayfmt.benchmark.energy.power_log import read_power_log, zone_named

        log = read_power_log(power_log, zone=None if zone is None else zone_named(zone))
        power = [PowerSeries(gpu, each.times_s, each.watts) for gpu, each in log.series.items()]
    ordinals = None if wanted.everything else resolve_selection(reader, wanted).ordinals
    counts = export_perfetto(reader, out, ordinals, replayed=traces, isolated=isolated, power=power, force=force)
    for trace in traces:
        if not trace.names_its_capture:
            say(f"note      {trace.path} does not say of which capture it is")
    more = [f"{counts.isolated:,} isolated calls"] if isolated else []
    more += [f"{counts.replayed:,} events of replays"] if replayed else []
    _say_timeline(out, counts, *more)


def _report(out: str, exported: Exported) -> None:
    from replayfmt.export.replay_zip import without_integers

    for reason, count in exported.left_out.most_common():
        say(f"left out  {reason}: {count} calls")
    if exported.without_integers:
        say(f"note      {without_integers(exported)}")
    calls = exported.calls - sum(exported.left_out.values())
    say(f"{out}: {exported.entries:,} entries for {calls:,} calls")


main = console_script(cli)

if __name__ == "__main__":
    main()
