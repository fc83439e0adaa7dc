"""Which tool made a trace file: detected by its content, never by its name."""

from __future__ import annotations

import zipfile
from itertools import islice
from os import PathLike
from typing import Literal, get_args

from replayfmt.errors import InvalidCapture

from .common.json_stream import JsonStream
from .common.trace_files import archive_names, regular_length

TraceKind = Literal["kineto", "execution-trace", "tracelens"]
KINDS: tuple[TraceKind, ...] = get_args(TraceKind)
_READ = 64  # entries inspected, at most: the distinguishing ones are at the beginning


def sniff(path: str | PathLike[str], member: str = "") -> TraceKind:
    """The kind of a trace file, or of one file of an archive. Raises CaptureNotFound, and InvalidCapture if the kind is
    unknown."""
    regular_length(path)
    if zipfile.is_zipfile(path) and any(name.endswith("event_replay_ir.json") for name in archive_names(path)[0]):
        return "tracelens"
    with JsonStream.open(path, member=member) as stream:
        for seen, (key, value) in enumerate(stream.entries({"traceEvents", "nodes"})):
            if key == "traceEvents" or (key == "" and isinstance(value, dict) and "ph" in value):
                return "kineto"
            if key == "nodes":
                return "execution-trace"
            if key == "" and isinstance(value, dict) and ("replay_ir" in value or "op_name" in value):
                return "tracelens"
            if seen >= _READ:
                break
    with JsonStream.open(path, member=member) as stream:  # an empty list has no entries to inspect
        if any(entry == ("traceEvents", []) for entry in islice(stream.entries(()), _READ)):
            raise InvalidCapture(
                f"{path}: the trace has no operator events: its traceEvents are empty; profile with "
                "activities=[ProfilerActivity.CPU, ...] while operators run"
            )
        which = "" if member else ", the archive's first JSON file,"
        told = f": {stream.member}{which} is" if stream.member else ":"
        problem = f" ({stream.problems[0]})" if stream.problems else ""
    raise InvalidCapture(
        f"{path}{told} not a known kind of trace: expected a PyTorch profiler trace (traceEvents), a "
        f"PyTorch execution trace (nodes), or TraceLens replay IR (op_name and replay_ir){problem}"
    )
