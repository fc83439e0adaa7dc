"""Formats times, rates and names for people: four significant digits and a fitting unit, on one line."""

from __future__ import annotations

from typing import Any

from replayfmt.format.printable import counted

_TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_RATE_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SIZE_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_DIGITS = 4


def duration(nanoseconds: float | None) -> str:
    """A time in ns, us, ms or s; `-` if unknown."""
    if nanoseconds is None:
        return "-"
    scale, unit = next((pair for pair in _TIME_UNITS if abs(nanoseconds) >= pair[0]), _TIME_UNITS[-1])
    return f"{_digits(nanoseconds / scale)} {unit}"


def size(length: int) -> str:
    """A number of bytes in B, KiB, MiB, GiB or TiB; whole below 1 KiB."""
    scale, unit = next((pair for pair in _SIZE_UNITS if abs(length) >= pair[0]), _SIZE_UNITS[-1])
    return f"{length} {unit}" if scale == 1 else f"{_digits(length / scale)} {unit}"


def call_count(number: int) -> str:
    """A number of calls."""
    return f"{number} call{'' if number == 1 else 's'}"


def figure(value: float | None) -> str:
    """A number whose unit is given elsewhere; `not measured` if there is none."""
    return "not measured" if value is None else f"{value:.{_DIGITS}g}"


def share_text(value: float) -> str:
    """A share as 12.3%; one that rounds to nothing is not shown as none."""
    return "<0.1%" if 0 < value < 0.0005 else f"{value:.1%}"


def verified(text: str) -> str:
    """The line that says how results were verified, or that they were not."""
    return text if text.startswith("not verified") else f"verified  {text}"


def ran_on(context: dict[str, Any]) -> str:
    """The line that says where it ran: devices, PyTorch and its threads, processors."""
    threads = context["torch_num_threads"]
    devices = ", ".join(context["devices"]) or "no device"
    return (
        f"run on    {devices}; torch {context['torch_version']}, {counted(threads, 'thread')}; "
        f"{context['num_cpus']} CPUs"
    )


def rate(per_second: float | None) -> str:
    """A rate per second, as 12.34k/s; `-` if unknown."""
    if per_second is None:
        return "-"
    scale, unit = next((pair for pair in _RATE_UNITS if abs(per_second) >= pair[0]), _RATE_UNITS[-1])
    return f"{_digits(per_second / scale)}{unit}/s"


def _digits(value: float) -> str:
    """Four significant digits, and all digits before the point."""
    before = len(str(int(abs(value))))
    return f"{value:.{max(0, _DIGITS - before)}f}"
