"""The peak memory of a replay, per device, if the system reports it.

On the CPU it is the resident set's high-water mark, which Linux lets a process reset; on accelerators the allocator's
own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from replayfmt.pytorch import accelerators

from ..results import PeakMemory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = b"5"
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class MemoryWatch:
    """Watches from `start` to `read`."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type != accelerators.NOTHING]
        self._host_before: int | None = None
        self._host_problem = ""
        self._before: dict[torch.device, int | None] = {}

    def start(self) -> None:
        """Forget earlier peaks. On the CPU that resets the process's high-water mark."""
        for device in self._devices:
            if accelerators.is_accelerator(device):
                self._before[device] = accelerators.reset_peak_memory(device)
        try:
            with _CLEAR.open("wb", buffering=0) as clear:
                clear.write(_RESET_HIGH_WATER)
            self._host_before = _status_bytes("VmRSS")
        except OSError as error:
            self._host_problem = f"the high-water mark cannot be reset: {error.strerror}"

    def read(self) -> tuple[PeakMemory, ...]:
        """The peaks since `start`."""
        return tuple(self._of(device) for device in self._devices)

    def _of(self, device: torch.device) -> PeakMemory:
        if accelerators.is_accelerator(device):
            before = self._before.get(device)
            if before is None:
                return PeakMemory(str(device), None, None, "PyTorch's module for it reports no peak")
            return PeakMemory(str(device), accelerators.peak_memory(device), before, "allocated by torch")
        peak = _status_bytes("VmHWM") if not self._host_problem else None
        if peak is None or self._host_before is None:
            return PeakMemory(
                "cpu", None, None, self._host_problem or "this system does not report the high-water mark"
            )
        # Linux counts a process's pages only roughly, and the high-water mark differently from the current number.
        return PeakMemory("cpu", max(peak, self._host_before), self._host_before, "resident set of the process")


def host_memory_bytes() -> int | None:
    """The most memory that this process can have: the machine's with its swap, or what its control group allows.
    None if the system does not report it."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total = sum(int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    for limit in _GROUP_LIMITS:
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def _status_bytes(name: str) -> int | None:
    try:
        with _STATUS.open("rb", buffering=0) as status:
            text = status.read()
    except OSError:
        return None
    found = text.partition(f"\n{name}:".encode())[2].split(None, 1)
    return int(found[0]) * 1024 if found else None
