"""What the cells of a power log say: which column holds what, and the number, the unit or the time that a text is.

A cell that says nothing, or may mean something else, raises `LeftOut`, and its row does not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from replayfmt.errors import UsageError

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


class LeftOut(Exception):
    """A row has no value; the message says why."""


@dataclass(frozen=True)
class LogColumns:
    """Where a row has what; `scale` makes watts of the numbers in `power` that have no unit beside them. `others` are
    the columns that hold power as well."""

    time: int
    gpu: int | None
    power: int | None
    scale: float
    counter: int | None
    others: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """The last place that is needed."""
        return max(place for place in (self.time, self.gpu, self.power, self.counter) if place is not None)

    @staticmethod
    def of(names: Sequence[str], path: str) -> LogColumns:
        plain = [name.lower() for name in names]
        time = next((i for i, name in enumerate(plain) if name.startswith(("timestamp", "time", "date"))), None)
        counter = next((i for i, name in enumerate(plain) if name == COUNTER), None)
        drawn = [i for i, name in enumerate(plain) if "power" in name and _NO_DRAW.isdisjoint(_WORD.findall(name))]
        power = min(drawn, key=lambda place: _preference(plain[place]), default=None)
        if power is None and "sum" in plain and any(_METER.fullmatch(name) for name in plain):
            power = plain.index("sum")  # a logger of WattsUp meters: what each draws, and all of them
        if time is None or (power is None and counter is None):
            missing = "time" if time is None else "power"
            raise UsageError(
                f"{path}: no column of the power log holds a {missing} (its header: {', '.join(names)}); expected "
                f"{EXPECTED}"
            )
        gpu = next((plain.index(name) for name in _GPU_NAMES if name in plain), None)
        others = tuple(names[i] for i in drawn if i != power)
        return LogColumns(time, gpu, power, 1.0 if power is None else _scale(names[power], path), counter, others)

    def values(self, line: Sequence[str]) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
        """The watts and the counter's joules of a row, each with the step of its last digit. Raises LeftOut if it has
        neither."""
        cells = [None if place is None else line[place] for place in (self.power, self.counter)]
        found: list[tuple[float, float] | None] = [None, None]
        reasons = []
        for place, (cell, scale) in enumerate(zip(cells, (self.scale, None), strict=True)):
            try:
                found[place] = None if cell is None else _number(cell, scale)
            except LeftOut as reason:
                reasons.append(reason)
        if found == [None, None]:
            raise reasons[0]
        return found[0], found[1]


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
        raise LeftOut("not available")
    matched = _POWER.fullmatch(text)
    if matched is None or (watts is None and matched["unit"]):
        raise LeftOut("unreadable")
    value = float(matched["number"])
    if not math.isfinite(value) or value < 0:
        raise LeftOut("unreadable")
    scale = 1.0 if watts is None else _WATTS[matched["unit"].lower()] if matched["unit"] else watts
    return value * scale, scale * 10.0 ** (int(matched["exponent"] or 0) - len(matched["decimals"] or ""))


@dataclass(frozen=True)
class LogMoment:
    """Seconds since 1970; whether the text has no zone of its own, and whether it has whole seconds and no more."""

    seconds: float
    naive: bool
    whole: bool


def time_of(text: str, zone: tzinfo | None) -> LogMoment:
    """The moment that a text is. Raises LeftOut for one that is none, or may be two."""
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        for unit in _EPOCH_UNITS:
            if _EPOCH_RANGE[0] <= number * unit < _EPOCH_RANGE[1]:
                return LogMoment(number * unit, False, unit == 1.0 and not _FRACTION.search(text))
        raise LeftOut("unreadable")
    try:
        when = datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        raise LeftOut("unreadable") from None
    try:
        naive = when.tzinfo is None
        zoned = when.replace(tzinfo=zone or UTC) if naive else when
        first, second = (zoned.replace(fold=fold).timestamp() for fold in (0, 1))
    except (OverflowError, ValueError):
        raise LeftOut("unreadable") from None
    if not _EPOCH_RANGE[0] <= first < _EPOCH_RANGE[1]:
        raise LeftOut("unreadable")
    if first != second:
        raise LeftOut("in the hour that daylight saving time repeats or leaves out")
    return LogMoment(first, naive, not _FRACTION.search(text))
