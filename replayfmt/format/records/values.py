"""One record out of a frame's columns: its arguments and results as model values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..codes import UNKNOWN_DEVICE_NS, UNKNOWN_NS, DType, Layout, MemoryFormat, ValueKind
from ..definitions.reading import Frozen
from ..model import (
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
    TensorValue,
    Value,
)
from .record_frames import RecordFrame

V = ValueKind


class _Slots:
    """A record's slots, taken one after the other as the nodes ask for them."""

    def __init__(self, frame: RecordFrame, row: int, definitions: Frozen) -> None:
        def between(first: object, slots: object) -> list:
            return slots[first[row] : first[row + 1]].tolist()  # type: ignore[index]

        self._frame = frame
        self._definitions = definitions
        self._tensors = iter(between(frame.tensor_first, frame.tensor_slots))
        self._ints: Iterator[int] = iter(between(frame.int_first, frame.ints))
        self._floats: Iterator[float] = iter(between(frame.float_first, frame.floats))

    def value(self, node: Node) -> Value:
        """The value of one node and of what is below it. Nesting is bounded: definitions/signatures.py did that."""
        kind = node.kind
        if kind == V.tensor:
            row, frame = next(self._tensors), self._frame
            return TensorValue(
                int(frame.tensor_id[row]),
                int(frame.tensor_storage[row]),
                int(frame.tensor_offset[row]),
                self._definitions.metas[int(frame.tensor_meta[row])],
            )
        if kind == V.int:
            return next(self._ints)
        if kind == V.float:
            return next(self._floats)
        if kind == V.none:
            return None
        constant = node.constant
        if kind == V.bool:
            return bool(constant)
        if kind == V.string:
            return str(constant)
        if kind == V.list:
            return [self.value(child) for child in node.children]
        if kind == V.tuple:
            return tuple(self.value(child) for child in node.children)
        return self._rare(node)

    def _rare(self, node: Node) -> Value:
        kind, constant = node.kind, node.constant
        if kind == V.complex:
            return complex(next(self._floats), next(self._floats))
        if kind == V.storage:
            return StorageValue(next(self._ints))
        if kind == V.generator:
            return GeneratorValue(next(self._ints))
        if kind == V.payload:
            return PayloadValue(next(self._ints))
        if kind == V.range:
            return RangeValue(next(self._ints))
        if kind == V.recipe:
            return RecipeValue(next(self._ints))
        if kind == V.composite:
            return CompositeValue(str(constant), tuple(self.value(child) for child in node.children))
        if kind == V.process_group:
            return ProcessGroupValue(str(constant))
        if kind == V.opaque:
            return OpaqueValue(str(constant))
        assert isinstance(constant, int)
        if kind == V.device:
            return DeviceValue(constant)
        return {V.dtype: DType, V.layout: Layout, V.memory_format: MemoryFormat}[kind](constant)


def decode_record(frame: RecordFrame, row: int, definitions: Frozen) -> Record:
    """Record `row` of a frame."""
    number = int(frame.signature[row])
    signature = definitions.signatures[number]
    slots = _Slots(frame, row, definitions)
    return Record(
        ordinal=frame.first_ordinal + row,
        signature_id=number,
        signature=signature,
        scope=int(frame.scope[row]),
        thread=int(frame.thread[row]),
        start_ns=int(frame.start_ns[row]),
        duration_ns=_unless_unknown(frame.duration_ns, row, UNKNOWN_NS),
        device_duration_ns=_unless_unknown(frame.device_duration_ns, row, UNKNOWN_DEVICE_NS),
        args=tuple(slots.value(node) for node in signature.args),
        results=tuple(slots.value(node) for node in signature.results),
        frame_offset=frame.offset,
        placement=0 if frame.placement is None else int(frame.placement[row]),
        annotation=None if frame.annotation is None else definitions.annotation(int(frame.annotation[row])),
    )


def _unless_unknown(column: np.ndarray | None, row: int, unknown: int) -> int | None:
    value = unknown if column is None else int(column[row])
    return None if value == unknown else value
