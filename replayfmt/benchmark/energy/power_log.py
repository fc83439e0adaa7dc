"""Logs of sampled power, as people have them: nvidia-smi's CSV, rocm-smi's with a time, or `timestamp,gpu,power_w`.

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
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np

from replayfmt.errors import UsageError
from replayfmt.format.regular_files import require_regular_file

_GPU_NAMES = frozenset({"gpu", "index", "gpu_index", "gpu_id", "gpu id", "device", "card", "id"})
_NOT_AVAILABLE = re.compile(r"\[?(n/a|not supported|unknown error|not available|gpu requires reset)\]?", re.IGNORECASE)
_POWER = re.compile(r"([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(mW|W)?")
_UNIT = re.compile(r"[\[(_ ](mw|w)[\])]?$")
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
        return float(np.median(np.diff(self.times_s))) if self.times_s.size > 1 else math.inf

    @property
    def resolution_w(self) -> float:
        """The smallest difference between two values in the log; 0 if there is only one value."""
        steps = np.diff(np.unique(self.watts))
        return float(steps.min()) if steps.size else 0.0

    def shifted(self, seconds: float) -> Series:
        return Series(self.times_s + seconds, self.watts)


@dataclass(frozen=True)
class PowerLog:
    """A log by GPU. `left_out` counts the rows without a value by reason, `out_of_order` those that were before the row
    above them; `zone` is what times without one were taken for, "" if all had one."""

    path: str
    series: dict[str, Series]
    rows: int
    left_out: dict[str, int]
    out_of_order: int
    zone: str

    @property
    def begins_s(self) -> float:
        return max(float(each.times_s[0]) for each in self.series.values())

    @property
    def ends_s(self) -> float:
        return min(float(each.times_s[-1]) for each in self.series.values())

    @property
    def interval_s(self) -> float:
        return max(each.interval_s for each in self.series.values())

    def shifted(self, seconds: float) -> PowerLog:
        """The log of a clock that was `seconds` behind."""
        series = {gpu: each.shifted(seconds) for gpu, each in self.series.items()}
        return PowerLog(self.path, series, self.rows, self.left_out, self.out_of_order, self.zone)


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
    found: dict[str, list[tuple[float, float]]] = {}
    left_out: Counter[str] = Counter()
    without_zone = False
    for line in body:
        if line == header:
            continue  # the header again: logs are appended to each other
        try:
            when, naive = _time(line[columns.time], zone)
            watts = _watts(line[columns.power], columns.milliwatts)
        except _LeftOut as reason:
            left_out[str(reason)] += 1
            continue
        except IndexError:
            left_out["cut off"] += 1
            continue
        without_zone = without_zone or naive
        gpu = line[columns.gpu] if columns.gpu is not None and columns.gpu < len(line) else "0"
        found.setdefault(gpu, []).append((when, watts))
    if without_zone and zone is None:
        raise UsageError(f"{path}: its times have no zone: give --zone=UTC, --zone=Europe/Berlin or --zone=+02:00")
    missing = [gpu for gpu in gpus if gpu not in found]
    if missing:
        raise UsageError(f"{path}: no GPU {', '.join(missing)} in it; it has {', '.join(found) or 'no readable row'}")
    chosen = {gpu: rows for gpu, rows in found.items() if not gpus or gpu in gpus}
    if not chosen:
        told = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "no rows"
        raise UsageError(f"{path}: no row of the power log can be read ({told})")
    backwards = sum(b < a for rows in chosen.values() for (a, _), (b, _) in zip(rows, rows[1:], strict=False))
    series = {gpu: _series(rows) for gpu, rows in chosen.items()}
    return PowerLog(str(path), series, len(body), dict(left_out), backwards, zone_text if without_zone else "")


class _LeftOut(Exception):
    """A row has no value; the message says why."""


@dataclass(frozen=True)
class _Columns:
    time: int
    gpu: int | None
    power: int
    milliwatts: bool

    @staticmethod
    def of(names: Sequence[str], path: str) -> _Columns:
        plain = [name.lower() for name in names]
        time = next((i for i, name in enumerate(plain) if name.startswith(("timestamp", "time", "date"))), None)
        power = next((i for i, name in enumerate(plain) if "power" in name), None)
        if time is None or power is None:
            missing = "time" if time is None else "power"
            raise UsageError(
                f"{path}: no column of the power log holds a {missing} (its header: {', '.join(names)}); expected "
                "timestamp,gpu,power_w or nvidia-smi --query-gpu=timestamp,index,power.draw --format=csv"
            )
        gpu = next((i for i, name in enumerate(plain) if name in _GPU_NAMES), None)
        unit = _UNIT.search(plain[power])
        return _Columns(time, gpu, power, bool(unit) and unit is not None and unit[1] == "mw")


def _is_header(cells: Sequence[str]) -> bool:
    return any("power" in cell.lower() or cell.lower().startswith("timestamp") for cell in cells)


def _series(rows: list[tuple[float, float]]) -> Series:
    ordered = np.array(sorted(rows), dtype=np.float64)
    return Series(ordered[:, 0], ordered[:, 1])


def _watts(text: str, milliwatts: bool) -> float:
    if _NOT_AVAILABLE.fullmatch(text):
        raise _LeftOut("not available")
    matched = _POWER.fullmatch(text)
    if matched is None:
        raise _LeftOut("unreadable")
    value = float(matched[1])
    if not math.isfinite(value) or value < 0:
        raise _LeftOut("unreadable")
    return value / 1e3 if matched[2] == "mW" or (matched[2] is None and milliwatts) else value


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
