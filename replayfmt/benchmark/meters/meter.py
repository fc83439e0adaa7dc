"""What a meter is: something that measures a replay, or a part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch


@dataclass(frozen=True)
class Quantity:
    """What a meter measures. `name` is its field in reports, such as `cpu_time`; `unit` is the unit of its readings."""

    name: str
    unit: str

    @property
    def title(self) -> str:
        """The column header."""
        return f"{self.name.replace('_', ' ').capitalize()} ({self.unit})"


@dataclass(frozen=True)
class NotMeasured:
    """Replaces a reading: why there is none. Not zero."""

    reason: str


@dataclass(frozen=True)
class Description:
    """What a reading of a quantity is worth: where it comes from (`source`), the smallest difference that it can show
    (`resolution`, in the quantity's unit; None if that is not known), and what else may be wrong with it (`error`)."""

    quantity: Quantity
    source: str
    resolution: float | None
    error: str

    def row(self) -> dict[str, Any]:
        """For a report's list of meters."""
        found = {
            "name": self.quantity.name,
            "unit": self.quantity.unit,
            "source": self.source,
            "resolution": self.resolution,
            "error": self.error,
        }
        return found if self.resolution is not None else found | {"resolution_reason": "the source does not say"}


# A number in the quantity's unit.
Reading: TypeAlias = "float | NotMeasured"


class Meter(Protocol):
    """Adds up what it measures between `start` and `stop`, which may be called any number of times between two resets.

    `start` and `stop` run inside a replay, around timed work: they neither wait for a device nor allocate more than
    they must. `read` is called after the replay, once devices have finished their work.
    """

    @property
    def quantities(self) -> tuple[Quantity, ...]: ...

    def describe(self) -> tuple[Description, ...]:
        """What the readings are worth, in the order of `quantities`."""

    def reset(self) -> None:
        """Forget everything measured so far."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def read(self) -> tuple[Reading, ...]:
        """What has been measured since `reset`, in the order of `quantities`."""


@dataclass(frozen=True)
class AbsentMeter:
    """Replaces a meter that cannot measure here."""

    quantities: tuple[Quantity, ...]
    reason: str


def no_streams(_device: torch.device) -> list[torch.Stream]:
    """The further streams of a device that works on its current one alone."""
    return []


@dataclass(frozen=True)
class Clock:
    """What meters read: the host's clocks, two functions that return nanoseconds, and the streams that a device works
    on besides its current one."""

    real: Callable[[], int] = time.perf_counter_ns
    cpu: Callable[[], int] = time.process_time_ns
    streams: Callable[[torch.device], list[torch.Stream]] = no_streams


# Makes a meter for the devices that a plan uses, or says why there is none.
MakeMeter = Callable[[Sequence[torch.device], Clock], "Meter | AbsentMeter"]
