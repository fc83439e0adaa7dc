"""Meters that run together: during a whole replay, or during its passes through some scopes.

A stopwatch is started and stopped inside a replay, any number of times, and read after it. If accelerators participate,
the real time is theirs, and the host's time (for issuing the work) is reported beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replayfmt.errors import ReplayFailed

from ..scopes import MeasuredRegion
from .clocks import CLOCKS, CPU_TIME, DEVICE_TIME, HOST_TIME, DeviceTimer
from .meter import AbsentMeter, Clock, MakeMeter, Meter, NotMeasured, Quantity, Reading


@dataclass(frozen=True)
class Readings:
    """One reading of a stopwatch: times in nanoseconds, and the readings of the other meters.

    `host_ns` is None if `real_ns` is itself the host's.
    """

    real_ns: float
    cpu_ns: float
    host_ns: float | None = None
    further: Mapping[Quantity, Reading] = field(default_factory=dict)

    def per(self, calls: int) -> Readings:
        """The readings of one call, if these are of `calls` calls."""
        return Readings(
            self.real_ns / calls,
            self.cpu_ns / calls,
            None if self.host_ns is None else self.host_ns / calls,
            {
                quantity: reading if isinstance(reading, NotMeasured) else reading / calls
                for quantity, reading in self.further.items()
            },
        )


class Stopwatch:
    """Starts and stops meters together. The host's clocks must be among them.

    `start` and `stop` may be called any number of times between two resets.
    """

    start: Callable[[], None]
    stop: Callable[[], None]

    def __init__(self, meters: Iterable[Meter | AbsentMeter]) -> None:
        """`meters` in starting order; they stop in reverse order."""
        self._listed = tuple(meters)
        self._meters = tuple(meter for meter in self._listed if not isinstance(meter, AbsentMeter))
        self.start, self.stop = _together(self._meters)

    def reset(self) -> None:
        """Forget everything measured so far."""
        for meter in self._meters:
            meter.reset()

    def describe(self) -> list[dict[str, Any]]:
        """Every meter for reports: unit, source, resolution and error, or why it does not measure."""
        rows: list[dict[str, Any]] = []
        for meter in self._listed:
            if isinstance(meter, AbsentMeter):
                rows += [
                    {"name": quantity.name, "unit": quantity.unit, "not_measured": meter.reason}
                    for quantity in meter.quantities
                ]
            else:
                rows += [described.row() for described in meter.describe()]
        return rows

    def step_ns(self) -> float | None:
        """The smallest step of the clock that `Readings.real_ns` is from; None if it is not known."""
        steps = {each.quantity: each.resolution for meter in self._meters for each in meter.describe()}
        return steps.get(DEVICE_TIME, steps.get(HOST_TIME))

    def began(self) -> bool:
        """Whether a device has come to the last start by now (`DeviceTimer.began`)."""
        return any(meter.began() for meter in self._meters if isinstance(meter, DeviceTimer))

    def read(self) -> Readings:
        """What has been measured since `reset`. Devices must have finished their work."""
        readings: dict[Quantity, Reading] = {}
        for meter in self._listed:
            if isinstance(meter, AbsentMeter):
                readings |= dict.fromkeys(meter.quantities, NotMeasured(meter.reason))
            else:
                readings |= zip(meter.quantities, meter.read(), strict=True)
        host, cpu, device = (readings.pop(quantity, None) for quantity in (HOST_TIME, CPU_TIME, DEVICE_TIME))
        assert isinstance(host, (int, float)) and isinstance(cpu, (int, float)), "the host's clocks always measure"
        if device is None or isinstance(device, NotMeasured):
            return Readings(host, cpu, None, readings)
        return Readings(device, cpu, host, readings)


def _together(meters: Sequence[Meter]) -> tuple[Callable[[], None], Callable[[], None]]:
    """The functions that start and stop all meters. Nothing comes between the innermost meter and the work: the
    functions of a single meter are returned directly."""
    *outer, innermost = meters
    start_innermost, stop_innermost = innermost.start, innermost.stop
    if not outer:
        return start_innermost, stop_innermost
    starts, stops = [meter.start for meter in outer], [meter.stop for meter in reversed(outer)]

    def start() -> None:
        for start_outer in starts:
            start_outer()
        start_innermost()

    def stop() -> None:
        stop_innermost()
        for stop_outer in stops:
            stop_outer()

    return start, stop


def stopwatch_for(
    devices: Sequence[torch.device], clock: Clock | None = None, meters: Sequence[MakeMeter] = CLOCKS
) -> Stopwatch:
    """A stopwatch with the meters that fit the devices a plan uses."""
    return Stopwatch([make(devices, clock or Clock()) for make in meters])


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
            raise ReplayFailed(f"--replay-scope={self.region.name}: the scope did not end while being replayed")
        if self._passes != self.region.passes:
            raise ReplayFailed(
                f"--replay-scope={self.region.name}: the replay passed through it {self._passes} times, "
                f"the capture {self.region.passes} times"
            )
        return self.stopwatch.read()


class ReplayTimer:
    """A replay's `timer`: runs a stopwatch for the whole replay; the scopes' stopwatches pause together with it.

    The replay pauses it around anything that is not captured work (content imported on the way), and may end paused.
    """

    def __init__(
        self, stopwatch: Stopwatch, watches: Sequence[ScopeWatch] = (), prepare: Callable[[], None] | None = None
    ) -> None:
        """`prepare` is called, untimed, when a replay has restored its state and is about to begin."""
        self._prepare = prepare
        self.stopwatch = stopwatch
        self._watches = tuple(watches)
        self._running = False

    def begin_replay(self) -> None:
        """Reset the previous replay's time."""
        self.stopwatch.reset()
        for watch in self._watches:
            watch.begin_replay()
        self._running = False

    def start(self) -> None:
        if self._prepare is not None:
            self._prepare()
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
