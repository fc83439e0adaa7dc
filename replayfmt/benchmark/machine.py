"""The machine of a measurement: host, processors and load, energy counters, and the state of its GPUs.

`machine_context` has what Google Benchmark's JSON context has, read from the operating system, so that it can be tested
against a made-up /sys and /proc. `open_source` opens what says how much energy the machine takes, through zeus: power
and counters of GPUs, of processors (RAPL), and of systems on a chip. `GpuWatch` reads clocks, temperature, power limit
and throttle reasons of NVIDIA GPUs through NVML, before and after a measurement: a GPU that slowed down meanwhile was
measured as two devices. What the machine does not report is absent or None, with the reason, never zero.

Imports no torch; zeus, NVML and torch only when a source or a GPU is opened.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch


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


# Other programs with more than this share of the processors' time slow a measurement on the host down: they take its
# processor, or share a core, caches and memory with it. Up to a fifth, most processors stay free on most machines.
BUSY = 0.2


def others_had(share: float) -> str:
    """What `BackgroundLoad` found, in words."""
    return f"other programs had {share:.0%} of the processors' time"


class BackgroundLoad:
    """How much of the processors others have from when it is made to `end`: other programs here, and (time that was
    stolen from it) other virtual machines on the same host."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` is where proc is."""
        self._root = root
        self._before = _processor_times(root)

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


SourceKind = Literal["gpu", "soc", "cpu"]
KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
INSTALL = "pip install 'opreplay[energy]'"
# No processor takes that much: a counter that would have to have wrapped at such power was reset.
_MOST_WATTS = 10_000.0


class NoSource(Exception):
    """There is no source; the message says why."""


class SourceLost(Exception):
    """A source that was read before says nothing any more, or nothing that can be right."""


@dataclass(frozen=True)
class PowerSample:
    """What one device says at a moment: watts, and joules of its counter; None for what it does not say."""

    device: str
    watts: float | None
    joules: float | None


@dataclass(frozen=True)
class EnergySource:
    """An open source. `name` says what it is; `read` asks each of its devices."""

    name: str
    read: Callable[[], list[PowerSample]]

    def has_counters(self) -> bool:
        """Whether every device counts its energy."""
        return all(sample.joules is not None for sample in self.read())


def open_source(kinds: Sequence[str]) -> EnergySource:
    """The first of these kinds that this machine has. Raises NoSource with the reason of each."""
    openers: dict[str, Callable[[], EnergySource]] = {"gpu": _gpus, "soc": _soc, "cpu": _processors}
    reasons = []
    for kind in kinds:
        try:
            return openers[kind]()
        except NoSource as error:
            reasons.append(str(error))
    raise NoSource("; ".join(dict.fromkeys(reasons)))


def _opened(what: str, function: str) -> Any:
    """What a function of zeus.device returns. Raises NoSource."""
    try:
        from zeus import device
    except ImportError as error:
        raise NoSource(f"zeus is not installed ({error}): {INSTALL}") from error
    try:
        return getattr(device, function)()
    except Exception as error:  # zeus has an exception for each way in which a driver can be missing
        raise NoSource(f"{what} says what energy it takes ({type(error).__name__}: {error})") from error


def _gpus() -> EnergySource:
    gpus = _opened("no GPU", "get_gpus")
    if not len(gpus):
        raise NoSource("zeus finds no GPU")
    readers = [_Gpu(gpus, index) for index in range(len(gpus))]
    return EnergySource(f"{type(gpus).__name__} of zeus", lambda: [reader.read() for reader in readers])


class _Gpu:
    """One GPU: its power, instant or else averaged by the board, and its counter; it has one of them at least."""

    def __init__(self, gpus: Any, index: int) -> None:
        self._index = index
        reasons = []
        self._power = self._energy = None
        for function in (gpus.get_instant_power_usage, gpus.get_average_power_usage):
            try:
                function(index)
            except Exception as error:  # boards have one, the other, or neither
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            self._power = function
            break
        try:
            if gpus.supports_get_total_energy_consumption(index):
                gpus.get_total_energy_consumption(index)
                self._energy = gpus.get_total_energy_consumption
        except Exception as error:  # likewise
            reasons.append(f"{type(error).__name__}: {error}")
        if self._power is None and self._energy is None:
            raise NoSource(f"GPU {index} does not say what power it takes ({'; '.join(reasons)})")

    def read(self) -> PowerSample:
        milliwatts = None if self._power is None else self._power(self._index)
        millijoules = None if self._energy is None else self._energy(self._index)
        return PowerSample(
            str(self._index),
            None if milliwatts is None else milliwatts / 1e3,
            None if millijoules is None else millijoules / 1e3,
        )


def _processors() -> EnergySource:
    cpus = _opened("no processor", "get_cpus")
    readers = [_processor(f"cpu:{index}", cpu) for index, cpu in enumerate(cpus.cpus)]
    if not readers:
        raise NoSource("zeus finds no processor with energy counters")
    return EnergySource("RAPL through zeus", lambda: [sample for reader in readers for sample in reader()])


def _processor(name: str, cpu: Any) -> Callable[[], list[PowerSample]]:
    """A function that reads the counters of a processor: of its package, and of its memory if that has one."""
    package = getattr(cpu, "rapl_file", None)
    if package is None:  # zeus's daemon reads them, and follows their wraps
        return lambda: _told(name, cpu.get_total_energy_consumption())
    zones = {name: package} if cpu.dram is None else {name: package, f"{name}:dram": cpu.dram}
    counters = {
        zone: WrappingCounter(zone, _microjoules(file.energy_uj_path), file.max_energy_range_uj / 1e6)
        for zone, file in zones.items()
    }
    return lambda: [PowerSample(zone, None, counter.joules()) for zone, counter in counters.items()]


def _microjoules(path: str) -> Callable[[], float]:
    def read() -> float:
        with open(path, encoding="ascii") as file:
            return float(file.read()) / 1e6

    return read


def _told(name: str, energy: Any) -> list[PowerSample]:
    found = [PowerSample(name, None, energy.cpu_mj / 1e3)]
    return found if energy.dram_mj is None else [*found, PowerSample(f"{name}:dram", None, energy.dram_mj / 1e3)]


class WrappingCounter:
    """A counter that begins at 0 again after `range_j` joules, as one that does not.

    It has to be read more often than it wraps. zeus follows wraps, too, but notices each of them up to a second later,
    and until then says too little.
    """

    def __init__(
        self, name: str, read: Callable[[], float], range_j: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._read, self._range, self._now = name, read, range_j, now
        self._before = 0.0
        self._last, self._when = read(), now()

    def joules(self) -> float:
        """Raises SourceLost if it fell without having wrapped."""
        value, when = self._read(), self._now()
        if value < self._last:
            risen = self._range - self._last + value
            if risen > _MOST_WATTS * (when - self._when):
                raise SourceLost(f"the energy counter of {self._name} fell from {self._last:g} to {value:g} J")
            self._before += self._range
        self._last, self._when = value, when
        return self._before + value


def _soc() -> EnergySource:
    soc = _opened("no system on a chip", "get_soc")

    def read() -> list[PowerSample]:
        energy = soc.get_total_energy_consumption()
        whole = getattr(energy, "total_energy_mj", None)
        if whole is not None:  # Jetson: the board's input
            return [PowerSample("soc", None, whole / 1e3)]
        parts = {name: getattr(energy, f"{name}_mj", None) for name in _SOC_PARTS}
        return [PowerSample(f"soc:{name}", None, value / 1e3) for name, value in parts.items() if value is not None]

    if not read():
        raise NoSource(f"{type(soc).__name__} of zeus names no energy")
    return EnergySource(f"{type(soc).__name__} of zeus", read)


# Of a Jetson that does not measure its input, and of Apple's: parts that do not contain each other.
_SOC_PARTS = ("cpu_energy", "gpu_energy", "cpu_total", "gpu", "gpu_sram", "dram", "ane")


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
_POWER_CAP = _REASONS[0x4]
_THROTTLING = frozenset(_REASONS[bit] for bit in (0x4, 0x8, 0x20, 0x40, 0x80))
# Clocks move in small steps all the time.
_MOST_CLOCK_CHANGE = 0.05
_MOST_WARMING_C = 15
_CLOCKS = (("sm_clock_mhz", "SM clock"), ("memory_clock_mhz", "memory clock"))


@dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. `clock_reasons` say what its clocks are limited by; None if that is not known."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_limit_w: float | None = None
    clock_reasons: list[str] | None = None
    not_measured: dict[str, str] = field(default_factory=dict)


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
                "before": None if before is None else asdict(before),
                "after": None if after is None else asdict(after),
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


def power_capped(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the power limit, and nothing else, lowered the clocks of GPUs (`GpuWatch.rows`)."""
    return {reason for row in rows for reason in _slowed_by(row)} == {_POWER_CAP}


def _slowed_by(row: dict[str, Any]) -> set[str]:
    states = [state for state in (row["before"], row["after"]) if state is not None]
    return {reason for state in states for reason in state["clock_reasons"] or ()} & _THROTTLING


def gpu_caveats(rows: Sequence[dict[str, Any]], *, hardest: bool = False) -> list[str]:
    """Reasons in the states of GPUs (`GpuWatch.rows`) to doubt what was measured between them. `hardest`: the work
    takes all the power that there is, so what the power limit does to the clock belongs to the measurement."""
    found = []
    capped = hardest and power_capped(rows)
    for row in rows:
        before, after = row["before"], row["after"]
        if before is None or after is None:
            continue
        for name, title in _CLOCKS:
            was, became = before[name], after[name]
            if capped and name == "sm_clock_mhz":
                continue
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
        reasons = _slowed_by(row)
        if reasons and not capped:
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


def _names(bits: int) -> list[str]:
    known = [name for bit, name in _REASONS.items() if bits & bit]
    others = bits & ~sum(_REASONS)
    return [*known, f"unknown ({others:#x})"] if others else known
