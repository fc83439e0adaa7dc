"""opreplay-import: turn another tool's trace file into a capture."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

from replayfmt.errors import CaptureFailed, UsageError
from replayfmt.format.output import RANK_FILE, check_place, is_folder

from .command import emit, option, progress_bar, run_tool, say, show, tool

if TYPE_CHECKING:
    from replayfmt.importers.common.report import ImportReport
    from replayfmt.pytorch.op_libraries import OpLibraries

_RANK_DIGITS = 8
_KINDS = ("auto", "kineto", "execution-trace", "tracelens")
_LEVELS = ("auto", "leaf", "launching", "root")


@tool(
    "opreplay-import",
    ("opreplay-import trace.json.gz -o trace.opreplay", "A profiler trace:"),
    (
        "opreplay-import trace.json -o small.opreplay --unique --rewrite=portable",
        "One of each call, with portable operators:",
    ),
)
@option(
    "-o --output FILE",
    "Where to write the capture. If it is a folder (out/), the traces of all ranks of a job, given as files, a "
    "directory or an archive, become out/rank0.opreplay, out/rank1.opreplay, ... and a manifest.",
    required=True,
)
@option(
    "--from",
    "The producer of the trace: the PyTorch profiler, its ExecutionTraceObserver, or TraceLens. auto inspects the "
    "file.",
    name="kind",
    type=_KINDS,
    default="auto",
)
@option(
    "--level",
    "Which operators represent the work: the outermost (root), the deepest that do work themselves (leaf), or those "
    "that launched device work (launching). auto: launching if the trace has device work, else leaf.",
    type=_LEVELS,
    default="auto",
)
@option(
    "--unique",
    "Keep one of each distinct call (operator, types, shapes, strides, values), with its count and its mean times.",
)
@option(
    "--step N",
    "Only what began in the profiler's step N (ProfilerStep#N). Repeatable.",
    many="steps",
    type=click.IntRange(min=0),
)
@option("--scope NAME", "Only what began inside annotations of this name. Repeatable: in any of them.", many="scopes")
@option(
    "--time A:B",
    "Only what began between A and B milliseconds after the trace's beginning. Either may be omitted.",
    default="",
    show_default=False,
)
@option(
    "--rewrite",
    "Replace operators that only the traced device has (cuDNN, MIOpen, fused attention) with operators that every "
    "device has, and report each.",
    type=["none", "portable"],
    default="none",
)
@option(
    "--op-library NAMESPACE=MODULE",
    "Import MODULE if an operator of NAMESPACE is needed. Repeatable.",
    many="op_libraries",
)
@option(
    "--allow-import NAME",
    "Allow importing the known library NAME (a module, a package or an operator namespace) if an operator needs it. "
    "Repeatable.",
    many="allowed",
)
@option(
    "--op-alias TRACED=OPERATOR",
    "Use OPERATOR for the operator called TRACED in the trace. Repeatable.",
    many="aliases",
)
@option(
    "--string-default OP.ARG=VALUE",
    "Use VALUE for the string argument ARG of OP if the trace has none: profiler traces drop all strings. *.ARG=VALUE "
    "applies to any operator. Each use is a warning. Repeatable.",
    many="string_defaults",
)
@option(
    "--number-default OP.ARG=NUMBER",
    "Use NUMBER (or a list such as [2,3]) for the argument ARG of OP where the trace has no value: traces of PyTorch "
    "before 2.0 have none. *.ARG=NUMBER applies to any operator. Each use is a warning. Repeatable.",
    many="number_defaults",
)
@option(
    "--graph-capture FILE",
    "A profiler trace taken while a CUDA or HIP graph that TRACE launches was captured: the kernels of those launches "
    "are assigned to its operators. Repeatable.",
    many="graph_captures",
)
@option(
    "--inductor-cache DIR",
    "The Inductor cache of the traced program: Triton kernels whose source there has the hash that the trace gives "
    "become kernels that a replay launches, with --allow-code.",
)
@option(
    "--rank N|all",
    "TRACE is an archive or a directory with the traces of several ranks: import that of rank N, or all of them, each "
    "to its own capture (-o step.{rank}.opreplay). Default: an archive's first trace.",
)
@option("--format", "How the report is printed.", name="form", type=["text", "jsonl"], default="text")
@option("--report FILE", "Also write the report to FILE, as JSON lines.", name="report_file")
@option("--force", "Replace files that exist.")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
def cli(
    traces: tuple[str, ...],
    output: str,
    op_libraries: tuple[str, ...],
    allowed: tuple[str, ...],
    aliases: tuple[str, ...],
    string_defaults: tuple[str, ...],
    number_defaults: tuple[str, ...],
    graph_captures: tuple[str, ...],
    rank: str | None,
    form: str,
    report_file: str | None,
    force: bool,
    **choices: Any,
) -> int:
    """Turn the trace TRACE into the capture FILE.  A report lists what is exact, inferred or missing.

    TRACE is a PyTorch profiler trace, a PyTorch execution trace, or TraceLens EventReplay IR; plain JSON, gzip, tar.gz
    or zip; with --rank or a folder as output, also a directory of them. Exits with 0 once the capture is written, even
    if some calls could not be completed: these are unsupported records, listed in the report.
    """
    wanted, folder = _rank(rank), is_folder(output)
    if folder:
        if wanted not in (None, "all"):
            raise UsageError(f"{output}: is a folder, for all ranks; name the capture of rank {wanted}")
        wanted = "all"
    elif len(traces) > 1:
        raise UsageError(f"{output}: {len(traces)} traces, those of ranks, go to a folder: -o out/")
    if wanted == "all" and graph_captures:
        raise UsageError("--graph-capture is a trace of one rank: give it with --rank=N, not with --rank=all")
    if wanted is None and "{rank}" in output:
        raise UsageError(f"{output}: which rank is meant? Give --rank=N or --rank=all")
    captures = os.path.join(output, RANK_FILE) if folder else output
    if report_file is not None:
        for trace in traces:
            _check_report(report_file, trace, captures, force)
    from replayfmt.pytorch.traced_names import parsed

    with _progress() as (on_bytes, on_record):
        choices |= {
            "libraries": _libraries(allowed, op_libraries),
            "names": parsed(aliases, string_defaults, number_defaults),
            "force": force,
            "progress": on_bytes,
            "on_record": on_record,
        }
        reports = _import(traces, output, captures, wanted, graph_captures, choices)
    if report_file is not None:
        _write_report(report_file, reports.values())
    for file, report in reports.items():
        _show(traces[0] if len(traces) == 1 else report.source, file, report, form)
    return 0


def _rank(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if not (text.isascii() and text.isdigit() and len(text) <= _RANK_DIGITS):
        raise UsageError(f"--rank={text!r}: expected the number of a rank, from 0, or all")
    return int(text)


def _import(
    traces: tuple[str, ...],
    output: str,
    captures: str,
    rank: int | Literal["all"] | None,
    graph_captures: tuple[str, ...],
    choices: dict[str, Any],
) -> dict[str, ImportReport]:
    """Import, and report by the name of each capture."""
    from replayfmt.importers.importing import import_ranks, import_trace

    if rank == "all":
        reports = import_ranks(traces, output, **choices)
    else:
        reports = {rank or 0: import_trace(traces[0], output, **choices, graph_captures=graph_captures, rank=rank)}
    return {captures if rank is None else captures.replace("{rank}", str(each)): one for each, one in reports.items()}


def _show(trace: str, output: str, report: ImportReport, form: str) -> None:
    show(form, report.rows(), report.lines())
    for problem in report.problems:
        say(f"{trace}: {problem}", err=True)
    for warning in report.warnings():
        emit(f"{trace}: warning: {warning}", err=True)
    missing = report.calls()["incomplete"]
    unsupported = f"; {missing} calls are unsupported records" if missing else ""
    say(f"{output}: {sum(report.calls().values())} calls{unsupported}", err=True)


def _libraries(allowed: tuple[str, ...], op_libraries: tuple[str, ...]) -> OpLibraries:
    from replayfmt.pytorch.op_libraries import OpLibraries, parse_op_library

    libraries = OpLibraries(allowed)
    for each in op_libraries:
        libraries.register(*parse_op_library(each))
    return libraries


def _check_report(report: str, trace: str, output: str, force: bool) -> None:
    place, source = os.path.realpath(report), os.path.realpath(trace)
    captures = re.escape(os.path.realpath(output)).replace(re.escape("{rank}"), r"\d+")
    inside = os.path.isdir(source) and os.path.exists(place) and os.path.commonpath([place, source]) == source
    if place == source or inside or re.fullmatch(captures, place):
        raise UsageError(f"{report}: the trace, the capture and the report must be different files")
    check_place(report, force)


def _write_report(path: str, reports: Iterable[ImportReport]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            for report in reports:
                for row in report.rows():
                    file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise CaptureFailed(f"{path}: the report could not be written: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[tuple[Callable[[int, int], None] | None, Callable[[int, int], None] | None]]:
    """Two progress bars on a terminal's stderr: bytes of the trace read, records written. Otherwise nothing."""
    columns = ("{task.description}", "BarColumn", "TaskProgressColumn", "TimeElapsedColumn")
    with progress_bar(*columns) as bar:
        if bar is None:
            yield None, None
            return
        reading = bar.add_task("reading", total=None)
        writing = bar.add_task("writing", total=None, visible=False)
        yield (
            lambda done, total: bar.update(reading, completed=done, total=total),
            lambda done, total: bar.update(writing, completed=done, total=total, visible=True),
        )


def main() -> None:
    """The console script."""
    gc.set_threshold(100_000, 50, 50)  # millions of objects, hardly any of them in a cycle
    run_tool(cli)


if __name__ == "__main__":
    main()
