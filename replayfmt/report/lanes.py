"""What is drawn over time: lanes of bars, as they were captured, as a replay was traced, and as isolated calls take.

Captured ops of a thread are in a lane of their own, with the time that each took on the host. Ops whose time on a
device is known are in a lane of that device's stream as well: each kernel from when it began, where an import has kept
that, else the op from when the host issued it. A replay's trace holds when devices began. Isolated calls follow each
other in capture order, across all lanes: nothing overlaps in them, since nobody knows what would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replayfmt.dump.values import scope_path
from replayfmt.errors import UsageError
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader

from .isolated import IsolatedTimes
from .ops import CapturedOps
from .replayed_trace import FLAG, ReplayedTrace, time_of

LONGEST_NAME = 200
_DEEPEST = 5  # scopes further inside have no lanes
_ON_DEVICES = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace's events
_UNKNOWN = -1


class Names:
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


def captured_lanes(ops: CapturedOps, site_of: np.ndarray, reader: CaptureReader, names: Names) -> list[Lane]:
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


def isolated_lanes(
    ops: CapturedOps,
    site_of: np.ndarray,
    reader: CaptureReader,
    names: Names,
    times: IsolatedTimes,
    every: CapturedOps | None = None,
) -> tuple[list[Lane], int]:
    """Isolated calls one after the other, each in the lane of its device's stream, or of its thread on the host; and
    how many ops have no isolated time. An op that stands for several calls takes as long as all of them. `every`: all
    ops of the capture, if `ops` are a part of them."""
    of_all = ops if every is None else every
    calls = np.bincount(of_all.kernel, of_all.calls, len(reader.kernels))
    pairs, place = np.unique(np.stack([ops.signature, ops.kernel]), axis=1, return_inverse=True)
    known = [
        times.call_ns(ops.signatures[signature], reader.kernels[kernel].qualified_name, int(calls[kernel]))
        for signature, kernel in pairs.T.tolist()
    ]
    of_call = np.array([np.nan if each is None else each for each in known], np.float64)
    taken = (of_call[place.reshape(-1)] if len(pairs.T) else np.zeros(0)) * ops.calls
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
    keys = ((host, ops.thread[host], _thread), (device, _stream_keys(ops, device), _stream_label(ops, reader)))
    for rows, key, label in keys:
        for text, chosen in _by_key(rows, key, label):
            columns = starts, ends - starts, called, site_of, ops.ordinal
            found.append(Lane(text, False, *(column[chosen] for column in columns)))
    return found, len(ops) - len(measured)


def replayed_lanes(trace: ReplayedTrace, reader: CaptureReader, names: Names) -> list[Lane]:
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


def _kernel_names(reader: CaptureReader, names: Names) -> np.ndarray:
    return np.array([0, *(names.number(each.qualified_name) for each in reader.kernels[1:])], np.int64)


def _by_key(rows: np.ndarray, keys: np.ndarray, label: Callable[[int], str]) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of each distinct key, in the order of keys."""
    for key in np.unique(keys).tolist():
        yield printable(label(key), LONGEST_NAME), rows[keys == key]


def _thread(thread: int) -> str:
    return f"thread {thread}, host"


def _stream_keys(ops: CapturedOps, rows: np.ndarray) -> np.ndarray:
    keys: np.ndarray = ops.device[rows] * len(ops.streams) + ops.stream[rows]
    return keys


def _stream_label(ops: CapturedOps, reader: CaptureReader) -> Callable[[int], str]:
    def label(key: int) -> str:
        number = ops.streams[key % len(ops.streams)]
        stream: Any = f"stream {number}" if number else "default stream"
        return f"{reader.devices[key // len(ops.streams)]}, {stream}"

    return label
