"""Which tool made a trace file: detected by its content, never by its name."""

from __future__ import annotations

import re
import zipfile
from itertools import islice
from os import PathLike, fspath
from typing import Literal, get_args

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from .common.json_stream import JsonStream
from .common.trace_files import TraceFile, archive_names, regular_length

TraceKind = Literal["kineto", "execution-trace", "tracelens"]
KINDS: tuple[TraceKind, ...] = get_args(TraceKind)
_READ = 64  # entries inspected, at most: the distinguishing ones are at the beginning


# What other profilers' files begin with, and how to get at their work.
_FOREIGN = (
    (rb"SQLite format 3\0", "an SQLite database (rocprofv3's rocpd, rpd, Nsight Systems)"),
    (rb"\s*\{\s*\"rocprofiler-sdk-tool\"", "rocprofv3's JSON (kernels without PyTorch operators)"),
    (rb'"?[\w-]+"?,[^\n]{0,400}"?Kernel_?Name"?', "rocprof's table of kernels (without PyTorch operators)"),
    (
        rb"\x0a[\s\S]{0,4000}(?:/host:|/device:|Task Environment)",
        "an XPlane profile of XLA (JAX, TensorFlow, PyTorch/XLA)",
    ),
    (rb"[\x01-\x7f]\x0a[\x01-\x20]\d{1,9}\.\d{1,9}\.\d", "a Chakra execution trace in protobuf"),
    (
        rb"\s*[\[{][\s\S]{0,4000}\"(?:ctrlDeps|dataDeps|durationMicros|COMP_NODE|COMM_COLL_NODE)\"",
        "a Chakra execution trace in JSON",
    ),
)
_HEAD_BYTES = 4096


def _foreign(path: str | PathLike[str], member: str) -> str:
    """What a file of another tool seems to be, by its beginning; "" where it is not known."""
    with TraceFile(path, member=member) as file:
        head = file.read(_HEAD_BYTES)
    return next((what for pattern, what in _FOREIGN if re.match(pattern, head)), "")


def sniff(path: str | PathLike[str], member: str = "") -> TraceKind:
    """The kind of a trace file, or of one file of an archive. Raises CaptureNotFound, and InvalidCapture if the kind is
    unknown."""
    try:
        return _sniff(path, member)
    except InvalidCapture:
        what = _foreign(path, member)
        if what:
            raise UnsupportedVersion(
                f"{fspath(path)}: it is {what}, which is not read; record the program with torch.profiler or "
                "ExecutionTraceObserver, or export it to their JSON"
            ) from None
        raise


def _sniff(path: str | PathLike[str], member: str) -> TraceKind:
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
