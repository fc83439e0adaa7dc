"""What ran when, as lanes of bars: as captured, as a replay was traced, and as isolated calls take.

A trace of a replay is what --device-profiling-output writes. Neighbouring bars are merged where a picture has no room
for each of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from replayfmt.benchmark.result_files import TRACE_SESSION, require_same_capture
from replayfmt.dump.row_templates import scope_path
from replayfmt.errors import UsageError
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import printable
from replayfmt.importers.common.json_stream import JsonStream, LongFloat
from replayfmt.importers.common.trace_files import TraceFile

from .measurements import IsolatedTimes
from .ops import CapturedOps

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


LONGEST_NAME = 200
_DEEPEST = 5  # scopes further inside have no lanes
_ON_DEVICES = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
_UNKNOWN = -1


class NameTable:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(printable(text, LONGEST_NAME), len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


@dataclass(frozen=True)
class Lane:
    """Bars of one lane, in any order, of ops or (`scopes`) of passes through scopes. Times are nanoseconds; `name` is a
    number of Names, `site` the call site's number, 0 for none, `ordinal` the record's, -1 for none."""

    label: str
    scopes: bool
    start: np.ndarray
    taken: np.ndarray
    name: np.ndarray
    site: np.ndarray
    ordinal: np.ndarray


def captured_lanes(ops: CapturedOps, site_of: np.ndarray, reader: CaptureReader, names: NameTable) -> list[Lane]:
    """As the capture has them. `site_of` has the number of each op's call site. Empty if no op has a time."""
    host = np.flatnonzero(ops.duration_ns >= 0)
    device = np.flatnonzero((ops.device_ns >= 0) & (ops.device > 0))
    if not len(host) and not len(device):
        return []
    called = _kernel_names(reader, names)[ops.kernel]
    passes: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for each in ops.scope_passes:
        named = names.number(scope_path(reader, each.scope))
        passes[each.thread, each.depth].append((each.start_ns, each.end_ns - each.start_ns, named))
    found = _scope_lanes(passes)
    for text, chosen in _by_key(host, ops.thread[host], _thread):
        columns = ops.start_ns, ops.duration_ns, called, site_of, ops.ordinal
        found.append(Lane(text, False, *(column[chosen] for column in columns)))
    op = np.searchsorted(ops.ordinal, ops.kernels[:, 0])
    traced = ops.device[op] > 0
    op, kernels = op[traced], ops.kernels[traced]
    rest = np.setdiff1d(device, op)
    rows = np.concatenate([op, rest])
    start, taken = (
        np.concatenate([kernels[:, place], column[rest]]) for place, column in ((2, ops.start_ns), (3, ops.device_ns))
    )
    key = ops.device[rows] * len(ops.streams) + np.concatenate([kernels[:, 1], ops.stream[rest]])
    for text, chosen in _by_key(np.arange(len(rows)), key, _stream_label(ops, reader)):
        columns = start, taken, called[rows], site_of[rows], ops.ordinal[rows]
        found.append(Lane(text, False, *(column[chosen] for column in columns)))
    return found


def isolated_ns(
    ops: CapturedOps, reader: CaptureReader, times: IsolatedTimes, every: CapturedOps | None = None
) -> np.ndarray:
    """Nanoseconds of each op, measured on its own; of one that stands for several calls, of all of them. NaN: not
    measured. `every`: all ops of the capture, if `ops` are a part of them."""
    of_all = ops if every is None else every
    calls = np.bincount(of_all.kernel, of_all.calls, len(reader.kernels))
    pairs, place = np.unique(np.stack([ops.signature, ops.kernel]), axis=1, return_inverse=True)
    known = [
        times.call_ns(ops.signatures[signature], reader.kernels[kernel].qualified_name, int(calls[kernel]))
        for signature, kernel in pairs.T.tolist()
    ]
    of_call = np.array([np.nan if each is None else each for each in known], np.float64)
    return (of_call[place.reshape(-1)] if len(pairs.T) else np.zeros(0)) * ops.calls


def isolated_lanes(
    ops: CapturedOps,
    site_of: np.ndarray,
    reader: CaptureReader,
    names: NameTable,
    times: IsolatedTimes,
    every: CapturedOps | None = None,
) -> tuple[list[Lane], int]:
    """Isolated calls one after the other, each in the lane of its device's stream, or of its thread on the host; and
    how many ops have no isolated time. An op that stands for several calls takes as long as all of them. `every`: all
    ops of the capture, if `ops` are a part of them."""
    taken = isolated_ns(ops, reader, times, every)
    measured = np.flatnonzero(~np.isnan(taken))
    ends = np.round(np.cumsum(np.nan_to_num(taken))).astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    passes: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for each in ops.scope_passes:
        first, last = np.searchsorted(ops.ordinal, (each.first, each.last))
        if last > first:
            start, end = int(starts[first]), int(ends[last - 1])
            passes[each.thread, each.depth].append((start, end - start, names.number(scope_path(reader, each.scope))))
    found = _scope_lanes(passes) if len(measured) else []
    called = _kernel_names(reader, names)[ops.kernel]
    on_host = np.array([True, *(each.kind == "cpu" for each in reader.devices[1:])])[ops.device]
    host, device = measured[on_host[measured]], measured[~on_host[measured]]
    stream = ops.device * len(ops.streams) + ops.stream
    keys = ((host, ops.thread[host], _thread), (device, stream[device], _stream_label(ops, reader)))
    for rows, key, label in keys:
        for text, chosen in _by_key(rows, key, label):
            columns = starts, ends - starts, called, site_of, ops.ordinal
            found.append(Lane(text, False, *(column[chosen] for column in columns)))
    return found, len(ops) - len(measured)


def replayed_lanes(trace: ReplayedTrace, reader: CaptureReader, names: NameTable) -> list[Lane]:
    """What a replay's trace has: annotations of scopes, operators on the host that no other one called, and work on
    devices. Raises UsageError if it has none of these."""
    known: defaultdict[str, set[str]] = defaultdict(set)
    for kernel in reader.kernels[1:]:
        known[kernel.name].add(kernel.qualified_name)
    scopes: defaultdict[int, list[_Traced]] = defaultdict(list)
    host: defaultdict[int, list[_Traced]] = defaultdict(list)
    device: defaultdict[tuple[str, str], list[_Traced]] = defaultdict(list)
    threads: dict[str, int] = {}
    for event in trace.events():
        start, taken, name = time_of(event), time_of(event, "dur"), event.get("name")
        if event.get("ph") != "X" or start is None or taken is None or not isinstance(name, str):
            continue
        kind, where = event.get("cat"), event.get("args")
        if kind in _ON_DEVICES:
            about = where if isinstance(where, dict) else {}
            key = str(about.get("device", event.get("pid"))), str(about.get("stream", event.get("tid")))
            device[key].append((start, max(0, taken), names.number(name)))
        elif kind in ("cpu_op", "user_annotation"):
            thread = threads.setdefault(str(event.get("tid")), len(threads))
            variants = known.get(name, set()) if kind == "cpu_op" else set()
            only = next(iter(variants)) if len(variants) == 1 else name
            (host if kind == "cpu_op" else scopes)[thread].append((start, max(0, taken), names.number(only)))
    passes: defaultdict[tuple[int, int], list[_Traced]] = defaultdict(list)
    for thread, events in scopes.items():
        for depth, traced in _nested(events):
            passes[thread, depth].append(traced)
    found = _scope_lanes(passes)
    for thread, events in sorted(host.items()):
        found.append(_traced_lane(_thread(thread), False, [each for depth, each in _nested(events) if not depth]))
    for (number, stream), events in sorted(device.items()):
        found.append(_traced_lane(f"device {number}, stream {stream}", False, events))
    if not found:
        raise UsageError(
            f"{FLAG}={trace.path}: has no operators, scopes or kernels; trace the replay with "
            "--device-profiling-mode=host-ops, or with host-ops,device-kernels on accelerators"
        )
    return found


_Traced = tuple[int, int, int]  # start, duration, number of the name


def _nested(events: list[_Traced]) -> Iterator[tuple[int, _Traced]]:
    """Each event of a thread with how many others it is inside of."""
    around: list[int] = []
    for start, taken, name in sorted(events, key=lambda each: (each[0], -each[1])):
        while around and around[-1] <= start:
            around.pop()
        yield len(around), (start, taken, name)
        around.append(start + taken)


def _traced_lane(label: str, scopes: bool, events: list[_Traced]) -> Lane:
    start, taken, name = np.array(events, np.int64).reshape(-1, 3).T
    return Lane(label, scopes, start, taken, name, np.zeros(len(start), np.int64), np.full(len(start), _UNKNOWN))


def _scope_lanes(passes: dict[tuple[int, int], list[_Traced]]) -> list[Lane]:
    """Lanes of passes through scopes, by thread and depth."""
    return [
        _traced_lane(
            f"thread {thread}, {f'scopes inside, {depth}' if depth else 'scopes'}", True, passes[thread, depth]
        )
        for thread, depth in sorted(passes)
        if depth <= _DEEPEST
    ]


def _kernel_names(reader: CaptureReader, names: NameTable) -> np.ndarray:
    return np.array([0, *(names.number(each.qualified_name) for each in reader.kernels[1:])], np.int64)


def _by_key(rows: np.ndarray, keys: np.ndarray, label: Callable[[int], str]) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of each distinct key, in the order of keys."""
    for key in np.unique(keys).tolist():
        yield printable(label(key), LONGEST_NAME), rows[keys == key]


def _thread(thread: int) -> str:
    return f"thread {thread}, host"


def _stream_label(ops: CapturedOps, reader: CaptureReader) -> Callable[[int], str]:
    def label(key: int) -> str:
        number = ops.streams[key % len(ops.streams)]
        stream: Any = f"stream {number}" if number else "default stream"
        return f"{reader.devices[key // len(ops.streams)]}, {stream}"

    return label


_MOST_BARS = 250_000  # in a page; beyond, neighbours are put together before it is written
_MOST_LANES = 40
_PAUSE = 0.25  # of all time with an op
_MOST_PAUSES = 200  # each is drawn as a thing of its own


@dataclass(frozen=True)
class Bars:
    """Bars by lane and start; `lane` and `name` index the timeline's. Times are nanoseconds. A bar of `count` ops
    spans them all; `busy` is the sum of their times; `name`, `site` (its call site's number) and `ordinal` are those of
    the one that took longest. Of scopes `site` is 0."""

    lane: np.ndarray
    start: np.ndarray
    end: np.ndarray
    busy: np.ndarray
    count: np.ndarray
    name: np.ndarray
    site: np.ndarray
    ordinal: np.ndarray

    def __len__(self) -> int:
        return len(self.lane)


@dataclass(frozen=True)
class Pause:
    """A long time without an op, of `taken_ns`, for which a timeline has less room, between `start` and `end`."""

    start: int
    end: int
    taken_ns: int


@dataclass(frozen=True)
class Timeline:
    """Lanes from top to bottom. Times count from the first op or scope, without what `pauses` leave out. `bars` are
    ops, `scopes` passes through scopes; `names` are shared by the timelines of a page."""

    lanes: list[str]
    names: list[str]
    bars: Bars
    scopes: Bars
    pauses: list[Pause]
    lanes_left_out: int


def timeline_of(lanes: Sequence[Lane], names: NameTable) -> Timeline:
    """Of one lane at least."""
    origin = min(int(lane.start.min()) for lane in lanes)
    shown = list(enumerate(lanes[:_MOST_LANES]))
    ops, scopes = (
        _bars([(place, lane) for place, lane in shown if lane.scopes is wanted], origin) for wanted in (False, True)
    )
    pauses, (ops, scopes) = _without_pauses(ops, scopes)
    labels = [lane.label for _place, lane in shown]
    bars = merged(ops, _MOST_BARS), merged(scopes, _MOST_BARS)
    return Timeline(labels, names.all(), *bars, pauses, len(lanes) - len(shown))


def _without_pauses(ops: Bars, scopes: Bars) -> tuple[list[Pause], list[Bars]]:
    """The bars with less room for each time without an op that is longer than a share of all time with one."""
    order = np.argsort(ops.start, kind="stable")
    reached = np.concatenate([[0], np.maximum.accumulate(ops.end[order])])
    end = max(int(bars.end.max(initial=0)) for bars in (ops, scopes))
    taken = np.concatenate([ops.start[order], [end]]) - reached
    busy = end - int(taken[taken > 0].sum())
    long = np.argsort(-taken, kind="stable")[:_MOST_PAUSES]
    long = np.sort(long[taken[long] > busy * _PAUSE]) if busy else long[:0]
    room = np.minimum(taken[long], max(1, min(busy // 20, busy // (2 * max(1, len(long))))))
    left_out = np.cumsum(taken[long] - room)
    starts = reached[long] - left_out + taken[long] - room
    pauses = [
        Pause(*each) for each in zip(starts.tolist(), (starts + room).tolist(), taken[long].tolist(), strict=True)
    ]
    if not pauses:
        return [], [ops, scopes]
    real = np.stack([reached[long], reached[long] + taken[long]], axis=1).reshape(-1)
    drawn = np.stack([starts, starts + room], axis=1).reshape(-1)
    real, drawn = np.append(np.append(0, real), end), np.append(np.append(0, drawn), drawn[-1] + end - real[-1])

    def moved(times: np.ndarray) -> np.ndarray:
        return np.round(np.interp(times, real, drawn)).astype(np.int64)

    return pauses, [replace(bars, start=moved(bars.start), end=moved(bars.end)) for bars in (ops, scopes)]


def merged(bars: Bars, most: int) -> Bars:
    """The same bars where there are at most `most`; else about so many, of neighbours in one lane put together."""
    if len(bars) <= most:
        return bars
    cells = max(1, most // len(np.unique(bars.lane)))
    key = bars.lane * (cells + 2) + bars.start // max(1, -(-int(bars.end.max()) // cells))
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    group = np.cumsum(np.concatenate([[False], key[1:] != key[:-1]]))
    longest = np.lexsort((-bars.busy, group))[first]
    return Bars(
        bars.lane[first],
        bars.start[first],
        np.maximum.reduceat(bars.end, first),
        np.add.reduceat(bars.busy, first),
        np.add.reduceat(bars.count, first),
        bars.name[longest],
        bars.site[longest],
        bars.ordinal[longest],
    )


def _bars(lanes: list[tuple[int, Lane]], origin: int) -> Bars:
    """The bars of lanes, each with its place; times count from `origin`."""

    def joined(columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int64), *columns])

    lane = joined([np.full(len(each.start), place) for place, each in lanes])
    start = joined([each.start - origin for _place, each in lanes])
    order = np.lexsort((start, lane))
    lane, start = lane[order], start[order]
    taken = np.maximum(joined([each.taken for _place, each in lanes])[order], 0)
    others = (joined([getattr(each, name) for _place, each in lanes])[order] for name in _OF_EACH)
    return Bars(lane, start, start + taken, taken, np.ones(len(order), np.int64), *others)


_OF_EACH = ("name", "site", "ordinal")
