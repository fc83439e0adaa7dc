"""Clocks, temperature, power limit and throttle reasons of NVIDIA GPUs, through NVML, before and after a measurement.

A GPU that slowed down, or was not as fast at the end as at the beginning, was measured as two devices. What NVML does
not say is None, with the reason in `not_measured`. Only opening a GPU imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .energy.sources import INSTALL

if TYPE_CHECKING:
    import torch

# NVML's bits (nvmlClocksEventReasons), which all drivers share; those that slow a GPU down are throttle reasons.
_REASONS = {
    0x1: "idle",
    0x2: "clocks set by the user",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
_THROTTLING = frozenset(_REASONS[bit] for bit in (0x4, 0x8, 0x20, 0x40, 0x80))
# Clocks move in small steps all the time.
_MOST_CLOCK_CHANGE = 0.05
_MOST_WARMING_C = 15
_CLOCKS = (("sm_clock_mhz", "SM clock"), ("memory_clock_mhz", "memory clock"))


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. `reasons` say what its clocks are limited by; None if that is not known."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_limit_w: float | None = None
    reasons: tuple[str, ...] | None = None
    not_measured: dict[str, str] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sm_clock_mhz": self.sm_clock_mhz,
            "memory_clock_mhz": self.memory_clock_mhz,
            "temperature_c": self.temperature_c,
            "power_limit_w": self.power_limit_w,
            "clock_reasons": None if self.reasons is None else list(self.reasons),
            "not_measured": self.not_measured,
        }


# Makes a function that reads a GPU's state, or says why there is none.
Open = Callable[["torch.device"], "Callable[[], GpuState] | str"]


class GpuWatch:
    """The GPUs of a measurement: `begin` right before it, while they are still busy, and `end` right after."""

    def __init__(self, devices: Sequence[torch.device], open_gpu: Open | None = None) -> None:
        from replayfmt.pytorch.accelerators import is_accelerator

        opener = open_gpu or open_nvml
        self._found = [(device, opener(device)) for device in devices if is_accelerator(device)]
        self._before: list[GpuState | None] = []
        self._after: list[GpuState | None] = []

    def begin(self) -> None:
        self._before = self._read()

    def end(self) -> None:
        self._after = self._read()

    def _read(self) -> list[GpuState | None]:
        return [None if isinstance(read, str) else read() for _, read in self._found]

    def rows(self) -> list[dict[str, Any]]:
        """One for each GPU: its states before and after; both are None if it was not measured, with the reason."""
        return [
            {
                "device": str(device),
                "before": None if before is None else before.row(),
                "after": None if after is None else after.row(),
                "not_measured": read if isinstance(read, str) else None,
            }
            for (device, read), before, after in zip(self._found, self._before, self._after, strict=True)
        ]


def are_gpu_rows(value: Any) -> bool:
    """Whether a value from a file is what `GpuWatch.rows` makes."""
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and isinstance(row.get("device"), str)
        and all(row.get(when, 0) is None or _is_state(row.get(when)) for when in ("before", "after"))
        for row in value
    )


def _is_state(value: Any) -> bool:
    figures = (*(name for name, _ in _CLOCKS), "temperature_c", "power_limit_w")
    if not isinstance(value, dict) or not all(isinstance(value.get(name, ""), int | float | None) for name in figures):
        return False
    reasons = value.get("clock_reasons", "")
    return reasons is None or (isinstance(reasons, list) and all(isinstance(each, str) for each in reasons))


def gpu_caveats(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Reasons in the states of GPUs (`GpuWatch.rows`) to doubt what was measured between them."""
    found = []
    for row in rows:
        before, after = row["before"], row["after"]
        if before is None or after is None:
            continue
        for name, title in _CLOCKS:
            was, became = before[name], after[name]
            if was and became is not None and abs(became - was) > _MOST_CLOCK_CHANGE * was:
                found.append(
                    f"{row['device']}: its {title} changed from {was:g} to {became:g} MHz while it was measured"
                )
        if before["power_limit_w"] != after["power_limit_w"]:
            found.append(
                f"{row['device']}: its power limit changed from {_shown(before, 'power_limit_w', 'W')} to "
                f"{_shown(after, 'power_limit_w', 'W')} while it was measured"
            )
        was, became = before["temperature_c"], after["temperature_c"]
        if was is not None and became is not None and abs(became - was) > _MOST_WARMING_C:
            found.append(f"{row['device']}: went from {was:g} to {became:g} °C while it was measured")
        reasons = {*(before["clock_reasons"] or ()), *(after["clock_reasons"] or ())} & _THROTTLING
        if reasons:
            found.append(f"{row['device']}: was slowed down while it was measured: {', '.join(sorted(reasons))}")
    return found


def gpu_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The same for people, a line for each GPU."""
    lines = []
    for row in rows:
        before, after = row["before"], row["after"]
        if before is None or after is None:
            lines.append(f"{row['device']}: not measured: {row.get('not_measured')}")
            continue
        figures = [
            f"{title} {_shown(before, name, unit)} before, {_shown(after, name, unit)} after"
            for name, title, unit in (
                *((name, title, "MHz") for name, title in _CLOCKS),
                ("temperature_c", "temperature", "°C"),
                ("power_limit_w", "power limit", "W"),
            )
        ]
        limits = dict.fromkeys((*(before["clock_reasons"] or ()), *(after["clock_reasons"] or ())))
        known = before["clock_reasons"] is not None and after["clock_reasons"] is not None
        told = (", ".join(limits) or "nothing") if known else "not measured"
        lines.append(f"{row['device']}: {'; '.join(figures)}; clocks limited by: {told}")
    return lines


def _shown(state: dict[str, Any], name: str, unit: str) -> str:
    return "not measured" if state[name] is None else f"{state[name]:g} {unit}"


def open_nvml(device: torch.device) -> Callable[[], GpuState] | str:
    """A GPU of this process as NVML knows it, by its UUID; the reason if there is no NVML for it."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return "NVML is for NVIDIA GPUs"
    return nvml_reader(str(torch.cuda.get_device_properties(device).uuid))


def nvml_reader(uuid: str) -> Callable[[], GpuState] | str:
    """A function that reads the GPU with this UUID, or why there is none."""
    try:
        import pynvml
    except ImportError as error:
        return f"nvidia-ml-py is not installed ({error}): {INSTALL}"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        return f"NVML: {error}"

    def read() -> GpuState:
        missing: dict[str, str] = {}

        def told(name: str, function: Callable[[], Any], scale: float = 1.0) -> float | None:
            try:
                return float(function()) * scale
            except pynvml.NVMLError as error:
                missing[name] = f"NVML: {error}"
                return None

        bits = told("clock_reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return GpuState(
            told("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            told("memory_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
            told("temperature_c", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            told("power_limit_w", lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle), 1e-3),
            None if bits is None else _names(int(bits)),
            missing,
        )

    return read


def _names(bits: int) -> tuple[str, ...]:
    known = tuple(name for bit, name in _REASONS.items() if bits & bit)
    others = bits & ~sum(_REASONS)
    return (*known, f"unknown ({others:#x})") if others else known
