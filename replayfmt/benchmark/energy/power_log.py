"""Power over time, as a log holds it: each GPU is a series of its own, in the order of time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Series:
    """The power of one GPU: seconds since 1970 (UTC), in order and all different, and watts. `resolution_w` is the
    smallest step in what was read (`resolution_of`), `time_error_s` how far a sample may be from its time."""

    times_s: np.ndarray
    watts: np.ndarray
    resolution_w: float
    time_error_s: float = 0.0

    @property
    def interval_s(self) -> float | None:
        """The usual distance between two samples; None if there is only one."""
        return _interval_s(self.times_s)

    def shifted(self, seconds: float) -> Series:
        return replace(self, times_s=self.times_s + seconds)


@dataclass(frozen=True)
class CounterSeries:
    """The energy counter of one GPU: seconds since 1970 (UTC), in order, and joules."""

    times_s: np.ndarray
    joules: np.ndarray

    def shifted(self, seconds: float) -> CounterSeries:
        return CounterSeries(self.times_s + seconds, self.joules)


@dataclass(frozen=True)
class PowerLog:
    """A log by GPU: of those in `counters` the energy counter, of those in `series` the power.

    `left_out` counts the rows without a value by reason, `out_of_order` those that were before the row above them,
    `same_time` those with the time of another row of their GPU, which are one sample together: their mean. `zone` is
    what times without one were taken for, "" if all had one. `column` is the name of that with the power, `others` are
    columns with power that are not used. `whole_seconds`: its times are, and each was taken for the middle of
    its second.
    """

    path: str
    series: dict[str, Series]
    rows: int
    left_out: dict[str, int]
    out_of_order: int
    zone: str
    counters: dict[str, CounterSeries] = field(default_factory=dict)
    same_time: int = 0
    column: str = ""
    others: tuple[str, ...] = ()
    whole_seconds: bool = False

    @property
    def gpus(self) -> list[str]:
        return list(dict.fromkeys((*self.series, *self.counters)))

    @property
    def begins_s(self) -> float:
        return max(float(times[0]) for times in self._times())

    @property
    def ends_s(self) -> float:
        return min(float(times[-1]) for times in self._times())

    @property
    def interval_s(self) -> float | None:
        """The usual distance between two samples, of the GPU with the longest; None if one has a single sample."""
        found = [_interval_s(times) for times in self._times()]
        return None if None in found else max(each for each in found if each is not None)

    @property
    def resolution_w(self) -> float | None:
        """The smallest difference between two values of power; None if there is no power in the log."""
        return max((each.resolution_w for each in self.series.values()), default=None)

    def power_alone(self) -> PowerLog | None:
        """The log without counters, to integrate the power of GPUs that have both; None if one has only a counter, or
        none has one."""
        if not self.counters or not self.counters.keys() <= self.series.keys():
            return None
        return replace(self, counters={})

    def _times(self) -> list[np.ndarray]:
        powers, counters = self.series.values(), self.counters.values()
        return [*(each.times_s for each in powers), *(each.times_s for each in counters)]

    def shifted(self, seconds: float) -> PowerLog:
        """The log of a clock that was `seconds` behind."""
        series = {gpu: each.shifted(seconds) for gpu, each in self.series.items()}
        counters = {gpu: each.shifted(seconds) for gpu, each in self.counters.items()}
        return replace(self, series=series, counters=counters)


def resolution_of(readings: np.ndarray, written_w: float = 0.0) -> float:
    """The smallest difference between two readings in a log, and no less than `written_w`, the step of the last digit
    that it writes. Means of readings have smaller ones, which say nothing of the source."""
    steps = np.diff(np.unique(readings))
    return max(float(steps.min()), written_w) if steps.size else written_w


def _interval_s(times_s: np.ndarray) -> float | None:
    return float(np.median(np.diff(times_s))) if times_s.size > 1 else None
