"""A captured op as initializers see it: named arguments, tensors without content."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakValueDictionary

from replayfmt.format.codes import DType, MemoryFormat, RecordKind
from replayfmt.format.codes import Layout as LayoutCode
from replayfmt.format.model import CompositeValue, DeviceValue, TensorMeta, TensorValue, Value
from replayfmt.format.reader import CaptureReader
from replayfmt.initializers import Call, TensorInfo
from replayfmt.pytorch.tensors.dtypes import TORCH_DTYPE, TORCH_LAYOUT, TORCH_MEMORY_FORMAT

from ..planning.kernels import ResolvedKernel

# For an op that takes a list of tensors, each of them is requested separately.
_RECENT = 32


class CapturedCalls:
    """Makes calls from records. `kernels` has, by kernel id, the resolved kernel or the reason why there is none.

    A record is not decoded again while its call is referenced, and for a while after.
    """

    def __init__(self, reader: CaptureReader, kernels: tuple[ResolvedKernel | str | None, ...]) -> None:
        self._reader = reader
        self._kernels = kernels
        self._alive: WeakValueDictionary[int, Call] = WeakValueDictionary()
        self._recent: deque[Call] = deque(maxlen=_RECENT)

    def call(self, ordinal: int) -> Call:
        """The op at an ordinal."""
        call = self._alive.get(ordinal)
        if call is None:
            call = self._alive[ordinal] = self._decode(ordinal)
            self._recent.append(call)
        return call

    def _decode(self, ordinal: int) -> Call:
        record = self._reader.record(ordinal)
        assert record.kind is RecordKind.op
        kernel = self._reader.kernels[record.signature.kernel]
        assert kernel is not None
        resolved = self._kernels[record.signature.kernel]
        named = {node.name: self._value(value) for node, value in zip(record.signature.args, record.args, strict=True)}
        return Call(
            ordinal,
            kernel.name,
            kernel.overload,
            named,
            tuple(map(self._value, record.results)),
            self._reader.scope_path(record.scope),
            record.annotation or {},
            resolved.schema if isinstance(resolved, ResolvedKernel) else None,
            isinstance(resolved, ResolvedKernel) and resolved.elementwise,
        )

    def info(self, storage: int, meta: TensorMeta, offset: int) -> TensorInfo:
        """A tensor. Raises KeyError if this torch does not know its dtype."""
        device = self._reader.devices[meta.device]
        return TensorInfo(storage, TORCH_DTYPE[meta.dtype], meta.sizes, meta.strides, offset, str(device or ""))

    def _value(self, value: Value) -> Any:
        match value:
            case TensorValue():
                return self.info(value.storage, value.meta, value.offset)
            case list() | tuple():
                return tuple(map(self._value, value))
            case CompositeValue():
                return tuple(map(self._value, value.parts))
            case DType():
                return TORCH_DTYPE[value]
            case LayoutCode():
                return TORCH_LAYOUT[value]
            case MemoryFormat():
                return TORCH_MEMORY_FORMAT[value]
            case DeviceValue():
                return str(self._reader.devices[value.id])
            case None | bool() | int() | float() | complex() | str():
                return value
        return None
