"""Logs of sampled power, as people have them: nvidia-smi's CSV, rocm-smi's with a time, or `timestamp,gpu,power_w`.

A column `energy_counter_j` has the joules that each GPU has taken since some moment, beside its power or alone.

What cannot be read, or is said to be not available, is counted and left out: it is never 0 W. Each GPU is a series of
its own, in the order of time.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.regular_files import require_regular_file

COUNTER = "energy_counter_j"
_GPU_NAMES = frozenset({"gpu", "index", "gpu_index", "gpu_id", "gpu id", "device", "card", "id"})
_NOT_AVAILABLE = re.compile(r"\[?(n/a|not supported|unknown error|not available|gpu requires reset)\]?", re.IGNORECASE)
_POWER = re.compile(r"([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*([kmu\u00b5\u03bc]?W)?")
# The unit in a column's name: power_mw, power.draw [W], Power (uW).
_UNIT = re.compile(r"[\[(]([^\])]*)[\])]$|[_ ](\w?w|watts|milliwatts|microwatts|kilowatts)$")
_WATTS = {
    "w": 1.0,
    "watts": 1.0,
    "kw": 1e3,
    "kilowatts": 1e3,
    "mw": 1e-3,
    "milliwatts": 1e-3,
    "uw": 1e-6,
    "\u00b5w": 1e-6,
    "\u03bcw": 1e-6,
    "microwatts": 1e-6,
}
# What a column of power holds that is no power drawn.
_NO_DRAW = frozenset({"limit", "cap", "max", "min", "state", "mode", "management"})
_WORD = re.compile(r"[a-z]+")
# nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv,noheader
_WITHOUT_HEADER = ("timestamp", "index", "power.draw [W]")
# Numbers of seconds since 1970, in units that people use: the first that puts the time between 2001 and 2286.
_EPOCH_UNITS = (1.0, 1e-3, 1e-6, 1e-9)
_EPOCH_RANGE = (1e9, 1e10)


@dataclass(frozen=True)
class Series:
    """The power of one GPU: seconds since 1970 (UTC), in order, and watts."""

    times_s: np.ndarray
    watts: np.ndarray

    @property
    def interval_s(self) -> float:
        """The usual distance between two samples."""
        return _interval_s(self.times_s)

    @property
    def resolution_w(self) -> float:
        """The smallest difference between two values in the log; 0 if there is only one value."""
        steps = np.diff(np.unique(self.watts))
        return float(steps.min()) if steps.size else 0.0

    def shifted(self, seconds: float) -> Series:
        return Series(self.times_s + seconds, self.watts)


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

    `left_out` counts the rows without a value by reason, `out_of_order` those that were before the row above them;
    `zone` is what times without one were taken for, "" if all had one.
    """

    path: str
    series: dict[str, Series]
    rows: int
    left_out: dict[str, int]
    out_of_order: int
    zone: str
    counters: dict[str, CounterSeries] = field(default_factory=dict)

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
    def interval_s(self) -> float:
        return max(_interval_s(times) for times in self._times())

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


def _interval_s(times_s: np.ndarray) -> float:
    return float(np.median(np.diff(times_s))) if times_s.size > 1 else math.inf


def zone_named(name: str) -> tzinfo:
    """The time zone that --zone names: `UTC`, `Europe/Berlin`, or an offset such as `+02:00`. Raises UsageError."""
    offset = re.fullmatch(r"([+-])(\d\d):?(\d\d)", name)
    if offset:
        minutes = int(offset[2]) * 60 + int(offset[3])
        return timezone(timedelta(minutes=minutes if offset[1] == "+" else -minutes))
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(f"--zone={name}: expected UTC, a name such as Europe/Berlin, or an offset: +02:00") from error


def read_power_log(
    path: str | os.PathLike[str], *, zone: tzinfo | None = None, gpus: Sequence[str] = (), zone_text: str = ""
) -> PowerLog:
    """Read a log. `zone` is that of times without one; `gpus` selects some, by their names in the log.

    Raises UsageError if the file cannot be read, has no times or no power in it, has times without a zone while `zone`
    is None, or holds none of `gpus`.
    """
    try:
        require_regular_file(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a power log: {error}") from error
    if not lines:
        raise UsageError(f"{path}: the power log is empty")
    header = lines[0] if _is_header(lines[0]) else None
    names, body = (list(_WITHOUT_HEADER), lines) if header is None else (header, lines[1:])
    columns = _Columns.of(names, str(path))
    power: dict[str, list[tuple[float, float]]] = {}
    counted: dict[str, list[tuple[float, float]]] = {}
    left_out: Counter[str] = Counter()
    without_zone = False
    for line in body:
        if line == header:
            continue  # the header again: logs are appended to each other
        try:
            when, naive = _time(line[columns.time], zone)
            watts, joules = columns.values(line)
        except _LeftOut as reason:
            left_out[str(reason)] += 1
            continue
        except IndexError:
            left_out["cut off"] += 1
            continue
        without_zone = without_zone or naive
        gpu = line[columns.gpu] if columns.gpu is not None and columns.gpu < len(line) else "0"
        for value, found in ((watts, power), (joules, counted)):
            if value is not None:
                found.setdefault(gpu, []).append((when, value))
    if without_zone and zone is None:
        raise UsageError(f"{path}: its times have no zone: give --zone=UTC, --zone=Europe/Berlin or --zone=+02:00")
    known = list(dict.fromkeys((*power, *counted)))
    missing = [gpu for gpu in gpus if gpu not in known]
    if missing:
        raise UsageError(f"{path}: no GPU {', '.join(missing)} in it; it has {', '.join(known) or 'no readable row'}")
    chosen = [gpu for gpu in known if not gpus or gpu in gpus]
    if not chosen:
        told = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{path}: no row of the power log can be read ({told})")
    return PowerLog(
        str(path),
        {gpu: Series(*_columns(power[gpu])) for gpu in chosen if gpu in power},
        len(body),
        dict(left_out),
        sum(_backwards(power.get(gpu) or counted[gpu]) for gpu in chosen),
        zone_text if without_zone else "",
        {gpu: CounterSeries(*_columns(counted[gpu])) for gpu in chosen if gpu in counted},
    )


class _LeftOut(Exception):
    """A row has no value; the message says why."""


@dataclass(frozen=True)
class _Columns:
    """Where a row has what; `scale` makes watts of the numbers in `power` that have no unit beside them."""

    time: int
    gpu: int | None
    power: int | None
    scale: float
    counter: int | None

    @staticmethod
    def of(names: Sequence[str], path: str) -> _Columns:
        plain = [name.lower() for name in names]
        time = next((i for i, name in enumerate(plain) if name.startswith(("timestamp", "time", "date"))), None)
        counter = next((i for i, name in enumerate(plain) if name == COUNTER), None)
        drawn = [i for i, name in enumerate(plain) if "power" in name and _NO_DRAW.isdisjoint(_WORD.findall(name))]
        power = next((i for i in drawn if "draw" in plain[i]), drawn[0] if drawn else None)
        if time is None or (power is None and counter is None):
            missing = "time" if time is None else "power"
            raise UsageError(
                f"{path}: no column of the power log holds a {missing} (its header: {', '.join(names)}); expected "
                "timestamp,gpu,power_w or nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv"
            )
        gpu = next((i for i, name in enumerate(plain) if name in _GPU_NAMES), None)
        return _Columns(time, gpu, power, 1.0 if power is None else _scale(names[power], path), counter)

    def values(self, line: Sequence[str]) -> tuple[float | None, float | None]:
        """The watts and the counter's joules of a row. Raises _LeftOut if it has neither, IndexError if it is short."""
        cells = [None if place is None else line[place] for place in (self.power, self.counter)]
        found: list[float | None] = [None, None]
        reasons = []
        for place, (cell, scale) in enumerate(zip(cells, (self.scale, None), strict=True)):
            try:
                found[place] = None if cell is None else _number(cell, scale)
            except _LeftOut as reason:
                reasons.append(reason)
        if found == [None, None]:
            raise reasons[0]
        return found[0], found[1]


def _scale(name: str, path: str) -> float:
    """What makes watts of the numbers in a column of this name. Raises UsageError for a unit that is none of power."""
    unit = _UNIT.search(name.lower())
    if unit is None:
        return 1.0
    text = (unit[1] if unit[1] is not None else unit[2]).strip()
    if text not in _WATTS:
        raise UsageError(f"{path}: the column {name} has the unit {text!r}; expected one of {', '.join(_WATTS)}")
    return _WATTS[text]


def _is_header(cells: Sequence[str]) -> bool:
    return any("power" in cell.lower() or cell.lower().startswith("timestamp") for cell in cells)


def _columns(rows: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Times and values, in the order of time."""
    ordered = np.array(sorted(rows), dtype=np.float64)
    return ordered[:, 0], ordered[:, 1]


def _backwards(rows: list[tuple[float, float]]) -> int:
    return sum(b < a for (a, _), (b, _) in zip(rows, rows[1:], strict=False))


def _number(text: str, watts: float | None) -> float:
    """A number, of power if `watts` says what one without a unit is worth."""
    if _NOT_AVAILABLE.fullmatch(text):
        raise _LeftOut("not available")
    matched = _POWER.fullmatch(text)
    if matched is None or (watts is None and matched[2]):
        raise _LeftOut("unreadable")
    value = float(matched[1])
    if not math.isfinite(value) or value < 0:
        raise _LeftOut("unreadable")
    return value * (1.0 if watts is None else _WATTS[matched[2].lower()] if matched[2] else watts)


def _time(text: str, zone: tzinfo | None) -> tuple[float, bool]:
    """Seconds since 1970, and whether the text has no zone of its own."""
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        for unit in _EPOCH_UNITS:
            if _EPOCH_RANGE[0] <= number * unit < _EPOCH_RANGE[1]:
                return number * unit, False
        raise _LeftOut("unreadable")
    try:
        when = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise _LeftOut("unreadable") from None
    if when.tzinfo is None:
        return when.replace(tzinfo=zone or UTC).timestamp(), True
    return when.timestamp(), False
