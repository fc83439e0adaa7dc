"""What says how much energy a machine takes, through zeus: power and energy counters of GPUs (NVML, AMD SMI), counters
of processors (RAPL) and of systems on a chip (Jetson, Apple).

A counter is cumulative, in joules since some moment. Imports no torch, and zeus only to open a source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
