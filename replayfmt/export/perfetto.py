"""A capture as a timeline in Chrome's trace event format (JSON), which Perfetto and chrome://tracing open.

One process for the host, with a track for each thread and one for its scopes; one for each device whose kernels' times
an import has kept, with a track for each stream; counters of the bytes alive on each device and of power. Traces of
replays (torch.profiler) become processes of their own that begin with the capture's first op. Written frame by frame.

Times are microseconds since the capture began, with nanoseconds behind the point. What has no known duration is an
instant, not a slice of length 0. Slices of one thread that overlap are on tracks of their own: viewers nest those of
one track.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.memory import LifetimeWalk, StorageEnds
from replayfmt.format.output import Output
from replayfmt.format.rank_files import LAUNCH, meeting_of, rank_file, world_size
from replayfmt.format.reader import CaptureReader, RecordFrame, open_capture
from replayfmt.report.measurements import IsolatedTimes
from replayfmt.report.ops import captured_ops
from replayfmt.report.timelines import FLAG, NameTable, ReplayedTrace, isolated_lanes, time_of

from .tables import op_column_frames, refuse_capture

_HOST, _COUNTERS, _ISOLATED, _FIRST_DEVICE, _FIRST_REPLAYED = 1, 2, 3, 10, 1000
_MARKS = (RecordKind.scope_begin, RecordKind.scope_end, RecordKind.unsupported)
_PHASES = frozenset("XBEbeniIsftCM")  # those of torch.profiler's traces, which the viewers know
_WITH_ID = frozenset("bensft")  # flows and work that begins in one place and ends in another
_FIRST_NAMED_TID = 1 << 30  # for threads of a replay's trace that have a name in place of a number
_ODD = "events of a replay without a name, a time or numbers that viewers know"
_AT_ONCE = 1024  # events that are written together

Event = dict[str, Any]


@dataclass(frozen=True)
class PowerSeries:
    """Sampled power of one GPU: seconds since 1970 (UTC), ascending, and watts."""

    gpu: str
    times_s: np.ndarray
    watts: np.ndarray


@dataclass
class TimelineCounts:
    """What was written: slices of ops, `untimed` ops that are instants, `isolated` calls, `kernels` on devices,
    `counters`, `replayed` events; `left_out` counts what is not in the file, by reason."""

    ops: int = 0
    untimed: int = 0
    isolated: int = 0
    kernels: int = 0
    counters: int = 0
    replayed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def export_perfetto(
    reader: CaptureReader,
    out: str | os.PathLike[str],
    ordinals: np.ndarray | None = None,
    *,
    replayed: Sequence[ReplayedTrace] = (),
    isolated: IsolatedTimes | None = None,
    power: Sequence[PowerSeries] = (),
    force: bool = False,
) -> TimelineCounts:
    """Write the timeline of a capture, completely or not at all. With `ordinals` (ascending), only these records.

    Raises UsageError if `out` is the capture or a trace in `replayed`, and for `power` that has no sample during the
    capture; OutputExists; CaptureFailed if the file cannot be written.
    """
    refuse_capture(reader, out)
    for trace in replayed:
        if trace.is_file(out):
            raise UsageError(f"{FLAG}={trace.path}: is the file to write; name another one")
    timeline = _CaptureTimeline(reader, ordinals)
    origin = timeline.first_ns()
    chosen = [_during(reader, each) for each in power]

    def events() -> Iterator[Event]:
        yield from timeline.events()
        for series, times in zip(power, chosen, strict=True):
            for place, time_ns in times:
                yield _counter(f"power, GPU {series.gpu} (W)", "W", time_ns, float(series.watts[place]))
                timeline.counts.counters += 1
        if isolated:
            yield from _isolated_events(reader, ordinals, isolated, origin, timeline.counts)
        for number, trace in enumerate(replayed):
            yield from _Replayed(trace, _FIRST_REPLAYED * (number + 1), origin).events(timeline.counts)

    about = {"capture": os.path.basename(reader.path), "session": reader.session.session_id}
    _write(out, events(), about, force)
    return timeline.counts


def export_perfetto_ranks(folder: str, out: str | os.PathLike[str], *, force: bool = False) -> TimelineCounts:
    """Write the timelines of all ranks of a job into one: processes of their own for each rank, and arrows between the
    launches of each collective, from the rank that came first to the one that came last. Ranks of several hosts are as
    far apart as their clocks are.

    Raises CaptureNotFound, OutputExists, and CaptureFailed if the file cannot be written.
    """
    world, counts = world_size(folder), TimelineCounts()
    paths = [rank_file(folder, rank) for rank in range(world)]
    began = []
    for path in paths:
        with open_capture(path) as reader:
            refuse_capture(reader, out)
            began.append(reader.session.created_unix_ns or 0)
    launches: dict[Any, list[Event]] = defaultdict(list)

    def events() -> Iterator[Event]:
        for rank, path in enumerate(paths):
            with open_capture(path) as reader:
                yield from _of_rank(reader, rank, began[rank] - min(began), launches, counts)
        for number, met in enumerate(launches.values()):
            yield from _arrows(number, met)

    _write(out, events(), {"ranks": world}, force)
    return counts


def _write(out: str | os.PathLike[str], events: Iterator[Event], about: dict[str, Any], force: bool) -> None:
    with Output(out, force, doing="exporting") as output:
        output.write([b'{"displayTimeUnit":"ns","traceEvents":[\n'])
        between = ""
        while lines := [json.dumps(event, separators=(",", ":")) for event in islice(events, _AT_ONCE)]:
            output.write([(between + ",\n".join(lines)).encode()])
            between = ",\n"
        output.write([f'\n],"otherData":{json.dumps(about)}}}\n'.encode()])


def _of_rank(
    reader: CaptureReader, rank: int, later_ns: int, launches: dict[Any, list[Event]], counts: TimelineCounts
) -> Iterator[Event]:
    """A rank's events in processes of its own, `later_ns` later; its launches of collectives also go to `launches`."""
    timeline = _CaptureTimeline(reader, None)
    timeline.counts = counts
    for event in timeline.events():
        event["pid"] += _FIRST_REPLAYED * rank
        if event["name"] == "process_name":
            event["args"]["name"] = event["args"]["name"].replace("captured", f"rank {rank}", 1)
        if "ts" in event:
            event["ts"] = _microseconds(round(event["ts"] * 1000) + later_ns)
        if event["name"].startswith(f"{LAUNCH}."):
            launches[meeting_of(rank, reader.record(event["args"]["ordinal"]))].append(event)
        yield event


def _arrows(number: int, met: list[Event]) -> Iterator[Event]:
    """A flow through the launches of one collective."""
    ordered = sorted(met, key=lambda event: float(event["ts"]))
    for place, event in enumerate(ordered if len(ordered) > 1 else ()):
        phase = "s" if place == 0 else "f" if place == len(ordered) - 1 else "t"
        flow = {name: event[name] for name in ("pid", "tid", "ts")}
        yield flow | {"ph": phase, "id": number, "cat": "collective", "name": "collective", "bp": "e"}


class _CaptureTimeline:
    def __init__(self, reader: CaptureReader, ordinals: np.ndarray | None) -> None:
        self._reader = reader
        self._ordinals = ordinals
        self.counts = TimelineCounts()
        self._tracks: dict[tuple[int, str], list[tuple[int, int]]] = {}  # by name: tid and end of each lane
        self._next_tid = 1
        self._devices: dict[str, int] = {}
        self._open: dict[int, list[tuple[str, int]]] = {}  # scopes by thread: name and start
        self._is_mark = np.isin(reader.signature_kinds, [int(each) for each in _MARKS])

    def first_ns(self) -> int:
        first = next(op_column_frames(self._reader, self._ordinals), None)
        return 0 if first is None else int(first["start_ns"][0][0])

    def events(self) -> Iterator[Event]:
        """All of them, frame by frame."""
        reader = self._reader
        yield _named("process_name", _HOST, 0, "captured: host")
        yield _named("process_name", _COUNTERS, 0, "captured: memory and power")
        if not reader.session.has_times:
            untold = sum(len(columns["ordinal"]) for columns in op_column_frames(reader, self._ordinals))
            self.counts.left_out["ops: the trace that was imported does not say when they began"] += untold
            return
        last_ns = 0
        ops = op_column_frames(reader, self._ordinals)
        waiting = next(ops, None)
        for memory in LifetimeWalk(reader, StorageEnds(reader).used):
            frame = memory.frame
            end = frame.first_ordinal + frame.count
            while waiting is not None and waiting["ordinal"][0] < end:
                yield from self._ops(frame, waiting)
                waiting = next(ops, None)
            yield from self._marks(frame)
            if self._ordinals is None or self._among(frame):
                for device, alive in memory.bytes.items():
                    for row in np.flatnonzero(np.diff(alive, prepend=alive[0] - 1)).tolist():
                        self.counts.counters += 1
                        name, time_ns = f"bytes alive, {reader.devices[device]}", int(frame.start_ns[row])
                        yield _counter(name, "bytes", time_ns, int(alive[row]))
            last_ns = int(frame.start_ns[-1])
        for thread, scopes in self._open.items():
            while scopes:
                name, start = scopes.pop()
                yield from self._slice(_HOST, f"thread {thread}: scopes", name, start, last_ns, {"ended": False})

    def _among(self, frame: RecordFrame) -> bool:
        assert self._ordinals is not None
        first, last = np.searchsorted(self._ordinals, (frame.first_ordinal, frame.first_ordinal + frame.count))
        return bool(last > first)

    def _ops(self, frame: RecordFrame, columns: dict[str, Any]) -> Iterator[Event]:
        rows = columns["ordinal"] - frame.first_ordinal
        notes = [0] * len(rows) if frame.annotation is None else frame.annotation[rows].tolist()
        starts, _unknown = columns["start_ns"]
        durations, untimed = columns["duration_ns"]
        on_device, not_on_device = columns["device_duration_ns"]
        for place, note in enumerate(notes):
            name = f"{columns['op'][place]}.{columns['overload'][place]}"
            start = int(starts[place])
            about: dict[str, Any] = {
                "ordinal": int(columns["ordinal"][place]),
                "signature": columns["signature"][place],
                "scope": columns["scope"][place],
            }
            if not not_on_device[place]:
                about["device_duration_ns"] = int(on_device[place])
            track = f"thread {columns['thread'][place]}"
            if untimed[place]:
                self.counts.untimed += 1
                yield from self._instant(track, name, "op", start, about)
            else:
                self.counts.ops += 1
                yield from self._slice(_HOST, track, name, start, start + int(durations[place]), about)
            if note:
                yield from self._kernels(self._reader.annotation(note) or {}, about["ordinal"])

    def _kernels(self, annotation: dict[str, Any], ordinal: int) -> Iterator[Event]:
        """What an import has kept of the kernels that ran for a record."""
        listed = annotation.get("device_kernels")
        for each in listed if isinstance(listed, list) else ():
            start, duration = each.get("start_ns"), each.get("duration_ns")
            if not isinstance(start, int) or not isinstance(duration, int) or duration < 0:
                self.counts.left_out["device kernels whose time is not known"] += 1
                continue
            device = str(each.get("device"))
            if device not in self._devices:
                self._devices[device] = _FIRST_DEVICE + len(self._devices)
                yield _named("process_name", self._devices[device], 0, f"captured: {device}")
            about = {"ordinal": ordinal, "grid": each.get("grid"), "block": each.get("block")}
            stream = each.get("stream")
            track = "stream not known" if stream is None else f"stream {stream}"
            self.counts.kernels += 1
            yield from self._slice(self._devices[device], track, str(each.get("name")), start, start + duration, about)

    def _marks(self, frame: RecordFrame) -> Iterator[Event]:
        """Scopes, and what the capture could not record."""
        for row in np.flatnonzero(self._is_mark[frame.signature]).tolist():
            record = self._reader.record(frame.first_ordinal + row)
            scopes = self._open.setdefault(record.thread, [])
            if record.kind is RecordKind.scope_begin:
                scopes.append((str(record.argument("name")), record.start_ns))
            elif record.kind is RecordKind.unsupported:
                what = f"{record.argument('reason')}: {record.argument('op')}"
                yield from self._instant(
                    f"thread {record.thread}", what, "unsupported", record.start_ns, {"ordinal": record.ordinal}
                )
            elif scopes:
                name, start = scopes.pop()
                yield from self._slice(_HOST, f"thread {record.thread}: scopes", name, start, record.start_ns, {})

    def _slice(self, pid: int, track: str, name: str, start: int, end: int, about: dict[str, Any]) -> Iterator[Event]:
        known = self._tracks.setdefault((pid, track), [])
        scopes = track.endswith("scopes")  # they nest as they are
        lane = next((number for number, (_tid, until) in enumerate(known) if until <= start or scopes), len(known))
        if lane == len(known):
            yield self._lane(pid, track + (f", overlapping {lane}" if lane else ""), known)
        known[lane] = (known[lane][0], end)
        yield _event("X", name, pid, known[lane][0], start) | {"dur": _microseconds(end - start), "args": about}

    def _lane(self, pid: int, name: str, known: list[tuple[int, int]]) -> dict[str, Any]:
        """Begin another lane of a track; the event that names it."""
        known.append((self._next_tid, 0))
        self._next_tid += 1
        return _named("thread_name", pid, known[-1][0], name)

    def _instant(self, track: str, name: str, category: str, start: int, about: dict[str, Any]) -> Iterator[Event]:
        known = self._tracks.setdefault((_HOST, track), [])
        if not known:
            yield self._lane(_HOST, track, known)
        yield _event("i", name, _HOST, known[0][0], start) | {"s": "t", "cat": category, "args": about}


def _isolated_events(
    reader: CaptureReader, ordinals: np.ndarray | None, times: IsolatedTimes, origin_ns: int, counts: TimelineCounts
) -> Iterator[Event]:
    """Isolated calls one after the other, from `origin_ns` on."""
    yield _named("process_name", _ISOLATED, 0, "isolated calls, one after the other: not a run")
    every, names = captured_ops(reader), NameTable()
    ops = every if ordinals is None else every.only(ordinals)
    lanes, without = isolated_lanes(ops, np.zeros(len(ops), np.int64), reader, names, times, every)
    if without:
        counts.left_out["ops without an isolated time"] += without
    texts = names.all()
    for tid, lane in enumerate(lanes, start=1):
        yield _named("thread_name", _ISOLATED, tid, lane.label)
        columns = (lane.start, lane.taken, lane.name, lane.ordinal)
        for start, taken, name, ordinal in zip(*(column.tolist() for column in columns), strict=True):
            about = {} if lane.scopes else {"ordinal": ordinal}
            counts.isolated += not lane.scopes
            yield _event("X", texts[name], _ISOLATED, tid, origin_ns + start) | {
                "dur": _microseconds(taken),
                "args": about,
            }


class _Replayed:
    """The events of a replay's trace, moved to the capture's time."""

    def __init__(self, trace: ReplayedTrace, first_pid: int, origin_ns: int) -> None:
        """The first event begins at `origin_ns`; processes are numbered from `first_pid` on."""
        self._trace, self._first_pid = trace, first_pid
        self._later_ns = origin_ns - trace.first_ns
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}

    def events(self, counts: TimelineCounts) -> Iterator[Event]:
        """Those that viewers know, and the names of their processes; the others are counted."""
        for event in self._trace.events():
            moved = self._moved(event)
            if moved is None:
                counts.left_out[_ODD] += 1
                continue
            pid = str(event.get("pid"))
            if pid not in self._pids:
                self._pids[pid] = self._first_pid + len(self._pids)
                name = f"replayed: process {pid}" if pid else "replayed: other events"
                yield _named("process_name", self._pids[pid], 0, name)
            counts.replayed += 1
            yield moved | {"pid": self._pids[pid]}

    def _moved(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The event without its process; None if it has no name, time or numbers that viewers know."""
        phase, pid, tid = event.get("ph"), str(event.get("pid")), event.get("tid")
        time = 0 if phase == "M" else time_of(event)
        known = isinstance(phase, str) and phase in _PHASES
        if not known or time is None or not (phase == "E" or isinstance(event.get("name"), str)):
            return None
        if phase in _WITH_ID and not (isinstance(event.get("id"), int | str) and isinstance(event.get("cat"), str)):
            return None
        if phase == "C" and not _numbers(event.get("args")):
            return None
        moved = {**event, "ts": _microseconds(time + self._later_ns)}
        if not isinstance(tid, int):
            moved["tid"] = self._tids.setdefault((pid, str(tid)), _FIRST_NAMED_TID + len(self._tids))
        if isinstance(event.get("id"), int):  # of flows: those of two replays are not the same
            moved["id"] = event["id"] + (self._first_pid << 32)
        if phase == "M":
            moved.pop("ts")
            arguments = event.get("args")
            if event["name"] == "process_name" and isinstance(arguments, dict):
                moved["args"] = {"name": f"replayed: {arguments.get('name')} {pid}"}
        elif phase == "X":
            lasts = time_of(event, "dur")
            if lasts is None:
                return None
            moved["dur"] = _microseconds(max(0, lasts))
        try:
            json.dumps(moved, allow_nan=False)
        except ValueError:  # JSON has no number for NaN and infinity
            return None
        return moved


def _during(reader: CaptureReader, series: PowerSeries) -> list[tuple[int, int]]:
    """The samples during the capture: their places, and nanoseconds since it began. Raises UsageError if none is."""
    began = reader.session.created_unix_ns
    ended = reader.summary.ended_ns
    if not began or ended is None:
        raise UsageError(f"{reader.path}: does not say when it was made, so that no power can be placed in it")
    times = np.round(series.times_s * 1e9 - began).astype(np.int64)
    places = np.flatnonzero((times >= 0) & (times <= ended)).tolist()
    if not places:
        first, last = series.times_s[0], series.times_s[-1]
        raise UsageError(
            f"the power log has no sample of GPU {series.gpu} during the capture: it has {first:.3f} to {last:.3f} s, "
            f"the capture lasted from {began / 1e9:.3f} to {(began + ended) / 1e9:.3f} s since 1970 (UTC)"
        )
    return [(place, int(times[place])) for place in places]


def _numbers(arguments: Any) -> bool:
    """Whether these are the values of a counter."""
    return isinstance(arguments, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in arguments.values()
    )


def _event(phase: str, name: str, pid: int, tid: int, time_ns: int) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": _microseconds(time_ns)}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _counter(name: str, unit: str, time_ns: int, value: float) -> dict[str, Any]:
    return _event("C", name, _COUNTERS, 0, time_ns) | {"args": {unit: value}}


def _microseconds(nanoseconds: int) -> float:
    """Exact to the nanosecond for 2^53 of them: 104 days."""
    return nanoseconds / 1000
