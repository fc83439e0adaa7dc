"""Logs of sampled power: nvidia-smi's CSV, rocm-smi's with a time, or `timestamp,gpu,power_w`.

`read_power_log` makes a `PowerLog` of a file: each GPU is a series of its own, in the order of time. A column
`energy_counter_j` has the joules that each GPU has taken since some moment, beside its power or alone.

What cannot be read, or is said to be not available, is counted and left out: it is never 0 W. A log whose rows could
mean something else than they say (a decimal comma that makes two columns of one, GPUs that no column tells apart, a
clock that ran backwards) is refused, or these rows are left out.
"""

from __future__ import annotations

import codecs
import csv
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from itertools import chain
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.validation import require_regular_file


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


@dataclass(frozen=True)
class CounterSeries:
    """The energy counter of one GPU: seconds since 1970 (UTC), in order, and joules."""

    times_s: np.ndarray
    joules: np.ndarray


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
        found = [each.times_s for each in self.series.values()]
        return found + [each.times_s for each in self.counters.values()]

    def shifted(self, seconds: float) -> PowerLog:
        """The log of a clock that was `seconds` behind."""
        series = {gpu: replace(each, times_s=each.times_s + seconds) for gpu, each in self.series.items()}
        counters = {gpu: replace(each, times_s=each.times_s + seconds) for gpu, each in self.counters.items()}
        return replace(self, series=series, counters=counters)


def resolution_of(readings: np.ndarray, written_w: float = 0.0) -> float:
    """The smallest difference between two readings in a log, and no less than `written_w`, the step of the last digit
    that it writes. Means of readings have smaller ones, which say nothing of the source."""
    steps = np.diff(np.unique(readings))
    return max(float(steps.min()), written_w) if steps.size else written_w


def _interval_s(times_s: np.ndarray) -> float | None:
    return float(np.median(np.diff(times_s))) if times_s.size > 1 else None


COUNTER = "energy_counter_j"
# What says which GPU a row is of; the first of these that there is. The last ones are of nvidia-smi's, long but right.
_GPU_NAMES = (
    *("gpu", "index", "gpu_index", "gpu_id", "gpu id", "device", "card", "id"),
    *("uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial"),
)
EXPECTED = "timestamp,gpu,power_w or nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv"
_NOT_AVAILABLE = re.compile(r"\[?(n/a|not supported|unknown error|not available|gpu requires reset)\]?", re.IGNORECASE)
_POWER = re.compile(
    r"(?P<number>[-+]?\d{1,18}(?:\.(?P<decimals>\d{0,18}))?(?:[eE](?P<exponent>[-+]?\d{1,2}))?)\s*"
    r"(?P<unit>[kmu\u00b5\u03bc]?W)?",
    re.ASCII,
)
# The unit in a column's name: power_mw, power.draw [W], Power (uW).
_UNIT = re.compile(r"[\[(]([^\])\[(]*)[\])]$|[_ ](\w?w|watts|milliwatts|microwatts|kilowatts)$")
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
_NO_DRAW = frozenset(
    {"limit", "cap", "max", "min", "state", "mode", "management", "voltage", "throttle", "status", "brake", "slowdown"}
)
_METER = re.compile(r"pm\d{1,3}")
_WORD = re.compile(r"[a-z]+")
# Times are between 2001 and 2286. Numbers are since 1970, in the first of these units that puts them there.
_EPOCH_UNITS = (1.0, 1e-3, 1e-6, 1e-9)
_EPOCH_RANGE = (1e9, 1e10)
_FRACTION = re.compile("[.,]")


class UnusableCell(Exception):
    """A row has no value; the message says why."""


def _preference(name: str) -> tuple[bool, bool, bool, bool]:
    """What comes first is taken for the power, of nvidia-smi's columns above all: that of the GPU and not of the module
    with its processor (Grace), the one at a moment rather than an average."""
    return ("draw" not in name, "module" in name, "average" in name, "instant" not in name)


def _scale(name: str, path: str) -> float:
    """What makes watts of the numbers in a column of this name. Raises UsageError for a unit that is none of power."""
    unit = _UNIT.search(name.lower())
    if unit is None:
        return 1.0
    text = (unit[1] if unit[1] is not None else unit[2]).strip()
    if text not in _WATTS:
        raise UsageError(f"{path}: the column {name} has the unit {text!r}; expected one of {', '.join(_WATTS)}")
    return _WATTS[text]


def is_header(cells: Sequence[str]) -> bool:
    plain = [cell.lower() for cell in cells]
    return any("power" in cell or cell.startswith("timestamp") or cell == "time" for cell in plain)


def _number(text: str, watts: float | None) -> tuple[float, float]:
    """A number, of power if `watts` says what one without a unit is worth, and the step of its last digit."""
    if _NOT_AVAILABLE.fullmatch(text):
        raise UnusableCell("not available")
    matched = _POWER.fullmatch(text)
    if matched is None or (watts is None and matched["unit"]):
        raise UnusableCell("unreadable")
    value = float(matched["number"])
    if not math.isfinite(value) or value < 0:
        raise UnusableCell("unreadable")
    scale = 1.0 if watts is None else _WATTS[matched["unit"].lower()] if matched["unit"] else watts
    return value * scale, scale * 10.0 ** (int(matched["exponent"] or 0) - len(matched["decimals"] or ""))


def _time_of(text: str, zone: tzinfo | None) -> tuple[float, bool, bool]:
    """Seconds since 1970; whether the text has no zone of its own, and whether it has whole seconds and no more. Raises
    UnusableCell for a text that is no moment, or may be two."""
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        for unit in _EPOCH_UNITS:
            if _EPOCH_RANGE[0] <= number * unit < _EPOCH_RANGE[1]:
                return number * unit, False, unit == 1.0 and not _FRACTION.search(text)
        raise UnusableCell("unreadable")
    try:
        when = datetime.fromisoformat(text.replace("/", "-"))
        naive = when.tzinfo is None
        zoned = when.replace(tzinfo=zone or UTC) if naive else when
        first, second = (zoned.replace(fold=fold).timestamp() for fold in (0, 1))
    except (OverflowError, ValueError):
        raise UnusableCell("unreadable") from None
    if not _EPOCH_RANGE[0] <= first < _EPOCH_RANGE[1]:
        raise UnusableCell("unreadable")
    if first != second:
        raise UnusableCell("in the hour that daylight saving time repeats or leaves out")
    return first, naive, not _FRACTION.search(text)


# nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv,noheader
_WITHOUT_HEADER = ("timestamp", "index", "power.draw [W]")
_SHOWN = 60  # characters of a row, in errors
# A clock that writes whole seconds cuts off the rest: on average half a second.
_CUT_OFF_S = 0.5
# A step back by more intervals, between so many rows that are in order, is the clock's and not that of rows written in
# another order.
_STEP_BACK_INTERVALS = 3.0
_STEP_BACK_ROWS = 10
# Rows of one time, or nearly: so many groups of one size, and so large a share of all, are several GPUs.
_LEAST_GROUPS = 5
_ALIKE = 0.8
# A column `id` of so many different numbers, each once, counts rows.
_LEAST_NUMBERED = 3
_APART = 4.0


def zone_named(name: str) -> tzinfo:
    """The time zone that --zone names: `UTC`, `Europe/Berlin`, or an offset such as `+02:00`. Raises UsageError."""
    offset = re.fullmatch(r"([+-])(\d\d):?([0-5]\d)", name)
    if offset and int(offset[2]) < 24:
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
    is None, does not tell its GPUs apart, was written while its clock ran backwards, or holds none of `gpus`.
    """
    rows = _Rows(str(path), zone)
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell's `>`
        with open(path, encoding="utf-16" if wide else "utf-8-sig", newline="") as text:
            rows.read(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read as a power log: {error.strerror}") from error
    except (UnicodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as a power log: {error}") from error
    if not rows.names:
        raise UsageError(f"{path}: the power log is empty")
    if rows.without_zone and zone is None:
        raise UsageError(f"{path}: its times have no zone: give --zone=UTC, --zone=Europe/Berlin or --zone=+02:00")
    one_gpu = rows.gpu is None or rows.join_numbered_rows()
    known = list(dict.fromkeys((*rows.power, *rows.counted)))
    missing = [gpu for gpu in gpus if gpu not in known]
    if missing:
        raise UsageError(f"{path}: no GPU {', '.join(missing)} in it; it has {', '.join(known) or 'no readable row'}")
    chosen = [gpu for gpu in known if not gpus or gpu in gpus]
    if not chosen:
        told = ", ".join(f"{count} {reason}" for reason, count in rows.left_out.items()) or "no rows"
        told = told if rows.has_header else f"no line names columns of time and power, and of those without: {told}"
        raise UsageError(f"{path}: no row of the power log can be read ({told}){rows.example}; expected {EXPECTED}")
    power, counted = (
        {gpu: _Ordered(str(path), gpu, found[gpu]) for gpu in chosen if gpu in found}
        for found in (rows.power, rows.counted)
    )
    if one_gpu:
        _require_one_gpu(str(path), (power or counted)["0"].times)
    each = [power.get(gpu) or counted[gpu] for gpu in chosen]
    late_s = _CUT_OFF_S if rows.whole_seconds else 0.0
    return PowerLog(
        str(path),
        {gpu: found.series(late_s) for gpu, found in power.items()},
        rows.count,
        dict(rows.left_out),
        sum(found.backwards for found in each),
        zone_text if rows.without_zone else "",
        {gpu: found.counter(late_s) for gpu, found in counted.items()},
        sum(int((np.diff(found.times) == 0).sum()) for found in each),
        "" if rows.power_place is None else rows.names[rows.power_place],
        rows.others,
        rows.whole_seconds,
    )


class _Ordered:
    """The readings of one GPU in the order of time. `step` is that of the last digit that the log writes; `backwards`
    counts the rows that were before the row above them."""

    def __init__(self, path: str, gpu: str, readings: array[float]) -> None:
        """`readings` has the time, the value and its step of each row. Raises UsageError if the clock ran backwards:
        two moments then have one time."""
        times, values, steps = np.array(readings).reshape(-1, 3).T
        self.step = float(steps.min())
        apart = np.diff(times)
        usual = float(np.median(apart[apart > 0])) if (apart > 0).any() else 0.0
        for place in np.flatnonzero(apart < -_STEP_BACK_INTERVALS * usual).tolist():
            before, after = times[: place + 1], times[place + 1 :]
            around = apart[max(0, place - _STEP_BACK_ROWS) : place], apart[place + 1 : place + 1 + _STEP_BACK_ROWS]
            if any(len(side) < _STEP_BACK_ROWS or (side < 0).any() for side in around):
                continue
            falls = np.flatnonzero(np.diff(after) < 0)
            last = after[falls[0]] if falls.size else after[-1]
            if ((before >= after[0]) & (before <= last)).any():
                raise UsageError(
                    f"{path}: its clock ran backwards by {-apart[place]:.3f} s after "
                    f"{datetime.fromtimestamp(times[place], UTC).isoformat()} (GPU {gpu}), so that a time in it stands "
                    "for two moments: take the rows before or behind that, or measure again"
                )
        order = np.argsort(times, kind="stable")
        self.times, self.values, self.backwards = times[order], values[order], int((apart < 0).sum())

    def series(self, late_s: float) -> Series:
        """The times that differ, and the mean of each one's values; samples are up to twice `late_s` after them."""
        times, place, counts = np.unique(self.times, return_inverse=True, return_counts=True)
        means = np.bincount(place, self.values) / counts
        return Series(times + late_s, means, resolution_of(self.values, self.step), late_s)

    def counter(self, late_s: float) -> CounterSeries:
        """The times that differ, and the value of each one's last row."""
        last = np.append(np.diff(self.times) > 0, True)
        return CounterSeries(self.times[last] + late_s, self.values[last])


def _require_one_gpu(path: str, times: np.ndarray) -> None:
    """Raises UsageError for rows in groups of (nearly) one time, without a column that says which GPU each is of: the
    power of several GPUs would be averaged instead of added up."""
    distances = np.diff(times)
    near = float(np.percentile(distances, 25)) if distances.size else 0.0
    sizes = np.diff(np.flatnonzero(distances > _APART * near))
    if sizes.size < _LEAST_GROUPS:
        return
    size = int(np.median(sizes))
    if size > 1 and (sizes == size).mean() >= _ALIKE:
        raise UsageError(
            f"{path}: {size} rows each have the same time, or nearly, and no column says which GPU a row is of: add it "
            "(nvidia-smi --query-gpu=timestamp,index,power.draw); or, of one GPU, write times with milliseconds"
        )


class _Rows:
    """What a file has said so far: readings by GPU (time, value and the step of its last digit, of one row after the
    other), and which rows were left out and why. `time`, `gpu`, `power_place` and `counter` are places in a row."""

    def __init__(self, path: str, zone: tzinfo | None) -> None:
        self._path, self._zone = path, zone
        self._header: list[str] | None = None
        self._cut_off = False  # the last line that was read had no end
        self.names: Sequence[str] = ()
        self.gpu: int | None = None
        self.power_place: int | None = None
        self.others: tuple[str, ...] = ()
        self.count = 0
        self.power: dict[str, array[float]] = {}
        self.counted: dict[str, array[float]] = {}
        self.left_out: Counter[str] = Counter()
        self.example = ""  # the first row that was left out, for errors
        self.without_zone = False
        self.whole_seconds = True

    @property
    def has_header(self) -> bool:
        return self._header is not None

    def read(self, text: Iterator[str]) -> None:
        """Read all lines. Raises UsageError for columns that are none of a power log."""
        reader = csv.reader(self._lines(text))
        for cells in reader:
            row = [cell.strip() for cell in cells]
            if not any(row) or row == self._header:
                continue  # a header again: logs are appended to each other
            if not self.names and self._begin(row):
                continue
            self.count += 1
            try:
                if self._cut_off:
                    raise UnusableCell("cut off")  # perhaps within a number
                self._add(row)
            except UnusableCell as reason:
                self.left_out[str(reason)] += 1
                self.example = self.example or f"; the first is line {reader.line_num}: {','.join(cells)[:_SHOWN]!r}"

    def _lines(self, text: Iterator[str]) -> Iterator[str]:
        for line in text:
            self._cut_off = not line.endswith(("\n", "\r"))
            yield line

    def join_numbered_rows(self) -> bool:
        """Make one GPU of all rows if a column `id` only counts them, as loggers of a whole machine's power do: no two
        rows have one number or one time. Returns whether it did."""
        if self.gpu is None or self.names[self.gpu].lower() != "id":
            return False
        for found in (self.power, self.counted):
            alone = all(len(readings) == 3 for readings in found.values())
            times = {readings[0] for readings in found.values()}
            if found and not (alone and len(found) >= _LEAST_NUMBERED and len(times) == len(found)):
                return False
        for found in (self.power, self.counted):
            if found:
                joined = array("d", chain.from_iterable(found.values()))
                found.clear()
                found["0"] = joined
        return bool(self.power or self.counted)

    def _begin(self, row: list[str]) -> bool:
        """Find the columns in the first row; whether it is a header."""
        if is_header(row):
            self._header = row
        elif row[0][:1] in ("{", "["):
            raise UsageError(f"{self._path}: is JSON, not the rows of a power log; expected {EXPECTED}")
        self.names = names = self._header or _WITHOUT_HEADER
        for separator in ";\t":
            if len(row) == 1 and separator in row[0]:
                raise UsageError(
                    f"{self._path}: its columns are separated by {separator!r}; expected commas between columns, and "
                    "points in numbers"
                )
        plain = [name.lower() for name in names]
        time = next((i for i, name in enumerate(plain) if name.startswith(("timestamp", "time", "date"))), None)
        counter = plain.index(COUNTER) if COUNTER in plain else None
        drawn = [i for i, name in enumerate(plain) if "power" in name and _NO_DRAW.isdisjoint(_WORD.findall(name))]
        power = min(drawn, key=lambda place: _preference(plain[place]), default=None)
        if power is None and "sum" in plain and any(_METER.fullmatch(name) for name in plain):
            power = plain.index("sum")  # a logger of WattsUp meters: what each draws, and all of them
        if time is None or (power is None and counter is None):
            missing = "time" if time is None else "power"
            raise UsageError(
                f"{self._path}: no column of the power log holds a {missing} (its header: {', '.join(names)}); "
                f"expected {EXPECTED}"
            )
        self.time, self.power_place = time, power
        self.gpu = next((plain.index(name) for name in _GPU_NAMES if name in plain), None)
        self.others = tuple(names[i] for i in drawn if i != power)
        # Where a value is, what makes watts of it if it is power, and where it goes.
        self._values: list[tuple[int, float | None, dict[str, array[float]]]] = []
        if power is not None:
            self._values.append((power, _scale(names[power], self._path), self.power))
        if counter is not None:
            self._values.append((counter, None, self.counted))
        self._last = max(time, self.gpu or 0, *(place for place, _scale, _found in self._values))
        return self._header is not None

    def _add(self, row: list[str]) -> None:
        if len(row) <= self._last:
            raise UnusableCell("cut off")
        if any(row[len(self.names) :]):
            raise UnusableCell("with more cells than columns")  # a decimal comma, or columns that are not known
        gpu = "0" if self.gpu is None else row[self.gpu]
        if self._header is None and not gpu.isdecimal():
            raise UnusableCell("without a GPU's index where it is expected")
        when, naive, whole = _time_of(row[self.time], self._zone)
        read, reasons = [], []
        for place, scale, found in self._values:
            try:
                read.append((found, *_number(row[place], scale)))
            except UnusableCell as reason:
                reasons.append(reason)
        if not read:
            raise reasons[0]
        self.without_zone |= naive
        self.whole_seconds &= whole
        for found, value, step in read:
            found.setdefault(gpu, array("d")).extend((when, value, step))
