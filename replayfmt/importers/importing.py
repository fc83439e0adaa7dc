"""One function for every kind of trace: look into the file, import it by its kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Literal

from replayfmt.errors import UsageError
from replayfmt.format.container.output import check_place, same_file
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.traced_names import TracedNames

from .common.report import ImportReport
from .common.trace_files import Progress
from .sniffing import KINDS, TraceKind, sniff

LEVELS = ("auto", "leaf", "launching", "root")


def import_trace(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    kind: TraceKind | Literal["auto"] = "auto",
    level: Literal["auto", "leaf", "launching", "root"] = "auto",
    unique: bool = False,
    rewrite: Literal["none", "portable"] = "none",
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    on_record: Callable[[int, int], None] | None = None,
    graph_captures: Sequence[str | PathLike[str]] = (),
) -> ImportReport:
    """Make the capture `out` of another tool's trace, and report what of it is exact, inferred or missing.

    `kind` says what made the trace, `auto` looks into the file. `level` chooses the operators that stand for the work,
    `unique` keeps one of each call with its count (profiler traces), `rewrite="portable"` puts operators that every
    device has in the place of those that only the traced device has. `libraries` says which operator libraries may be
    imported, `names` which operators traced names mean, and what stands for strings that the trace dropped.
    `graph_captures` are profiler traces taken while the graphs were captured that this one launches: their operators
    get the graphs' kernels. `progress(bytes read, bytes)` and `on_record(records written, records)` are told how far
    it is.

    Raises CaptureNotFound and InvalidCapture for a trace that cannot be read at all, UsageError for options that its
    kind does not have, OutputExists and CaptureFailed where `out` cannot be written.
    """
    if kind != "auto" and kind not in KINDS:
        raise UsageError(f"kind={kind!r}: expected auto or one of {', '.join(KINDS)}")
    if level not in LEVELS:
        raise UsageError(f"level={level!r}: expected one of {', '.join(LEVELS)}")
    if same_file(path, out):
        raise UsageError(f"{os.fspath(out)}: the capture would take the trace's place; name another file")
    check_place(out, force)  # before a large trace is read in vain
    libraries, names = libraries or OpLibraries(), names or TracedNames()
    found = sniff(path) if kind == "auto" else kind
    if found == "kineto":
        from .kineto.importer import KinetoOptions, import_kineto

        options = KinetoOptions(level, unique, rewrite, graph_captures)
        report = import_kineto(
            path,
            out,
            options=options,
            libraries=libraries,
            names=names,
            force=force,
            progress=progress,
            on_record=on_record,
        )
    elif unique or graph_captures:
        flag = "--unique" if unique else "--graph-capture"
        raise UsageError(f"{flag} is for profiler traces; {path} is of kind {found}")
    elif found == "execution-trace":
        from .execution_trace.importer import import_execution_trace

        report = import_execution_trace(
            path,
            out,
            level="root" if level == "root" else "deepest",
            rewrite=rewrite,
            libraries=libraries,
            names=names,
            force=force,
            progress=progress,
        )
    else:
        from .tracelens import import_tracelens

        for flag, value, default in (("level", level, "auto"), ("rewrite", rewrite, "none")):
            if value != default:
                raise UsageError(f"--{flag}={value} is for traces; {path} is TraceLens IR, which lists single calls")
        report = import_tracelens(path, out, libraries=libraries, names=names, force=force, progress=progress)
    report.unused = names.unused()
    return report
