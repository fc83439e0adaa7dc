"""The mapping of captured devices and generators to this machine's, and the peak memory of a replay on each.

On the CPU the peak is the resident set's high-water mark, which Linux lets a process reset; on accelerators it is the
allocator's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from replayfmt.errors import UsageError
from replayfmt.format.model import Device, Generator
from replayfmt.pytorch import accelerators

from ..results import PeakMemory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = b"5"
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class MemoryWatch:
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
    total = system_bytes("MemTotal", "SwapTotal")
    if total is None:
        return None
    for limit in _GROUP_LIMITS:
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def system_bytes(*names: str) -> int | None:
    """The sum of what Linux says of its memory under these names; None if the system does not report it."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(int(fields[name].split()[0]) * 1024 for name in names)
    except (OSError, KeyError, ValueError):
        return None


def _status_bytes(name: str) -> int | None:
    try:
        with _STATUS.open("rb", buffering=0) as status:
            text = status.read()
    except OSError:
        return None
    found = text.partition(f"\n{name}:".encode())[2].split(None, 1)
    return int(found[0]) * 1024 if found else None


@dataclass(frozen=True)
class DeviceMap:
    """`targets[id]` is the device that replays captured device `id`; None for id 0 and for what cannot be mapped."""

    captured: tuple[Device | None, ...]
    targets: tuple[torch.device | None, ...]

    def target(self, device_id: int) -> torch.device:
        target = self.targets[device_id]
        assert target is not None, "a plan with unmapped devices is refused before anything asks for them"
        return target

    def crosses(self, device_id: int) -> bool:
        """Whether the captured device is replayed on another kind."""
        captured = self.captured[device_id]
        return captured is not None and captured.kind != self.target(device_id).type

    @property
    def host_goes_to(self) -> torch.device | None:
        """The device on which the CPU's work is replayed; None if that is the CPU."""
        for captured, target in zip(self.captured, self.targets, strict=True):
            if captured is not None and captured.kind == "cpu" and target is not None and target.type != "cpu":
                return target
        return None

    def in_use(self) -> list[torch.device]:
        """Every device that does work, accelerators first."""
        unique = dict.fromkeys(target for target in self.targets if target is not None and target.type != "meta")
        return sorted(unique, key=lambda device: (device.type == "cpu", device.type, device.index or 0))


def map_devices(captured: Sequence[Device | None], requested: Sequence[str]) -> tuple[DeviceMap, list[str]]:
    """The mapping and the reasons against it, each a sentence that names a --device that would work.

    `captured` is indexed by device id (0 unused). Raises UsageError if a request is not a device of this machine.
    """
    wanted = [_requested(text) for text in requested]
    accelerators = sorted(
        (device for device in captured if device is not None and device.is_accelerator),
        key=lambda device: (device.kind, device.index),
    )
    findings: list[str] = []
    chosen: dict[Device, torch.device] = {}
    if not wanted:
        for device in accelerators:
            target = _same(device)
            if target is None:
                findings.append(
                    f"the capture used {_described(device)}, which is not here; map it with "
                    f"{_suggestion(len(accelerators))}"
                )
            else:
                chosen[device] = target
    elif not accelerators:
        if len(wanted) > 1:
            findings.append(f"the capture used one device (cpu), {len(wanted)} were given; give --device once")
        chosen.update((host, wanted[0]) for host in captured if host is not None and host.kind == "cpu")
    elif len(wanted) != len(accelerators):
        names = ", ".join(str(device) for device in accelerators)
        findings.append(
            f"the capture used {len(accelerators)} accelerator(s) ({names}), {len(wanted)} device(s) were "
            f"given; give --device {len(accelerators)} time(s), in that order"
        )
    else:
        chosen.update(zip(accelerators, wanted, strict=True))
    targets: list[torch.device | None] = []
    for captured_device in captured:
        if captured_device is None:
            targets.append(None)
        elif captured_device in chosen:
            targets.append(chosen[captured_device])
        elif not captured_device.is_accelerator:
            targets.append(torch.device(captured_device.kind))
        else:
            targets.append(None)
    return DeviceMap(tuple(captured), tuple(targets)), findings


def device_groups(captured: Sequence[Device | None], requested: Sequence[str]) -> list[tuple[str, ...]]:
    """The requested devices in groups, each of as many as a capture needs (`captured`, by device id): one replay can
    run on each. One group of none if none are requested.

    Raises UsageError if they are not a multiple, or two groups are the same.
    """
    needed = max(1, sum(device is not None and device.is_accelerator for device in captured))
    if len(requested) % needed:
        raise UsageError(
            f"--device: {len(requested)} were given, and the capture used {needed} accelerators; give a multiple of it"
        )
    groups = [tuple(requested[first : first + needed]) for first in range(0, len(requested), needed)]
    if len(set(groups)) < len(groups):
        raise UsageError(f"--device: {', '.join(requested)}: the same twice; give each device once")
    return groups or [()]


def _described(device: Device) -> str:
    return f"{device} ({device.name})" if device.name else str(device)


def _suggestion(count: int) -> str:
    """What to add to the command line so that `count` accelerators get a device here."""
    here = accelerators.available()
    return " ".join(f"--device={device}" for device in (here[:count] if len(here) >= count else ["cpu"] * count))


def _same(device: Device) -> torch.device | None:
    """The device here of the same kind and index, if there is one."""
    if max(device.index, 0) >= accelerators.count(device.kind):
        return None
    return torch.device(device.kind, max(device.index, 0))


def _requested(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"--device={text}: not a device; available: {_available()}") from None
    if device.type == "meta":
        raise UsageError("--device=meta: the meta device holds no data, nothing can be replayed on it")
    count = accelerators.count(device.type)
    index = device.index or 0
    if index >= count:
        raise UsageError(
            f"--device={text}: this machine has {count} {device.type} device(s); available: {_available()}"
        )
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, index)


def _available() -> str:
    return ", ".join(["cpu", *map(str, accelerators.available())])


def map_generators(
    captured: Sequence[Generator | None], devices: DeviceMap, elsewhere: bool = False
) -> tuple[torch.Generator | None, ...]:
    """The generator used for each captured generator, by id; explicit ones are made here. With `elsewhere` the
    host's default one, which ops draw from that drew on another device, comes after them.

    Random numbers of a CPU capture are always drawn on the CPU. None if a generator's numbers cannot be drawn on
    the mapped device; a plan that needs one is refused.
    """
    made = [None if generator is None else _generator(generator, devices) for generator in captured]
    return (*made, torch.default_generator) if elsewhere else tuple(made)


def _generator(generator: Generator, devices: DeviceMap) -> torch.Generator | None:
    device = devices.captured[generator.device]
    target = devices.targets[generator.device]
    if device is None or target is None:
        return None
    if device.kind == "cpu":
        return torch.default_generator if generator.default else torch.Generator("cpu")
    if device.kind != target.type or target.type == "meta":
        return None
    if not generator.default:
        return torch.Generator(target)
    accelerators.make_ready(target.type)
    return accelerators.default_generator(target)
