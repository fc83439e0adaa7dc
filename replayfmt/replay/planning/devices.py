"""The mapping of captured devices and generators to this machine's.

Without a request the captured kinds and indices are used. A request maps captured accelerators in the order of their
index; the host's own storages stay on the host unless the CPU is the only captured device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayfmt.errors import UsageError
from replayfmt.format.model import Device, Generator
from replayfmt.pytorch import accelerators


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
        (device for device in captured if device is not None and device.kind not in ("cpu", "meta")),
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
        elif captured_device.kind in ("cpu", "meta"):
            targets.append(torch.device(captured_device.kind))
        else:
            targets.append(None)
    return DeviceMap(tuple(captured), tuple(targets)), findings


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
    made: list[torch.Generator | None] = []
    for generator in captured:
        made.append(None if generator is None else _generator(generator, devices))
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
