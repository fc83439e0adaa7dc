"""Operators by name, from the dispatcher's registry and from nowhere else.

`torch.ops` is a Python object with attributes of its own: `torch.ops.load_library` loads a library. A name that comes
from a file is therefore first asked for in the registry, and what comes of it must be the operator of that name.
TorchScript has more operators than the dispatcher. These do no work that is captured, and are not found here.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from replayfmt.format.operator_names import name_problem


def find_overload(name: str, overload: str = "default") -> OpOverload | None:
    """The operator that is registered as `aten::add` with the overload `Tensor`; None if there is none."""
    if name_problem(name, overload) or not is_registered(name, overload):
        return None
    packet = _packet(name)
    found = getattr(packet, overload, None) if packet is not None else None
    if not isinstance(found, OpOverload) or found.name() != _registered_name(name, overload):
        return None
    return found


def is_registered(name: str, overload: str = "default") -> bool:
    """Whether the dispatcher has this overload."""
    try:
        torch._C._dispatch_find_schema_or_throw(name, _dispatcher_overload(overload))
    except RuntimeError:
        return False
    return True


def overloads_of(name: str) -> list[OpOverload]:
    """Every registered overload of a name, in PyTorch's order."""
    packet = None if name_problem(name, "default") else _packet(name)
    found = [find_overload(name, overload) for overload in packet.overloads()] if packet is not None else []
    return [each for each in found if each is not None]


def _packet(name: str) -> OpOverloadPacket | None:
    namespace, _separator, base = name.partition("::")
    operators = getattr(torch.ops, namespace, None)
    packet = getattr(operators, base, None) if isinstance(operators, _OpNamespace) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def _dispatcher_overload(overload: str) -> str:
    return "" if overload == "default" else overload


def _registered_name(name: str, overload: str) -> str:
    return name if overload == "default" else f"{name}.{overload}"
