"""What a replay and a capture ask of devices other than the host, by the modules that PyTorch has for them.

A kind of device has a module (`torch.cuda`, `torch.xpu`, that of an out-of-tree backend), which names its functions
like those of `torch.cuda`. What a module lacks is unknown: None, never a guess.

A capture must not begin to use a device: that costs seconds and memory, fixes CUDA_VISIBLE_DEVICES, and children that
the program forks later cannot use the device any more. It asks `kind_here`, which the build answers, and `in_use`
before anything else; `torch.cuda.is_available()` already initializes the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

HOST = "cpu"
# What casts, of every kind of device.
AUTOCAST_KEYS = tuple(
    key
    for name, key in torch._C.DispatchKey.__members__.items()
    if name.startswith("Autocast") and name != "AutocastFunctionality"
)
NOTHING = "meta"  # devices of this kind hold no data
# Clocks of accelerators are slower: what should take a time takes at least that.
_CYCLES_PER_NS = 2.0
# What takes the place of a sleep: each rewriting of a small buffer takes about so long.
_REWRITTEN_BYTES = 1 << 20
_REWRITING_NS = 5_000


def is_accelerator(device: torch.device) -> bool:
    """Whether a device computes, and is not the host."""
    return device.type not in (HOST, NOTHING)


def device_module(kind: str) -> Any:
    """The module of a kind of device; None if this PyTorch has none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


def index_of(device: torch.device) -> int:
    """The index of a device; without one, that of the current device of its kind."""
    return int(device_module(device.type).current_device()) if device.index is None else device.index


def count(kind: str) -> int:
    """How many devices of a kind this machine has."""
    if kind == HOST:
        return 1
    return torch.accelerator.device_count() if kind == kind_here() else 0


def available() -> list[torch.device]:
    """The accelerators of this machine."""
    kind = kind_here()
    return [torch.device(kind, index) for index in range(count(kind))] if kind else []


def kind_here() -> str:
    """The kind of accelerator of this PyTorch, whether or not one is there; "" if it has none."""
    accelerator = torch.accelerator.current_accelerator()
    return "" if accelerator is None else accelerator.type


@cache
def pins_memory(kind: str) -> bool:
    """Whether the host has memory from which copies to devices of a kind need not wait."""
    try:
        return kind == kind_here() and torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False  # an out-of-tree backend need not have any


def used() -> list[torch.device]:
    """The accelerators of this machine, if this process has begun to use their kind."""
    return available() if in_use(kind_here()) else []


def synchronize() -> None:
    """Wait for all work of the accelerators in use."""
    for device in used():
        if _has_work(device):
            torch.accelerator.synchronize(device)


def _has_work(device: torch.device) -> bool:
    """Whether this process has given a device work. To wait for one that has none would give it a context."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None) if device.type == "cuda" else None
    return has_context is None or bool(has_context(device.index))


def in_use(kind: str) -> bool:
    """Whether this process has begun to use devices of a kind. Does not begin to."""
    module = device_module(kind) if kind else None
    return module is not None and bool(getattr(module, "is_initialized", lambda: True)())


def make_ready(kind: str) -> None:
    """Begin to use devices of a kind."""
    getattr(device_module(kind), "init", lambda: None)()


def spinning(device: torch.device) -> Callable[[float], None]:
    """A function that gives a device's current stream work for about so many nanoseconds, which uses little memory."""
    sleep = getattr(device_module(device.type), "_sleep", None)
    if sleep is None:
        buffer = torch.zeros(_REWRITTEN_BYTES, dtype=torch.uint8, device=device)

        def rewrite(ns: float) -> None:
            for _ in range(max(1, round(ns / _REWRITING_NS))):
                buffer.add_(1)

        return rewrite

    def spin(ns: float) -> None:
        with torch.accelerator.device_index(index_of(device)):
            sleep(int(ns * _CYCLES_PER_NS))

    return spin


def default_generator(device: torch.device) -> torch.Generator | None:
    """The device's default random generator; None if its module does not show it, or is not in use."""
    if device.type == HOST:
        return torch.default_generator
    if not in_use(device.type) or not hasattr(device_module(device.type), "default_generators"):
        return None
    found: torch.Generator = device_module(device.type).default_generators[index_of(device)]
    return found


def default_generators() -> list[torch.Generator]:
    """The default generators of the host and of the accelerators in use."""
    found = [default_generator(device) for device in (torch.device(HOST), *used())]
    return [generator for generator in found if generator is not None]


class Current:
    """Where this thread puts its work: the current accelerator, and the current stream of each that is in use."""

    def __init__(self) -> None:
        devices = used()
        self._index = torch.accelerator.current_device_index() if devices else -1
        self._streams = [torch.accelerator.current_stream(device) for device in devices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Current) and (self._index, self._streams) == (other._index, other._streams)

    def restore(self) -> None:
        """Have it so again."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        if self._streams:
            torch.accelerator.set_device_index(self._index)


def name_of(device: torch.device) -> str:
    """The marketing name of an accelerator; "" if it is not known."""
    name = getattr(device_module(device.type), "get_device_name", None)
    return str(name(device)) if name is not None else ""


def properties_of(device: torch.device) -> Any:
    """What the module of an accelerator says of it; None if it says nothing."""
    properties = getattr(device_module(device.type), "get_device_properties", None)
    return None if properties is None else properties(index_of(device))


def reset_peak_memory(device: torch.device) -> int | None:
    """Forget the peak of an accelerator's allocator. What is allocated now, in bytes; None if it is not known."""
    module = device_module(device.type)
    if not hasattr(module, "reset_peak_memory_stats") or not hasattr(module, "memory_allocated"):
        return None
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def peak_memory(device: torch.device) -> int | None:
    """The peak of an accelerator's allocator in bytes, since it was reset; None if it is not known."""
    peak = getattr(device_module(device.type), "max_memory_allocated", None)
    return None if peak is None else int(peak(device))


def free_memory(device: torch.device) -> int | None:
    """What an accelerator has left, in bytes; None if it is not known."""
    info = getattr(device_module(device.type), "mem_get_info", None)
    return None if info is None else int(info(device)[0])
