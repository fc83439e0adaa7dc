"""Rows made the slow, plain way from decoded records: what the fast path of the dump must agree with, row for row."""

from __future__ import annotations

import math
from typing import Any

from replayfmt.format.codes import DType, Layout, MemoryFormat, RecordKind, TensorFlag, ValueKind
from replayfmt.format.model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Node,
    OpaqueValue,
    PayloadValue,
    ProcessGroupValue,
    RangeValue,
    RecipeValue,
    Record,
    StorageValue,
    TensorDigest,
    TensorValue,
)
from replayfmt.format.reader import CaptureReader

ID_TYPES = StorageValue | GeneratorValue | PayloadValue | RangeValue | RecipeValue
PLAIN_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    DType,
    Layout,
    MemoryFormat,
    DeviceValue,
    ProcessGroupValue,
    OpaqueValue,
)


def plain(reader: CaptureReader, value: Any) -> Any:
    """A plain value as JSON holds it."""
    if isinstance(value, DType | Layout | MemoryFormat):
        return value.name
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= 2**53 else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return {"real": plain(reader, value.real), "imag": plain(reader, value.imag)}
    if isinstance(value, DeviceValue):
        return str(reader.devices[value.id])
    return value.name if isinstance(value, ProcessGroupValue) else value.text


def exact(value: Any) -> Any:
    """JSON with integers that a double would round as strings."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value


def content(reader: CaptureReader, node: Node, value: Any) -> dict[str, Any]:
    """A value's object, without its name."""
    row: dict[str, Any] = {"type": node.kind.name}
    if isinstance(value, TensorValue):
        row |= {
            "tensor": value.id,
            "storage": value.storage or None,
            "dtype": value.meta.dtype.name,
            "sizes": list(value.meta.sizes),
            "strides": list(value.meta.strides),
            "offset": plain(reader, value.offset),
        }
        if len(reader.devices) > 2:
            row["device"] = str(reader.devices[value.meta.device])
        if value.meta.layout != Layout.strided:
            row["layout"] = value.meta.layout.name
        if value.meta.flags:
            row["flags"] = [flag.name for flag in TensorFlag if flag in value.meta.flags]
        return row
    if isinstance(value, ID_TYPES):
        return row | {node.kind.name: value.id}
    if isinstance(value, CompositeValue):
        return row | {"form": value.form, "parts": items(reader, node, value.parts)}
    if not isinstance(value, list | tuple):
        return row | {"value": plain(reader, value)}
    kinds = {child.kind.name for child in node.children}
    row["item_type"] = None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed"
    if row["item_type"] != "mixed" and all(isinstance(item, PLAIN_TYPES) for item in value):
        return row | {"value": [plain(reader, item) for item in value]}
    return row | {"value": items(reader, node, value)}


def items(reader: CaptureReader, node: Node, values: Any) -> list[Any]:
    return [content(reader, child, value) for child, value in zip(node.children, values, strict=True)]


def tensors_in(value: Any) -> list[TensorValue]:
    if isinstance(value, TensorValue):
        return [value]
    parts = value.parts if isinstance(value, CompositeValue) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def row(reader: CaptureReader, record: Record) -> dict[str, Any]:
    """The row of one record, its keys in order."""
    kind, signature = record.kind, record.signature
    start: dict[str, Any] = {"kind": kind.name, "ordinal": record.ordinal}
    scope = reader.scope_path(record.scope)
    placement = reader.placements[record.placement] if record.placement else None
    said: dict[str, Any] = (
        {}
        if placement is None
        else {"streams": {str(reader.devices[device]): stream for device, stream in placement.streams}}
    )
    said |= {} if record.annotation is None else {"annotation": exact(record.annotation)}
    if kind == RecordKind.op:
        kernel = reader.kernels[signature.kernel]
        tensors = tensors_in(list(record.results)) or tensors_in(list(record.args))
        frame = reader.frame(reader.frame_of(record.ordinal))
        measured = {} if frame.device_duration_ns is None else {"device_duration_ns": record.device_duration_ns}
        return start | {
            "op": kernel.name,
            "overload": kernel.overload,
            "kernel": signature.kernel,
            "scope": scope,
            "device": str(reader.devices[tensors[0].meta.device]) if tensors else None,
            "thread": record.thread,
            "status": signature.status.name,
            "start_ns": record.start_ns if reader.session.has_times else None,
            "duration_ns": record.duration_ns,
            **measured,
            "args": [
                {"name": node.name} | content(reader, node, value)
                for node, value in zip(signature.args, record.args, strict=True)
            ],
            "results": [
                content(reader, node, value) for node, value in zip(signature.results, record.results, strict=True)
            ],
            **said,
            "frame_offset": record.frame_offset,
        }
    fields: dict[str, Any] = {}
    for node, value in zip(signature.args, record.args, strict=True):
        if kind in (RecordKind.host_read, RecordKind.digest) and node.name == "hash_low":
            break
        if node.kind in (ValueKind.tensor, ValueKind.composite):
            fields["value"] = content(reader, node, value)
        elif isinstance(value, RangeValue | RecipeValue):
            fields |= {node.name: None, node.kind.name: value.id}
        else:
            fields[node.name] = value.id if isinstance(value, ID_TYPES) else plain(reader, value)
    if kind == RecordKind.global_state:
        fields = {"settings": fields}
    if kind in (RecordKind.host_read, RecordKind.digest):
        digest = TensorDigest.from_record(record)
        names = ("elements", "nan", "inf", "min", "max", "mean", "l2")
        fields["hash"] = None if digest is None else digest.hex
        fields |= {name: None if digest is None else plain(reader, getattr(digest, name)) for name in names}
        fields["sample"] = None if digest is None else [plain(reader, value) for value in digest.sample]
    return (
        start
        | fields
        | {
            "scope": scope,
            "thread": record.thread,
            "start_ns": record.start_ns if reader.session.has_times else None,
            **said,
            "frame_offset": record.frame_offset,
        }
    )
