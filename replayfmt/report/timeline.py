"""The ops over time: which lane each is in, and neighbours put together where a picture has no room for each of them.

Ops of a thread are in a lane of their own, with the time that each took on the host. Ops whose time on a device is
known are in a lane of that device's stream as well, from when the host issued them: a capture does not hold when a
device began with them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from replayfmt.dump.values import scope_path
from replayfmt.format.printable import printable
from replayfmt.format.reader import CaptureReader

from .ops import CapturedOps

_MOST_BARS = 250_000  # in a page; beyond, neighbours are put together before it is written
_NAME = 200
_MOST_LANES = 40
_DEEPEST = 5  # scopes further inside have no lanes


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

    def of_lanes(self, first: int) -> Bars:
        """Those in the `first` lanes."""
        kept = self.lane < first
        return Bars(*(getattr(self, each.name)[kept] for each in fields(self)))


@dataclass(frozen=True)
class Timeline:
    """Lanes from top to bottom: those of scopes first. Times count from the first op or scope. `bars` are ops,
    `scopes` passes through scopes, of which `names` holds the paths. `dropped` counts ops without a time."""

    lanes: list[str]
    names: list[str]
    bars: Bars
    scopes: Bars
    dropped: int
    lanes_left_out: int


def timeline_of(ops: CapturedOps, site_of: np.ndarray, reader: CaptureReader) -> Timeline | None:
    """`site_of` has the number of each op's call site. None if nothing in the capture has a time."""
    host = np.flatnonzero(ops.duration_ns >= 0)
    device = np.flatnonzero((ops.device_ns >= 0) & (ops.device > 0))
    if not len(host) and not len(device):
        return None
    names: dict[str, int] = {}

    def named(text: str) -> int:
        return names.setdefault(printable(text, _NAME), len(names))

    kernel_name = np.array([0, *(named(each.qualified_name) for each in reader.kernels[1:])], np.int64)
    lanes: dict[str, int] = {}
    passes = [
        (lanes.setdefault(_scope_lane(each.thread, each.depth), len(lanes)), each)
        for each in sorted(ops.scope_passes, key=lambda each: (each.thread, each.depth))
        if each.depth <= _DEEPEST
    ]
    starts = [ops.start_ns[np.concatenate([host, device])], *(np.array([each.start_ns]) for _lane, each in passes)]
    origin = int(min(column.min() for column in starts if len(column)))
    scopes = _bars(
        np.array([lane for lane, _each in passes], np.int64),
        np.array([each.start_ns - origin for _lane, each in passes], np.int64),
        np.array([each.end_ns - each.start_ns for _lane, each in passes], np.int64),
        np.array([named(scope_path(reader, each.scope)) for _lane, each in passes], np.int64),
        np.zeros(len(passes), np.int64),
        np.zeros(len(passes), np.int64),
    )
    threads = _numbered(lanes, ops.thread[host], lambda thread: f"thread {thread}, host")
    streams = len(ops.streams)
    on_stream = _numbered(
        lanes,
        ops.device[device] * streams + ops.stream[device],
        lambda key: f"{reader.devices[key // streams]}, {_stream(ops.streams[key % streams])}",
    )
    both = np.concatenate([host, device])
    bars = _bars(
        np.concatenate([threads, on_stream]),
        ops.start_ns[both] - origin,
        np.concatenate([ops.duration_ns[host], ops.device_ns[device]]),
        kernel_name[ops.kernel[both]],
        site_of[both],
        ops.ordinal[both],
    )
    timed = np.union1d(host, device)
    shown = (bars.of_lanes(_MOST_LANES), scopes.of_lanes(_MOST_LANES))
    dropped = len(ops) - len(timed)
    left_out = max(0, len(lanes) - _MOST_LANES)
    names_of_lanes = list(lanes)[:_MOST_LANES]
    ops_shown, scopes_shown = (merged(each, _MOST_BARS) for each in shown)
    return Timeline(names_of_lanes, list(names), ops_shown, scopes_shown, dropped, left_out)


def merged(bars: Bars, most: int) -> Bars:
    """The same bars where there are at most `most`; else about so many, of neighbours in one lane put together."""
    if len(bars) <= most:
        return bars
    lanes = len(np.unique(bars.lane))
    cells = max(1, most // lanes)
    width = max(1, -(-int(bars.end.max()) // cells))
    key = bars.lane * (cells + 2) + bars.start // width
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


def _bars(lane: np.ndarray, start: np.ndarray, taken: np.ndarray, *others: np.ndarray) -> Bars:
    order = np.lexsort((start, lane))
    lane, start, taken = lane[order], start[order], np.maximum(taken[order], 0)
    one_each = np.ones(len(order), np.int64)
    return Bars(lane, start, start + taken, taken, one_each, *(column[order] for column in others))


def _numbered(lanes: dict[str, int], keys: np.ndarray, label: object) -> np.ndarray:
    """The lane of each key, new lanes in the order of keys."""
    assert callable(label)
    distinct, place = np.unique(keys, return_inverse=True)
    numbers = [lanes.setdefault(printable(label(key), _NAME), len(lanes)) for key in distinct.tolist()]
    return np.array(numbers, np.int64)[place.reshape(-1)]


def _scope_lane(thread: int, depth: int) -> str:
    inside = "scopes" if not depth else f"scopes inside, {depth}"
    return f"thread {thread}, {inside}"


def _stream(number: str) -> str:
    return f"stream {number}" if number else "default stream"
