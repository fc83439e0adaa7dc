"""Clocks, and what adds up the time between them: a whole replay, or its passes through some scopes.

A stopwatch is started and stopped inside a replay, any number of times, and read after it. On the host it takes real
time (a monotonic clock) and the CPU time of the process, all threads together. Where CUDA devices take part it also
records an event on every device's current stream at both ends; the real time is then the device's, and the host's is
given beside it: how long issuing the work took. Nothing here waits for a device while a replay runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayfmt.errors import ReplayFailed

from ..scopes import MeasuredRegion


@dataclass(frozen=True)
class Clock:
    """Where a stopwatch gets the time: two functions that return nanoseconds."""

    real: Callable[[], int] = time.perf_counter_ns
    cpu: Callable[[], int] = time.process_time_ns


@dataclass(frozen=True)
class Times:
    """One reading, in nanoseconds. `host_ns` is None where `real_ns` is itself the host's."""

    real_ns: float
    cpu_ns: int
    host_ns: int | None = None


class Stopwatch:
    """Adds up real and CPU time between `start` and `stop` on the host."""

    def __init__(self, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        self._real_clock, self._cpu_clock = clock.real, clock.cpu
        self.reset()

    def reset(self) -> None:
        """Forget everything measured so far."""
        self._real = self._cpu = self._real_start = self._cpu_start = 0

    def start(self) -> None:
        self._cpu_start = self._cpu_clock()
        self._real_start = self._real_clock()  # last in, first out: the CPU clock's own cost stays outside

    def stop(self) -> None:
        now = self._real_clock()
        self._cpu += self._cpu_clock() - self._cpu_start
        self._real += now - self._real_start

    def read(self) -> Times:
        """What has been measured since `reset`. Devices must have been waited for."""
        return Times(self._real, self._cpu)


class DeviceStopwatch(Stopwatch):
    """A stopwatch whose real time is that of the CUDA devices, from events on their current streams.

    With several devices it is the longest of them: they work side by side.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        clock: Clock | None = None,
        event: Callable[[torch.device], Any] | None = None,
    ) -> None:
        self._devices = list(devices)
        self._make = event or CudaEvent
        self._pairs: list[list[tuple[Any, Any]]] = []  # kept between replays: events cost more to make than to use
        self._used = 0
        super().__init__(clock)

    def reset(self) -> None:
        super().reset()
        self._used = 0

    def start(self) -> None:
        super().start()
        if self._used == len(self._pairs):
            self._pairs.append([(self._make(device), self._make(device)) for device in self._devices])
        for begin, _ in self._pairs[self._used]:
            begin.record()

    def stop(self) -> None:
        for _, end in self._pairs[self._used]:
            end.record()
        self._used += 1
        super().stop()

    def read(self) -> Times:
        host = super().read()
        milliseconds = [0.0] * len(self._devices)
        for pair in self._pairs[: self._used]:
            for index, (begin, end) in enumerate(pair):
                end.synchronize()
                milliseconds[index] += begin.elapsed_time(end)
        return Times(max(milliseconds) * 1e6, host.cpu_ns, int(host.real_ns))


class CudaEvent:
    """An event that records on its device's current stream, whichever device is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: CudaEvent) -> float:
        return float(self._event.elapsed_time(end._event))


def stopwatch_for(devices: Sequence[torch.device], clock: Clock | None = None) -> Stopwatch:
    """The stopwatch that fits the devices a plan uses."""
    cuda = [device for device in devices if device.type == "cuda"]
    return DeviceStopwatch(cuda, clock) if cuda else Stopwatch(clock)


class ScopeWatch:
    """Runs a stopwatch during a region's scopes, the outermost of nested ones only: a replay's `on_scope`."""

    def __init__(self, region: MeasuredRegion, stopwatch: Stopwatch) -> None:
        self.region = region
        self.stopwatch = stopwatch
        self._paths = region.paths
        self.begin_replay()

    def begin_replay(self) -> None:
        """Forget the replay before."""
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

    def end_replay(self) -> Times:
        """What the scopes took in the replay just ended. Raises ReplayFailed where they did not run as captured."""
        if self._depth:
            raise ReplayFailed(f"--replay-scope={self.region.name}: the scope did not end while being replayed")
        if self._passes != self.region.passes:
            raise ReplayFailed(
                f"--replay-scope={self.region.name}: the replay passed through it {self._passes} times, "
                f"the capture {self.region.passes} times"
            )
        return self.stopwatch.read()


class ReplayTimer:
    """A replay's `timer`: runs a stopwatch for the whole of it, and lets those of its scopes pause with it.

    The replay pauses it around what is no work of the capture (content that enters on the way), and may end paused.
    """

    def __init__(self, stopwatch: Stopwatch, watches: Sequence[ScopeWatch] = ()) -> None:
        self.stopwatch = stopwatch
        self._watches = tuple(watches)
        self._running = False

    def begin_replay(self) -> None:
        """Forget the replay before."""
        self.stopwatch.reset()
        for watch in self._watches:
            watch.begin_replay()
        self._running = False

    def start(self) -> None:
        self._running = True
        self.stopwatch.start()

    def pause(self) -> None:
        for watch in self._watches:
            watch.pause()
        self.stopwatch.stop()
        self._running = False

    def resume(self) -> None:
        self._running = True
        self.stopwatch.start()
        for watch in self._watches:
            watch.resume()

    def stop(self) -> None:
        if self._running:
            self.stopwatch.stop()
            self._running = False
