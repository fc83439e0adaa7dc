"""Clocks: the host's real time, the CPU time of the process (all threads together), and the time of accelerators.

All in nanoseconds. A device's time comes from events on its current stream; nothing here waits for a device during a
replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from replayfmt.pytorch.accelerators import is_accelerator

from .meter import AbsentMeter, Clock, Description, Quantity, no_streams

HOST_TIME = Quantity("host_time", "ns")
CPU_TIME = Quantity("cpu_time", "ns")
DEVICE_TIME = Quantity("device_time", "ns")
# What is told of the clocks of the system; of others nothing is known.
_SOURCES: dict[Callable[[], int], str] = {
    time.perf_counter_ns: "time.perf_counter_ns",
    time.process_time_ns: "time.process_time_ns, user and system time of all threads",
}
_READINGS = 1000
# "The resolution is approximately 0.5 microseconds" (CUDA runtime API, cudaEventElapsedTime).
_EVENT_STEP_NS = {"cuda": 500.0}


class HostTimer:
    """The host's real time and the CPU time of the process."""

    quantities = (HOST_TIME, CPU_TIME)

    def __init__(self, clock: Clock) -> None:
        self._real_clock, self._cpu_clock = clock.real, clock.cpu
        self.reset()

    def describe(self) -> tuple[Description, Description]:
        return _described(HOST_TIME, self._real_clock), _described(CPU_TIME, self._cpu_clock)

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

    quantities = (DEVICE_TIME,)

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
        self._meeting = Meeting(self._devices, self._streams) if several and event is None else None
        self._pairs: list[list[tuple[Any, Any]]] = []  # kept between replays: events cost more to make than to use
        self._used = 0

    def describe(self) -> tuple[Description]:
        steps = {_EVENT_STEP_NS.get(device.type) for device in self._devices}
        known = [step for step in steps if step is not None]
        return (
            Description(
                DEVICE_TIME,
                f"events on the current stream of {', '.join(map(str, self._devices))}"
                + (f", and on {len(self._streams)} more of theirs" if self._streams else ""),
                max(known) if len(known) == len(steps) else None,
                "half a step; waiting of the device for the host between two events counts as its time",
            ),
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

    def read(self) -> tuple[float]:
        milliseconds = 0.0
        for pairs in self._pairs[: self._used]:
            for _, end in pairs:
                end.synchronize()
            milliseconds += max(begin.elapsed_time(end) for begin, end in pairs)
        return (milliseconds * 1e6,)


class Meeting:
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


def _described(quantity: Quantity, clock: Callable[[], int]) -> Description:
    if clock not in _SOURCES:
        return Description(quantity, "a clock that the caller gave", None, "not known")
    step, cost = _step_and_cost(clock)
    return Description(quantity, _SOURCES[clock], step, f"reading it takes {cost:.0f} ns, once in each measured time")


@cache
def _step_and_cost(clock: Callable[[], int]) -> tuple[float, float]:
    """The smallest step of a clock and the time between two readings of it, in nanoseconds.

    Two readings are never less than the cost of one apart, so the step is the smallest difference between such
    distances, not the smallest distance.
    """
    readings = [clock() for _ in range(_READINGS)]
    apart = sorted(after - before for before, after in zip(readings, readings[1:], strict=False))
    distinct = sorted({0, *apart})
    return float(min(b - a for a, b in zip(distinct, distinct[1:], strict=False))), float(apart[len(apart) // 2])


def host_timer(_devices: Sequence[torch.device], clock: Clock) -> HostTimer:
    return HostTimer(clock)


def device_timer(devices: Sequence[torch.device], clock: Clock) -> DeviceTimer | AbsentMeter:
    used = [device for device in devices if is_accelerator(device)]
    if not used:
        return AbsentMeter((DEVICE_TIME,), "the replay uses no accelerator")
    return DeviceTimer(used, streams=clock.streams)


# In starting order; they stop in reverse order. The host's time includes the cost of recording the events, as it does
# all other issuing of work.
CLOCKS = (host_timer, device_timer)
