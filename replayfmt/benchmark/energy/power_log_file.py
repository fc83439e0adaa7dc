"""Logs of sampled power, as people have them: nvidia-smi's CSV, rocm-smi's with a time, or `timestamp,gpu,power_w`.

A column `energy_counter_j` has the joules that each GPU has taken since some moment, beside its power or alone.

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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.regular_files import require_regular_file

from .power_log import CounterSeries, PowerLog, Series, resolution_of
from .power_log_cells import EXPECTED, LeftOut, LogColumns, is_header, time_of

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
    if rows.columns is None:
        raise UsageError(f"{path}: the power log is empty")
    if rows.without_zone and zone is None:
        raise UsageError(f"{path}: its times have no zone: give --zone=UTC, --zone=Europe/Berlin or --zone=+02:00")
    numbered = rows.join_numbered_rows()
    known = list(dict.fromkeys((*rows.power, *rows.counted)))
    missing = [gpu for gpu in gpus if gpu not in known]
    if missing:
        raise UsageError(f"{path}: no GPU {', '.join(missing)} in it; it has {', '.join(known) or 'no readable row'}")
    chosen = [gpu for gpu in known if not gpus or gpu in gpus]
    if not chosen:
        told = ", ".join(f"{count} {reason}" for reason, count in rows.left_out.items()) or "no rows"
        raise UsageError(f"{path}: no row of the power log can be read ({told}){rows.example}; expected {EXPECTED}")
    power = {gpu: rows.power[gpu].ordered(str(path), gpu) for gpu in chosen if gpu in rows.power}
    counted = {gpu: rows.counted[gpu].ordered(str(path), gpu) for gpu in chosen if gpu in rows.counted}
    if rows.columns.gpu is None or numbered:
        _require_one_gpu(str(path), (power or counted)["0"])
    each = [power.get(gpu) or counted[gpu] for gpu in chosen]
    late_s = _CUT_OFF_S if rows.whole_seconds else 0.0
    return PowerLog(
        str(path),
        {gpu: found.series(rows.power[gpu].step, late_s) for gpu, found in power.items()},
        rows.count,
        dict(rows.left_out),
        sum(found.backwards for found in each),
        zone_text if rows.without_zone else "",
        {gpu: CounterSeries(*found.last()).shifted(late_s) for gpu, found in counted.items()},
        sum(found.same_time for found in each),
        rows.power_column,
        rows.columns.others,
        rows.whole_seconds,
    )


class _Readings:
    """What a log says of one GPU, in the order of its rows. `step` is that of the last digit that it writes."""

    def __init__(self) -> None:
        self._times, self._values = array("d"), array("d")
        self.step = math.inf

    def add(self, when: float, value: float, step: float) -> None:
        self._times.append(when)
        self._values.append(value)
        self.step = min(self.step, step)

    def __len__(self) -> int:
        return len(self._times)

    def join(self, other: _Readings) -> None:
        """Add the readings of another one after these."""
        self._times += other._times
        self._values += other._values
        self.step = min(self.step, other.step)

    @property
    def first(self) -> float:
        return self._times[0]

    def ordered(self, path: str, gpu: str) -> _Ordered:
        """The readings in the order of time. Raises UsageError if the clock ran backwards: two moments then have one
        time."""
        times, values = np.array(self._times), np.array(self._values)
        steps = np.diff(times)
        usual = float(np.median(steps[steps > 0])) if (steps > 0).any() else 0.0
        for place in np.flatnonzero(steps < -_STEP_BACK_INTERVALS * usual).tolist():
            before, after = times[: place + 1], times[place + 1 :]
            around = steps[max(0, place - _STEP_BACK_ROWS) : place], steps[place + 1 : place + 1 + _STEP_BACK_ROWS]
            if any(len(side) < _STEP_BACK_ROWS or (side < 0).any() for side in around):
                continue
            falls = np.flatnonzero(np.diff(after) < 0)
            last = after[falls[0]] if falls.size else after[-1]
            if ((before >= after[0]) & (before <= last)).any():
                raise UsageError(
                    f"{path}: its clock ran backwards by {-steps[place]:.3f} s after "
                    f"{datetime.fromtimestamp(times[place], UTC).isoformat()} (GPU {gpu}), so that a time in it stands "
                    "for two moments: take the rows before or behind that, or measure again"
                )
        order = np.argsort(times, kind="stable")
        return _Ordered(times[order], values[order], int((steps < 0).sum()))


@dataclass(frozen=True)
class _Ordered:
    """Readings in the order of time; `backwards` counts the rows that were before the row above them."""

    times: np.ndarray
    values: np.ndarray
    backwards: int

    @property
    def same_time(self) -> int:
        """The rows that have the time of another one before them."""
        return int((np.diff(self.times) == 0).sum())

    def series(self, step: float, late_s: float) -> Series:
        """The times that differ, and the mean of each one's values; samples are up to twice `late_s` after them."""
        times, place, counts = np.unique(self.times, return_inverse=True, return_counts=True)
        means = np.bincount(place, self.values) / counts
        return Series(times + late_s, means, resolution_of(self.values, step), late_s)

    def last(self) -> tuple[np.ndarray, np.ndarray]:
        """The times that differ, and the value of each one's last row."""
        last = np.append(np.diff(self.times) > 0, True)
        return self.times[last], self.values[last]


def _require_one_gpu(path: str, readings: _Ordered) -> None:
    """Raises UsageError for rows in groups of (nearly) one time, without a column that says which GPU each is of: the
    power of several GPUs would be averaged instead of added up."""
    distances = np.diff(readings.times)
    near = float(np.percentile(distances, 25)) if distances.size else 0.0
    ends = np.flatnonzero(distances > _APART * near)
    sizes = np.diff(ends)
    if sizes.size < _LEAST_GROUPS:
        return
    size = int(np.median(sizes))
    if size > 1 and (sizes == size).mean() >= _ALIKE:
        raise UsageError(
            f"{path}: {size} rows each have the same time, or nearly, and no column says which GPU a row is of: add it "
            "(nvidia-smi --query-gpu=timestamp,index,power.draw); or, of one GPU, write times with milliseconds"
        )


class _Rows:
    """What a file has said so far: readings by GPU, and which rows were left out and why."""

    def __init__(self, path: str, zone: tzinfo | None) -> None:
        self._path = path
        self._zone = zone
        self._header: list[str] | None = None
        self._names: Sequence[str] = ()
        self.columns: LogColumns | None = None
        self.count = 0
        self.power: dict[str, _Readings] = {}
        self.counted: dict[str, _Readings] = {}
        self.left_out: Counter[str] = Counter()
        self.example = ""  # the first row that was left out, for errors
        self.without_zone = False
        self.whole_seconds = True

    @property
    def power_column(self) -> str:
        """The name of the column that power is from, "" if there is none."""
        place = None if self.columns is None else self.columns.power
        return "" if place is None else self._names[place]

    def read(self, text: Iterator[str]) -> None:
        """Read all lines. Raises UsageError for columns that are none of a power log."""
        lines = _Lines(text)
        reader = csv.reader(lines)
        for cells in reader:
            row = [cell.strip() for cell in cells]
            if not any(row) or row == self._header:
                continue  # a header again: logs are appended to each other
            if self.columns is None and self._begin(row):
                continue
            self.count += 1
            try:
                if lines.cut_off:
                    raise LeftOut("cut off")  # perhaps within a number
                self._add(row)
            except LeftOut as reason:
                self.left_out[str(reason)] += 1
                self.example = self.example or f"; the first is line {reader.line_num}: {','.join(cells)[:_SHOWN]!r}"

    def join_numbered_rows(self) -> bool:
        """Make one GPU of all rows if a column `id` only counts them, as loggers of a whole machine's power do: no two
        rows have one number or one time. Returns whether it did."""
        place = None if self.columns is None else self.columns.gpu
        if place is None or self._names[place].lower() != "id":
            return False
        for found in (self.power, self.counted):
            times = {readings.first for readings in found.values()}
            alone = all(len(readings) == 1 for readings in found.values())
            if found and not (alone and len(found) >= _LEAST_NUMBERED and len(times) == len(found)):
                return False
        for found in (self.power, self.counted):
            whole = _Readings()
            for readings in found.values():
                whole.join(readings)
            found.clear()
            if len(whole):
                found["0"] = whole
        return bool(self.power or self.counted)

    def _begin(self, row: list[str]) -> bool:
        """Find the columns in the first row; whether it is a header."""
        if is_header(row):
            self._header = row
        self._names = self._header or _WITHOUT_HEADER
        for separator in ";\t":
            if len(row) == 1 and separator in row[0]:
                raise UsageError(
                    f"{self._path}: its columns are separated by {separator!r}; expected commas between columns, and "
                    "points in numbers"
                )
        self.columns = LogColumns.of(self._names, self._path)
        return self._header is not None

    def _add(self, row: list[str]) -> None:
        columns = self.columns
        assert columns is not None
        if len(row) <= columns.last:
            raise LeftOut("cut off")
        if any(row[len(self._names) :]):
            raise LeftOut("with more cells than columns")  # a decimal comma, or columns that are not known
        gpu = "0" if columns.gpu is None else row[columns.gpu]
        if self._header is None and not gpu.isdecimal():
            raise LeftOut("without a GPU's index where it is expected")
        when = time_of(row[columns.time], self._zone)
        watts, joules = columns.values(row)
        self.without_zone = self.without_zone or when.naive
        self.whole_seconds = self.whole_seconds and when.whole
        for value, found in ((watts, self.power), (joules, self.counted)):
            if value is not None:
                found.setdefault(gpu, _Readings()).add(when.seconds, *value)


class _Lines:
    """The lines of a text; `cut_off` says whether the last one that was read had no end."""

    def __init__(self, text: Iterator[str]) -> None:
        self._text = text
        self.cut_off = False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self.cut_off = not line.endswith(("\n", "\r"))
        return line
