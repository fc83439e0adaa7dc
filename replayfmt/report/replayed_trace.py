"""A trace of a replay, as --device-profiling-output writes it (torch.profiler's JSON): its events one by one, of the
capture that it was replayed from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from replayfmt.benchmark.same_capture import TRACE_SESSION, require_same_capture
from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.importers.common.json_stream import JsonStream, LongFloat
from replayfmt.importers.common.trace_files import TraceFile

FLAG = "--replayed"
_WANTED = "expected a trace that opreplay-run or opreplay-benchmark wrote with --device-profiling-output"
_LATEST = 4e15  # microseconds since 1970, of the year 2096: in nanoseconds, 64 bits hold a sum of two of them


class ReplayedTrace:
    """A trace that has events with a time. `first_ns` is the time of the first of them, in the trace's own clock;
    `names_its_capture` is False for a trace that does not say what was replayed."""

    def __init__(self, path: str, reader: CaptureReader) -> None:
        """Raises UsageError for a file that cannot be read or has no events with a time, and for the trace of another
        capture's replay; CaptureNotFound; InvalidCapture for a file that is no JSON."""
        self.path = path
        first, session = None, None
        for key, value in self._entries():
            if key == TRACE_SESSION:
                session = value
            elif key in ("traceEvents", "") and isinstance(value, dict) and value.get("ph") == "X":
                time = time_of(value)
                if time is not None and (first is None or time < first):
                    first = time
        if first is None:
            raise UsageError(f"{FLAG}={path}: has no events with a time; {_WANTED}")
        if session is not None:
            require_same_capture(f"{FLAG}={path}", session, reader)
        self.first_ns, self.names_its_capture = first, session is not None

    def is_file(self, other: str | os.PathLike[str]) -> bool:
        """Whether `other` is the file of this trace."""
        return os.path.exists(other) and os.path.samefile(self.path, other)

    def events(self) -> Iterator[dict[str, Any]]:
        """All events that are objects, in the file's order."""
        for key, value in self._entries():
            if key in ("traceEvents", "") and isinstance(value, dict):
                yield value

    def _entries(self) -> Iterator[tuple[str, Any]]:
        try:
            with JsonStream(TraceFile(self.path), exact=True) as stream:
                yield from stream.entries({"traceEvents"})
        except OSError as error:
            raise UsageError(f"{FLAG}={self.path}: cannot be read: {error.strerror}") from None


def time_of(event: dict[str, Any], name: str = "ts") -> int | None:
    """When an event begins (or with `dur`, how long it lasts), in nanoseconds; None if it does not say."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LATEST:  # nor NaN
        return None
    if isinstance(value, LongFloat):
        whole, _point, fraction = value.text.partition(".")
        if whole.lstrip("-").isdigit() and fraction.isdigit():
            return int(whole) * 1000 + int(f"{fraction:0<3.3}")
    return round(value * 1000)
