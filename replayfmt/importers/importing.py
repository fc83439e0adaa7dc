"""Imports any kind of trace: detects a file's kind and calls its importer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from replayfmt.errors import CaptureFailed, OpReplayError, UsageError
from replayfmt.format.arguments import (
    check_function,
    check_kind,
    choice_of,
    count_of,
    flag_of,
    items_of,
    path_of,
    paths_of,
    text_of,
    texts_of,
)
from replayfmt.format.container.output import check_place, same_file
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.traced_names import TracedNames

from .common.rank_trace import MOST_RANKS, RankTrace
from .common.report import ImportReport
from .common.synthesis import PRODUCER
from .common.trace_files import Progress, shown_names
from .kineto.windows import Wanted, parse_time
from .sniffing import KINDS, TraceKind, sniff

if TYPE_CHECKING:
    from .ranks import RankTraces

Level = Literal["auto", "leaf", "launching", "root"]

LEVELS = ("auto", "leaf", "launching", "root")
REWRITES = ("none", "portable")


@dataclass(frozen=True)
class _Options:
    """The options of an import, besides its input and output paths."""

    level: Level
    unique: bool
    rewrite: Literal["none", "portable"]
    libraries: OpLibraries
    names: TracedNames
    progress: Progress | None
    on_record: Callable[[int, int], None] | None
    graph_captures: Sequence[str | PathLike[str]]
    wanted: Wanted


def import_trace(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    kind: TraceKind | Literal["auto"] = "auto",
    level: Level = "auto",
    unique: bool = False,
    rewrite: Literal["none", "portable"] = "none",
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    on_record: Callable[[int, int], None] | None = None,
    graph_captures: Sequence[str | PathLike[str]] = (),
    rank: int | None = None,
    steps: Sequence[int] = (),
    scopes: Sequence[str] = (),
    time: str = "",
) -> ImportReport:
    """Make the capture `out` of another tool's trace, and report what in it is exact, inferred or missing.

    `kind` says what made the trace; `auto` detects it from the file. `level` chooses the operators that represent the
    work, `unique` keeps one of each call with its count (profiler traces), `rewrite="portable"` replaces operators that
    only the traced device has with operators that every device has. `libraries` says which operator libraries may be
    imported, `names` which operators traced names mean, and what replaces strings that the trace dropped.
    `graph_captures` are profiler traces of the captures of the graphs that this one launches: their operators get the
    graphs' kernels. `steps` (of the profiler), `scopes` (annotations by name) and `time` (A:B in milliseconds) select
    what is imported of a profiler trace. `progress(bytes read, bytes)` and `on_record(records written, records)` report
    progress. `rank` chooses one of several ranks' traces in an archive or directory, and `{rank}` in `out` is replaced
    with its number; without it, an archive's first trace is imported.

    Raises CaptureNotFound and InvalidCapture for a trace that cannot be read at all, UsageError for options that its
    kind does not have and for missing ranks, OutputExists and CaptureFailed if `out` cannot be written.
    """
    wanted = _wanted(steps, scopes, time)
    options = _options(level, unique, rewrite, libraries, names, progress, on_record, graph_captures, wanted)
    _check_kind(kind)
    path, out, force = path_of("path", path), path_of("out", out), flag_of("force", force)
    if rank is not None:
        count_of("rank", rank, 0, MOST_RANKS - 1)
    if rank is None:
        _check_out(path, out, force)  # before reading a large trace in vain
        found: TraceKind = sniff(path) if kind == "auto" else kind
        report = _import(path, out, found, options, force, None)
    else:
        from .ranks import rank_traces

        out = _name(out, rank)
        _check_out(path, out, force)
        traces = rank_traces(path, kind)
        place = traces.of(rank)
        _check_out(place.path, out, force)
        report = _import_rank(traces, place, out, options, force)
    report.unused = options.names.unused()
    return report


def _wanted(steps: Any, scopes: Any, time: Any) -> Wanted:
    """What is to be imported of a profiler trace. Raises UsageError."""
    numbers = tuple(count_of("steps", each, 0, 1 << 62) for each in items_of("steps", steps, "a list of numbers"))
    wanted = Wanted(numbers, texts_of("scopes", scopes), text_of("time", time))
    if wanted.time:
        parse_time(wanted.time)
    return wanted


def import_ranks(
    path: str | PathLike[str],
    out: str,
    *,
    kind: TraceKind | Literal["auto"] = "auto",
    level: Level = "auto",
    unique: bool = False,
    rewrite: Literal["none", "portable"] = "none",
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    on_record: Callable[[int, int], None] | None = None,
    steps: Sequence[int] = (),
    scopes: Sequence[str] = (),
    time: str = "",
) -> dict[int, ImportReport]:
    """Make one capture for each rank whose trace is in an archive or a directory, and report on each, by rank.

    `{rank}` in `out` is replaced with each rank's number. Either all captures are written or none: they are created
    beside their final paths and renamed when the last one is complete. Otherwise as import_trace.
    """
    from .ranks import rank_traces

    wanted = _wanted(steps, scopes, time)
    options = _options(level, unique, rewrite, libraries, names, progress, on_record, (), wanted)
    _check_kind(kind)
    path, out, force = path_of("path", path), path_of("out", out), flag_of("force", force)
    if "{rank}" not in out:
        raise UsageError(
            f"{out}: all ranks would be written to one file; put {{rank}} into the name, for instance "
            "step.{rank}.opreplay"
        )
    traces = rank_traces(path, kind)
    places = {place: _name(out, place.rank) for place in traces.all()}
    for each in places.values():
        for source in {os.path.realpath(place.path) for place in places}:
            _check_out(source, each, force)
    reports = {}
    with ExitStack() as staged:
        made = {}
        for place, final in places.items():
            try:
                folder = TemporaryDirectory(prefix=f".{PRODUCER}-", dir=os.path.dirname(final) or ".")
            except OSError as error:
                raise CaptureFailed(f"{final}: cannot be written: {error.strerror}") from None
            made[place] = os.path.join(staged.enter_context(folder), os.path.basename(final))
            reports[place.rank] = _import_rank(traces, place, made[place], options, False)
        for final in places.values():
            check_place(final, force)
        for place, final in places.items():
            try:
                os.replace(made[place], final)
            except OSError as error:
                raise CaptureFailed(f"{final}: is complete, but could not be renamed: {error.strerror}") from None
    for report in reports.values():
        report.unused = options.names.unused()
    return reports


def _options(
    level: Level,
    unique: bool,
    rewrite: Literal["none", "portable"],
    libraries: OpLibraries | None,
    names: TracedNames | None,
    progress: Progress | None,
    on_record: Callable[[int, int], None] | None,
    graph_captures: Sequence[str | PathLike[str]],
    wanted: Wanted,
) -> _Options:
    for name, value, allowed in (("level", level, LEVELS), ("rewrite", rewrite, REWRITES)):
        choice_of(name, value, allowed)
    for name, given, kind in (("libraries", libraries, OpLibraries), ("names", names, TracedNames)):
        if given is not None:
            check_kind(name, given, kind)
    check_function("progress", progress)
    check_function("on_record", on_record)
    return _Options(
        level,
        flag_of("unique", unique),
        rewrite,
        libraries or OpLibraries(),
        names or TracedNames(),
        progress,
        on_record,
        paths_of("graph_captures", graph_captures),
        wanted,
    )


def _check_kind(kind: str) -> None:
    choice_of("kind", kind, ("auto", *KINDS))


def _name(out: str | PathLike[str], rank: int) -> str:
    return fspath(out).replace("{rank}", str(rank))


def _check_out(path: str | PathLike[str], out: str | PathLike[str], force: bool) -> None:
    if same_file(path, out):
        raise UsageError(f"{fspath(out)}: the capture would take the trace's place; name another file")
    check_place(out, force)


def _import_rank(
    traces: RankTraces, place: RankTrace, out: str | PathLike[str], options: _Options, force: bool
) -> ImportReport:
    try:
        report = _import(place.path, out, traces.kind, options, force, place)
    except OpReplayError as error:
        error.args = (f"rank {place.rank} ({place.name}): {error.args[0]}", *error.args[1:])
        raise
    report.rank = place.rank
    report.notes.append(f"{place.name} is the trace of rank {place.rank}, {place.told}")
    if traces.passed_over:
        report.notes.append(f"these files are not traces: {shown_names(traces.passed_over)}")
    report.problems += traces.problems
    return report


def _import(
    path: str | PathLike[str],
    out: str | PathLike[str],
    kind: TraceKind,
    options: _Options,
    force: bool,
    place: RankTrace | None,
) -> ImportReport:
    """Import one trace of a known kind."""
    if kind == "kineto":
        from .kineto.importer import KinetoOptions, import_kineto

        return import_kineto(
            path,
            out,
            options=KinetoOptions(
                options.level, options.unique, options.rewrite, options.graph_captures, options.wanted
            ),
            libraries=options.libraries,
            names=options.names,
            force=force,
            progress=options.progress,
            on_record=options.on_record,
            place=place,
        )
    if options.unique or options.graph_captures or options.wanted:
        flag = (
            "--unique" if options.unique else "--graph-capture" if options.graph_captures else "--step, --scope, --time"
        )
        raise UsageError(f"{flag} is for profiler traces; {fspath(path)} is of kind {kind}")
    if kind == "execution-trace":
        from .execution_trace.importer import import_execution_trace

        return import_execution_trace(
            path,
            out,
            level="root" if options.level == "root" else "deepest",
            rewrite=options.rewrite,
            libraries=options.libraries,
            names=options.names,
            force=force,
            progress=options.progress,
            place=place,
        )
    from .tracelens import import_tracelens

    for flag, value, default in (("level", options.level, "auto"), ("rewrite", options.rewrite, "none")):
        if value != default:
            raise UsageError(
                f"--{flag}={value} is for traces; {fspath(path)} is TraceLens IR, which lists single calls"
            )
    return import_tracelens(
        path, out, libraries=options.libraries, names=options.names, force=force, progress=options.progress
    )
