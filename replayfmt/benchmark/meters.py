"""The clocks of a benchmark, the stopwatch that runs them together, and the scopes that they measure.

The clocks are the host's real time, the CPU time of the process, and the time of accelerators, from events on their
streams; all in nanoseconds. If accelerators take part, the real time is theirs, and the host's time for issuing the
work is reported beside it.

A stopwatch runs during a whole replay, or during its passes through the scopes of a name or full path (`find_regions`).
Passes add up; a matching scope inside a matching scope belongs to the outermost one. Nothing waits for a device during
a replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from replayfmt.errors import ReplayFailed, ReplayRefused, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.format.validation import some_of
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.pytorch.device_work import time_left

_CLOSEST = 12  # at most this many of the capture's scopes are listed in an error


@dataclass(frozen=True)
class MeasuredRegion:
    """A part of a capture that is measured. `name` is None for the whole capture.

    `captured_ns` is its duration during capture, including the recorder's own work; None if unknown, and
    `captured_reason` says why.
    """

    name: str | None
    paths: frozenset[str]
    passes: int
    ops: int
    captured_ns: int | None
    captured_reason: str = ""

    @property
    def row(self) -> str:
        """The name of its row in a report."""
        return "BM_replay" if self.name is None else f"BM_replay/scope:{self.name}"


def whole_capture(reader: CaptureReader) -> MeasuredRegion:
    """The region that covers the whole capture. Reads the first and the last frame of records."""
    ops = reader.summary.records.get(RecordKind.op, 0)
    if not reader.record_count:
        return MeasuredRegion(None, frozenset(), 1, ops, None, "the capture has no records")
    first = int(reader.frame(0).start_ns[0])
    last = reader.frame(len(reader.record_frames) - 1)
    end = int(last.start_ns[-1])
    if last.duration_ns is not None:
        end += max(0, int(last.duration_ns[-1]))  # one of unknown duration ends no earlier than it began
    captured, reason = _measured(first, end)
    return MeasuredRegion(None, frozenset(), 1, ops, captured, reason)


def find_regions(reader: CaptureReader, names: tuple[str, ...]) -> list[MeasuredRegion]:
    """One region for each of `names`, in one pass over the records.

    Raises UsageError if no scope of the capture matches a name, and ReplayRefused, with path and ordinal, if a
    matching scope ends before it begins or never ends (a capture may be cut anywhere and still be valid).
    """
    walks = [_ScopeWalk(reader, name) for name in names]
    kinds = reader.signature_kinds
    for index in range(len(reader.record_frames)):
        frame = reader.frame(index)
        kind = kinds[frame.signature]
        ops_before = np.cumsum(kind == RecordKind.op)
        for position in np.flatnonzero((kind == RecordKind.scope_begin) | (kind == RecordKind.scope_end)):
            scope, begins = int(frame.scope[position]), bool(kind[position] == RecordKind.scope_begin)
            for walk in walks:
                if scope in walk.open:
                    walk.step(
                        scope,
                        begins,
                        frame.first_ordinal + int(position),
                        int(frame.start_ns[position]),
                        int(ops_before[position]),
                    )
        for walk in walks:
            walk.ops_before_frame += int(ops_before[-1]) if len(ops_before) else 0
    return [walk.region() for walk in walks]


def matching_scopes(reader: CaptureReader, name: str) -> dict[int, str]:
    """The scopes that --scope=NAME selects, by id, with their full paths. Raises UsageError if there are
    none."""
    paths = {scope: reader.scope_path(scope) for scope in range(1, len(reader.scopes))}
    matching = {scope: path for scope, path in paths.items() if name in (path, reader.scopes[scope].name)}
    if not matching:
        shown = some_of(dict.fromkeys(paths.values()), _CLOSEST, repr)
        raise UsageError(
            f"--scope={name}: {reader.path} has no scope of that name or path; it has {shown or 'no scopes at all'}"
        )
    return matching


def entered_scopes(reader: CaptureReader) -> tuple[str, ...]:
    """The full paths of the scopes that hold records, in the order of their definitions."""
    entered: set[int] = set()
    for index in range(len(reader.record_frames)):
        entered.update(np.unique(reader.frame(index).scope).tolist())
    return tuple(dict.fromkeys(reader.scope_path(scope) for scope in sorted(entered - {0})))


def scopes_inside(reader: CaptureReader, names: tuple[str, ...]) -> set[int]:
    """The ids of the scopes that any of `names` selects, and of all scopes inside them. Raises UsageError for a name
    that selects none."""
    inside = {scope for name in names for scope in matching_scopes(reader, name)}
    for scope in range(1, len(reader.scopes)):  # a scope's parent is defined before it
        if reader.scopes[scope].parent in inside:
            inside.add(scope)
    return inside


def _measured(begin_ns: int, end_ns: int) -> tuple[int | None, str]:
    """The time between two moments of a capture; None and the reason if the capture's clock stood still."""
    if end_ns > begin_ns:
        return end_ns - begin_ns, ""
    return None, "the capture holds no times for it"


class _ScopeWalk:
    """Follows the scopes that match one name through the records, in order."""

    def __init__(self, reader: CaptureReader, name: str) -> None:
        self._reader = reader
        self._name = name
        matching = matching_scopes(reader, name)
        self.open = dict.fromkeys(matching, 0)  # scope id → how many of it are open
        self._paths = frozenset(matching.values())
        self._depth = 0
        self._outermost = 0  # ordinal at which the outermost open one began
        self._begin_ns = self._captured_ns = 0
        self._begin_op = self._ops = self._passes = 0
        self.ops_before_frame = 0

    def step(self, scope: int, begins: bool, ordinal: int, start_ns: int, ops_in_frame: int) -> None:
        op = self.ops_before_frame + ops_in_frame
        if begins:
            if not self._depth:
                self._outermost, self._begin_ns, self._begin_op = ordinal, start_ns, op
            self.open[scope] += 1
            self._depth += 1
            return
        if not self.open[scope]:
            raise ReplayRefused(
                f"{self._reader.path}: ordinal {ordinal}: scope {self._reader.scope_path(scope)!r} "
                "ends before it begins; it cannot be measured, choose another with --scope"
            )
        self.open[scope] -= 1
        self._depth -= 1
        if not self._depth:
            self._passes += 1
            self._captured_ns += max(0, start_ns - self._begin_ns)
            self._ops += op - self._begin_op

    def region(self) -> MeasuredRegion:
        for scope, count in self.open.items():
            if count:
                raise ReplayRefused(
                    f"{self._reader.path}: scope {self._reader.scope_path(scope)!r} begins at ordinal "
                    f"{self._outermost} or later and does not end; it cannot be measured, choose "
                    "another with --scope"
                )
        if not self._passes:
            raise UsageError(f"--scope={self._name}: {self._reader.path} defines that scope and never enters it")
        captured, reason = _measured(0, self._captured_ns)
        return MeasuredRegion(self._name, self._paths, self._passes, self._ops, captured, reason)


def no_streams(_device: torch.device) -> list[torch.Stream]:
    """The further streams of a device that works on its current one alone."""
    return []


@dataclass(frozen=True)
class Clock:
    """What a stopwatch reads: the host's clocks, two functions that return nanoseconds, and the streams that a device
    works on besides its current one."""

    real: Callable[[], int] = time.perf_counter_ns
    cpu: Callable[[], int] = time.process_time_ns
    streams: Callable[[torch.device], list[torch.Stream]] = no_streams


# What is told of the clocks of the system; of others nothing is known.
_SOURCES: dict[Callable[[], int], str] = {
    time.perf_counter_ns: "time.perf_counter_ns",
    time.process_time_ns: "time.process_time_ns, user and system time of all threads",
}
_READINGS, _MOST_READINGS = 1000, 200_000
# "The resolution is approximately 0.5 microseconds" (CUDA runtime API, cudaEventElapsedTime).
_EVENT_STEP_NS = {"cuda": 500.0}


class HostTimer:
    """The host's real time and the CPU time of the process."""

    def __init__(self, clock: Clock) -> None:
        self._real_clock, self._cpu_clock = clock.real, clock.cpu
        self.reset()

    def describe(self) -> list[dict[str, Any]]:
        return [_clock_row("host_time", self._real_clock), _clock_row("cpu_time", self._cpu_clock)]

    def reset(self) -> None:
        self._real = self._cpu = self._real_start = self._cpu_start = 0

    def start(self) -> None:
        self._cpu_start = self._cpu_clock()
        self._real_start = self._real_clock()  # last in, first out: the CPU clock's own cost stays outside

    def stop(self) -> None:
        now = self._real_clock()
        self._cpu += self._cpu_clock() - self._cpu_start
        self._real += now - self._real_start

    def read(self) -> tuple[float, float]:
        return self._real, self._cpu


class DeviceTimer:
    """The accelerators' time. With several devices, or streams of one, each time is the longest of theirs: they work in
    parallel, and begin when all of them have done what came before."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        event: Callable[[torch.device], Any] | None = None,
        streams: Callable[[torch.device], list[torch.Stream]] = no_streams,
    ) -> None:
        """`streams`: those of a device that are timed besides its current one."""
        self._devices = list(devices)
        self._make = event or DeviceEvent
        self._streams = [stream for device in self._devices for stream in streams(device)]
        several = len(self._devices) + len(self._streams) > 1
        self._meeting = StreamBarrier(self._devices, self._streams) if several and event is None else None
        self._pairs: list[list[tuple[Any, Any]]] = []  # kept between replays: events cost more to make than to use
        self._used = 0

    def describe(self) -> dict[str, Any]:
        steps = {_EVENT_STEP_NS.get(device.type) for device in self._devices}
        known = [step for step in steps if step is not None]
        more = f", and on {len(self._streams)} more of theirs" if self._streams else ""
        return _clock(
            "device_time",
            f"events on the current stream of {', '.join(map(str, self._devices))}{more}",
            max(known) if len(known) == len(steps) else None,
            "half a step; waiting of the device for the host between two events counts as its time",
        )

    def reset(self) -> None:
        self._used = 0

    def start(self) -> None:
        if self._used == len(self._pairs):
            pairs = [(self._make(device), self._make(device)) for device in self._devices]
            pairs += [(DeviceEvent(each.device, each), DeviceEvent(each.device, each)) for each in self._streams]
            self._pairs.append(pairs)
        if self._meeting is not None:
            self._meeting.hold()
        for begin, _ in self._pairs[self._used]:
            begin.record()

    def stop(self) -> None:
        for _, end in self._pairs[self._used]:
            end.record()
        self._used += 1

    def began(self) -> bool:
        """Whether a device has come to the last start. Asked right after `stop`: what lies between was not all issued
        before."""
        return any(begin.query() for begin, _ in self._pairs[self._used - 1])

    def time_left(self) -> int:
        """For how long the devices work on, on streams that have no events, when those with events are done."""
        for _, end in self._pairs[self._used - 1]:
            end.synchronize()
        return time_left(self._devices)

    def read(self) -> float:
        milliseconds = 0.0
        for pairs in self._pairs[: self._used]:
            for _, end in pairs:
                end.synchronize()
            milliseconds += max(begin.elapsed_time(end) for begin, end in pairs)
        return milliseconds * 1e6


class StreamBarrier:
    """Where the current streams of some devices, and more streams of theirs, wait for each other. A stream that has
    nothing to do would otherwise begin its time while others still do what came before."""

    def __init__(self, devices: Sequence[torch.device], streams: Sequence[torch.Stream]) -> None:
        self._devices = list(devices)
        self._streams = list(streams)
        self._arrived = [torch.Event(each) for each in (*devices, *(stream.device for stream in streams))]

    def hold(self) -> None:
        """Nobody waits here but the streams."""
        streams = [*map(torch.accelerator.current_stream, self._devices), *self._streams]
        for event, stream in zip(self._arrived, streams, strict=True):
            event.record(stream)
        for stream in streams:
            for event, other in zip(self._arrived, streams, strict=True):
                if other is not stream:
                    stream.wait_event(event)


class DeviceEvent:
    """An event that records on a stream, or on its device's current one, whichever device is current."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._device, self._stream = device, stream
        self._event = torch.Event(device, enable_timing=True)

    def record(self) -> None:
        self._event.record(self._stream or torch.accelerator.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: DeviceEvent) -> float:
        return float(self._event.elapsed_time(end._event))


def _clock(name: str, source: str, resolution: float | None, error: str) -> dict[str, Any]:
    """What a report says of a clock: where its times come from, the smallest difference that they can show (None: not
    known), and what else may be wrong with them."""
    row = {"name": name, "unit": "ns", "source": source, "resolution": resolution, "error": error}
    return row if resolution is not None else row | {"resolution_reason": "the source does not say"}


def _clock_row(name: str, clock: Callable[[], int]) -> dict[str, Any]:
    if clock not in _SOURCES:
        return _clock(name, "a clock that the caller gave", None, "not known")
    step, cost = _step_and_cost(clock)
    return _clock(name, _SOURCES[clock], step, f"reading it takes {cost:.0f} ns, once in each measured time")


@cache
def _step_and_cost(clock: Callable[[], int]) -> tuple[float | None, float]:
    """The smallest step of a clock (None: it stands still) and the time between two readings of it, in nanoseconds.

    Two readings are never less than the cost of one apart, so the step is the smallest difference between such
    distances, not the smallest distance. Under a limit of CPU time (`ulimit -t`), Linux's clock of it moves some times
    in a hundredth of a second only: it is read until it has.
    """
    readings = [clock() for _ in range(_READINGS)]
    while readings[-1] == readings[0] and len(readings) < _MOST_READINGS:
        readings.append(clock())
    apart = sorted(after - before for before, after in zip(readings, readings[1:], strict=False))
    distinct = sorted({0, *apart})
    step = min((b - a for a, b in zip(distinct, distinct[1:], strict=False)), default=None)
    mean = (readings[-1] - readings[0]) / len(apart)
    return None if step is None else float(step), float(apart[len(apart) // 2]) or mean


@dataclass(frozen=True)
class Readings:
    """One reading of a stopwatch, in nanoseconds. `host_ns` is None if `real_ns` is itself the host's."""

    real_ns: float
    cpu_ns: float
    host_ns: float | None = None

    def per(self, calls: int) -> Readings:
        """The readings of one call, if these are of `calls` calls."""
        host_ns = None if self.host_ns is None else self.host_ns / calls
        return Readings(self.real_ns / calls, self.cpu_ns / calls, host_ns)


class Stopwatch:
    """Starts and stops the clocks together, any number of times between two resets. The host's time includes the cost
    of recording the device's events, as it does all other issuing of work."""

    start: Callable[[], None]
    stop: Callable[[], None]

    def __init__(self, host: HostTimer, device: DeviceTimer | None = None) -> None:
        self._host, self._device = host, device
        # Nothing comes between the clock and the work where there is only one.
        self.start, self.stop = (host.start, host.stop) if device is None else (self._start, self._stop)

    def _start(self) -> None:
        assert self._device is not None
        self._host.start()
        self._device.start()

    def _stop(self) -> None:
        assert self._device is not None
        self._device.stop()
        self._host.stop()

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._host.reset()
        if self._device is not None:
            self._device.reset()

    def describe(self) -> list[dict[str, Any]]:
        """Every clock for reports: unit, source, resolution and error, or why it does not measure."""
        if self._device is None:
            absent = {"name": "device_time", "unit": "ns", "not_measured": "the replay uses no accelerator"}
            return [*self._host.describe(), absent]
        return [*self._host.describe(), self._device.describe()]

    def step_ns(self) -> float | None:
        """The smallest step of the clock that `Readings.real_ns` is from; None if it is not known."""
        row = self._host.describe()[0] if self._device is None else self._device.describe()
        step: float | None = row["resolution"]
        return step

    def began(self) -> bool:
        """Whether a device has come to the last start by now (`DeviceTimer.began`)."""
        return self._device is not None and self._device.began()

    def time_left(self) -> int:
        """Waits for what was begun before the last stop; see `DeviceTimer.time_left`."""
        return 0 if self._device is None else self._device.time_left()

    def read(self) -> Readings:
        """What has been measured since `reset`. Devices must have finished their work."""
        real, cpu = self._host.read()
        return Readings(real, cpu) if self._device is None else Readings(self._device.read(), cpu, real)


def stopwatch_for(devices: Sequence[torch.device], clock: Clock | None = None) -> Stopwatch:
    """A stopwatch with the clocks that fit the devices a plan uses."""
    clock = clock or Clock()
    used = [device for device in devices if is_accelerator(device)]
    return Stopwatch(HostTimer(clock), DeviceTimer(used, streams=clock.streams) if used else None)


class ScopeWatch:
    """Runs a stopwatch during a region's scopes (of nested ones, only the outermost): a replay's `on_scope`."""

    def __init__(self, region: MeasuredRegion, stopwatch: Stopwatch) -> None:
        self.region = region
        self.stopwatch = stopwatch
        self._paths = region.paths
        self.begin_replay()

    def begin_replay(self) -> None:
        """Reset the previous replay's time."""
        self._depth = self._passes = 0
        self.stopwatch.reset()

    def __call__(self, event: str, _name: str, path: str, ordinal: int) -> None:
        if path not in self._paths:
            return
        if event == "begin":
            if not self._depth:
                self.stopwatch.start()
            self._depth += 1
            return
        if not self._depth:
            raise ReplayFailed(f"ordinal {ordinal}: scope {path!r} ended before it began while being replayed")
        self._depth -= 1
        if not self._depth:
            self.stopwatch.stop()
            self._passes += 1

    def pause(self) -> None:
        """Stop counting, inside or outside the scopes, until `resume`."""
        if self._depth:
            self.stopwatch.stop()

    def resume(self) -> None:
        if self._depth:
            self.stopwatch.start()

    def end_replay(self) -> Readings:
        """The time in the scopes in the replay just ended. Raises ReplayFailed if they did not run as captured."""
        if self._depth:
            raise ReplayFailed(f"--scope={self.region.name}: the scope did not end while being replayed")
        if self._passes != self.region.passes:
            raise ReplayFailed(
                f"--scope={self.region.name}: the replay passed through it {self._passes} times, "
                f"the capture {self.region.passes} times"
            )
        return self.stopwatch.read()


class ReplayTimer:
    """A replay's `timer`: runs a stopwatch for the whole replay; the scopes' stopwatches pause together with it.

    The replay pauses it around anything that is not captured work (content imported on the way), and may end paused.
    """

    def __init__(
        self, stopwatch: Stopwatch, watches: Sequence[ScopeWatch] = (), prepare: Sequence[Callable[[], None]] = ()
    ) -> None:
        """`prepare` are called, untimed, when a replay has restored its state and is about to begin."""
        self._prepare = prepare
        self.stopwatch = stopwatch
        self._watches = tuple(watches)
        self._running, self._left_ns = False, 0

    def begin_replay(self) -> None:
        """Reset the previous replay's time."""
        self.stopwatch.reset()
        for watch in self._watches:
            watch.begin_replay()
        self._running, self._left_ns = False, 0

    def start(self) -> None:
        for prepare in self._prepare:
            prepare()
        self._running = True
        self.stopwatch.start()

    def pause(self) -> None:
        for watch in self._watches:
            watch.pause()
        self._stop()

    def resume(self) -> None:
        self._running = True
        self.stopwatch.start()
        for watch in self._watches:
            watch.resume()

    def stop(self) -> None:
        if self._running:
            self._stop()

    def _stop(self) -> None:
        self.stopwatch.stop()
        self._running = False
        self._left_ns += self.stopwatch.time_left()

    def read(self) -> Readings:
        """What has been measured since `begin_replay`, with what was done on streams that only a replacement uses."""
        found = self.stopwatch.read()
        return replace(found, real_ns=found.real_ns + self._left_ns)
