"""The machine of a measurement, in the terms of Google Benchmark's JSON context: host, processors, caches, load.

Read from the operating system only (no torch), so that it can be tested against a made-up /sys and /proc. What the
machine does not report is absent, never zero.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

_ADDR_NO_RANDOMIZE = 0x0040000
_LEAST_TICKS = 10  # of the processors' times, which are rounded to whole ones
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def machine_context(root: Path = Path("/")) -> dict[str, Any]:
    """The context fields about the machine, as of now. `root` is where proc and sys are."""
    context: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host_name": socket.gethostname(),
        "executable": sys.argv[0],
        "num_cpus": os.cpu_count(),
    }
    known = {
        "mhz_per_cpu": _frequency(root),
        "cpu_scaling_enabled": frequency_scaling(root),
        "aslr_enabled": _random_addresses(root),
        "caches": _caches(root),
        "load_avg": _load(root),
    }
    return context | {key: value for key, value in known.items() if value is not None}


def frequency_scaling(root: Path = Path("/")) -> bool | None:
    """Whether any processor's frequency may vary; None if the machine does not say."""
    governors = [_text(path) for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")]
    known = [governor for governor in governors if governor]
    return any(governor != "performance" for governor in known) if known else None


def _random_addresses(root: Path) -> bool | None:
    """Whether this process's addresses are randomized (ASLR): its personality lacks ADDR_NO_RANDOMIZE."""
    personality = _text(root / "proc/self/personality")
    return not int(personality, 16) & _ADDR_NO_RANDOMIZE if personality else None


def _frequency(root: Path) -> int | None:
    """Nominal MHz of the first processor."""
    maximum = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if maximum and maximum.isdigit():
        return round(int(maximum) / 1000)
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return round(float(found[1])) if found else None


def _caches(root: Path) -> list[dict[str, Any]] | None:
    """The first processor's caches, sizes in bytes."""
    caches = []
    for index in sorted(root.glob("sys/devices/system/cpu/cpu0/cache/index[0-9]*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _text(index / "size") or "")
        level, kind = _text(index / "level"), _text(index / "type")
        sharing = _text(index / "shared_cpu_map")
        if not (size and level and kind and sharing):
            continue
        caches.append(
            {
                "type": kind,
                "level": int(level),
                "size": int(size[1]) * _UNITS[size[2]],
                "num_sharing": int(sharing.replace(",", ""), 16).bit_count(),
            }
        )
    return caches or None


def largest_cache(root: Path = Path("/")) -> int | None:
    """Bytes of the largest cache that the first processor uses; None if the machine does not say."""
    caches = _caches(root)
    return max(cache["size"] for cache in caches) if caches else None


def _load(root: Path) -> list[float] | None:
    """Load averages over 1, 5 and 15 minutes."""
    words = (_text(root / "proc/loadavg") or "").split()[:3]
    return [float(word) for word in words] if len(words) == 3 else None


class OtherWork:
    """How much of the processors others have between `begin` and `end`: other programs here, and (time that was stolen
    from it) other virtual machines on the same host."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` is where proc is."""
        self._root = root
        self._before = _processor_times(root)

    def begin(self) -> None:
        self._before = _processor_times(self._root)

    def end(self) -> float | None:
        """Their share of all the time that the processors had; None if the machine does not say, or too little time has
        passed to tell."""
        before, after = self._before, _processor_times(self._root)
        if before is None or after is None or after[0] - before[0] < _LEAST_TICKS:
            return None
        every, busy, own = (now - then for now, then in zip(after, before, strict=True))
        return min(max((busy - own) / every, 0.0), 1.0)


def _processor_times(root: Path) -> tuple[float, float, float] | None:
    """Ticks since the machine started, of all processors together: all of them, those in which anything ran or was
    stolen, and those of this process."""
    words = (_text(root / "proc/stat") or "").partition("\n")[0].split()[1:9]
    if len(words) < 8 or not all(word.isdigit() for word in words):
        return None
    user, nice, system, idle, waiting, interrupts, soft_interrupts, stolen = map(float, words)
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy + idle + waiting, busy, time.process_time() * os.sysconf("SC_CLK_TCK")


def _text(path: Path) -> str | None:
    """A small file's content, stripped; None if it cannot be read, which is how the kernel reports an unknown value."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return None
