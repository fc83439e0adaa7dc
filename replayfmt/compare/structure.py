"""What differs between two captures without running anything: origin, settings, counts, how ops are called."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from replayfmt.format.codes import RecordKind
from replayfmt.format.model import DeviceValue, Record, TensorValue, Value
from replayfmt.format.reader import CaptureReader

from .alignment import Alignment
from .trace import Trace

_TEXTS = ("torch_version", "python_version", "platform", "cpu", "cpu_capability")
_TOGGLED = frozenset({"grad_enabled", "inference_mode"})  # all the time, and without an effect on results
_MOST_CALLS = 10_000  # pairs whose arguments are looked at


@dataclass(frozen=True)
class StructureDifference:
    """`what`: version, setting, device, policy, kernel_calls, arguments. `name` says which one; a and b are its values.
    `count` is how many pairs of ops differ so, the first of them at the ordinals `at`."""

    what: str
    name: str
    a: Any
    b: Any
    count: int = 1
    at: tuple[int, int] | None = None


def origin_differences(a: CaptureReader, b: CaptureReader) -> list[StructureDifference]:
    """Versions, settings, devices, and the policy of digests."""
    found = []

    def look(what: str, name: str, one: Any, other: Any) -> None:
        if one != other:
            found.append(StructureDifference(what, name, one, other))

    for name in _TEXTS:
        look("version", name, getattr(a.session, name), getattr(b.session, name))
    for what, one, other in (
        ("version", a.session.libraries, b.session.libraries),
        ("setting", a.session.settings, b.session.settings),
    ):
        for name in sorted(one.keys() | other.keys()):
            look(what, name, one.get(name), other.get(name))
    one, other = _changed_settings(a), _changed_settings(b)
    for name in sorted(one.keys() | other.keys()):
        look("setting", f"{name}, set on the way", one.get(name), other.get(name))
    devices = [[f"{each} ({each.name})" if each.name else str(each) for each in r.devices if each] for r in (a, b)]
    look("device", "devices", ", ".join(devices[0]), ", ".join(devices[1]))
    look("policy", "digests", a.session.policies.get("digests"), b.session.policies.get("digests"))
    return found


def _changed_settings(reader: CaptureReader) -> dict[str, str]:
    """The values that settings were changed to while the capture was made, in order, without repetitions."""
    chosen = [
        number
        for number, signature in enumerate(reader.signatures)
        if signature is not None
        and signature.kind is RecordKind.global_state
        and any(node.name not in _TOGGLED for node in signature.args)
    ]
    found: dict[str, list[str]] = {}
    for index in range(len(reader.record_frames) if chosen else 0):
        frame = reader.frame(index)
        for row in np.flatnonzero(np.isin(frame.signature, chosen)).tolist():
            record = reader.record(frame.first_ordinal + row)
            for node, value in zip(record.signature.args, record.args, strict=True):
                values = found.setdefault(node.name, [])
                if node.name not in _TOGGLED and str(value) not in values:
                    values.append(str(value))
    return {name: ", ".join(values) for name, values in found.items() if values}


def count_differences(a: CaptureReader, b: CaptureReader) -> list[StructureDifference]:
    """Kernels that one capture calls more often than the other."""
    calls = []
    for reader in (a, b):
        counts: Counter[str] = Counter()
        for number, count in reader.summary.kernel_calls.items():
            kernel = reader.kernels[number]
            if kernel is not None:
                counts[kernel.qualified_name] += count
        calls.append(counts)
    names = sorted(calls[0].keys() | calls[1].keys(), key=lambda name: (-abs(calls[0][name] - calls[1][name]), name))
    return [
        StructureDifference("kernel_calls", name, calls[0][name], calls[1][name])
        for name in names
        if calls[0][name] != calls[1][name]
    ]


def argument_differences(
    a: CaptureReader, b: CaptureReader, traces: tuple[Trace, Trace], alignment: Alignment
) -> list[StructureDifference]:
    """How paired ops are called differently, grouped by kernel and argument."""
    groups: dict[tuple[str, str], StructureDifference] = {}
    ops = np.flatnonzero((alignment.partner_of_a >= 0) & ~alignment.exact)[:_MOST_CALLS]
    for op in ops.tolist():
        at = int(traces[0].ordinal[op]), int(traces[1].ordinal[alignment.partner_of_a[op]])
        records = a.record(at[0]), b.record(at[1])
        kernel = a.kernels[records[0].signature.kernel].qualified_name
        for name, one, other in changed_arguments(*records):
            first = StructureDifference("arguments", f"{kernel} {name}", one, other, 0, at)
            known = groups.get((kernel, name), first)
            groups[kernel, name] = replace(known, count=known.count + 1)
    return list(groups.values())


def changed_arguments(one: Record, other: Record) -> list[tuple[str, str, str]]:
    """The arguments in which two calls differ besides the tensors' content, as (name, text, text)."""
    both = [
        {node.name: described(value) for node, value in zip(record.signature.args, record.args, strict=True)}
        for record in (one, other)
    ]
    names = dict.fromkeys([*both[0], *both[1]])
    return [
        (name, both[0].get(name, "absent"), both[1].get(name, "absent"))
        for name in names
        if both[0].get(name) != both[1].get(name)
    ]


def described(value: Value) -> str:
    """A value without ids: a tensor's dtype, sizes, and strides if it is not contiguous."""
    if isinstance(value, TensorValue):
        meta = value.meta
        step, dense = 1, []
        for size in reversed(meta.sizes):
            dense.append(step)
            step *= max(size, 1)
        strides = "" if tuple(dense[::-1]) == meta.strides else f"{{{','.join(map(str, meta.strides))}}}"
        offset = f"+{value.offset}" if value.offset else ""
        return f"{meta.dtype.name}[{','.join(map(str, meta.sizes))}]{strides}{offset}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return "device" if isinstance(value, DeviceValue) else str(value)
