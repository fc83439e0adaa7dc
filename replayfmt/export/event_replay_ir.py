"""Ops as TraceLens EventReplay IR: one JSON object for each call, with its arguments and how to make its tensors.

The IR has what a call needs: operator, arguments, dtypes, shapes and strides. It has no contents, no results and no
connection between calls. Anything it has no place for (overload, devices, memory shared by arguments) is in members
named `opreplay`, which other readers skip. Calls that cannot be expressed at all raise Inexpressible.
"""

from __future__ import annotations

from typing import Any

from replayfmt.format.codes import DType, KernelKind, Layout, MemoryFormat, OpStatus, TensorFlag
from replayfmt.format.model import DeviceValue, GeneratorValue, Record, StorageValue, TensorValue
from replayfmt.format.operator_schema import OperatorSchema, parse_operator_schema
from replayfmt.format.reader import CaptureReader

OWN = "opreplay"  # the member that holds what the IR has no place for

DTYPE_NAMES: dict[DType, str] = {
    DType.uint8: "unsigned char",
    DType.int8: "signed char",
    DType.int16: "short int",
    DType.int32: "int",
    DType.int64: "long int",
    DType.float16: "c10::Half",
    DType.float32: "float",
    DType.float64: "double",
    DType.bool: "bool",
    DType.bfloat16: "c10::BFloat16",
    DType.complex32: "c10::complex<c10::Half>",
    DType.complex64: "c10::complex<float>",
    DType.complex128: "c10::complex<double>",
    DType.float8_e5m2: "c10::Float8_e5m2",
    DType.float8_e4m3fn: "c10::Float8_e4m3fn",
    DType.float8_e5m2fnuz: "c10::Float8_e5m2fnuz",
    DType.float8_e4m3fnuz: "c10::Float8_e4m3fnuz",
    DType.float8_e8m0fnu: "c10::Float8_e8m0fnu",
    DType.float4_e2m1fn_x2: "c10::Float4_e2m1fn_x2",
    DType.uint16: "uint16_t",
    DType.uint32: "uint32_t",
    DType.uint64: "uint64_t",
    **{DType[f"{sign}int{bits}"]: f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)},
}
_REAL = frozenset(
    {DType.float16, DType.bfloat16, DType.float32, DType.float64, DType.complex32, DType.complex64, DType.complex128}
)
_FLAGS = ((TensorFlag.conj, "conj"), (TensorFlag.neg, "neg"))


class Inexpressible(Exception):
    """Why the IR cannot express a call."""


class EntryMaker:
    """Makes the IR entries of a capture's ops."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def name(self, record: Record) -> str:
        """The operator of an op: `aten::mm.default`."""
        kernel = self._reader.kernels[record.signature.kernel]
        assert kernel is not None
        return kernel.qualified_name

    def devices(self) -> dict[str, dict[str, str]]:
        """The capture's device properties besides names."""
        known = {
            str(each): {"name": each.name, "fingerprint": each.fingerprint}
            for each in self._reader.devices
            if each is not None and (each.name or each.fingerprint)
        }
        return {name: {key: text for key, text in about.items() if text} for name, about in known.items()}

    def entry(self, record: Record, count: int = 1) -> dict[str, Any]:
        """The entry of an op. Raises Inexpressible."""
        kernel = self._reader.kernels[record.signature.kernel]
        assert kernel is not None
        if kernel.kind is not KernelKind.operator:
            raise Inexpressible(
                f"it is not an operator but a kernel of the kind {kernel.kind.name}, which the IR has no form for"
            )
        if record.signature.status is OpStatus.raised:
            raise Inexpressible("it raised an exception when it was captured, which the IR has no form for")
        try:
            schema = parse_operator_schema(kernel.schema)
        except ValueError as error:
            raise Inexpressible(f"its schema cannot be read: {error}") from None
        memory = _Memory()
        places = {argument.name: place for place, argument in enumerate(schema.arguments)}
        positional: list[dict[str, Any]] = []
        keywords: list[dict[str, Any]] = []
        for node, value in zip(record.signature.args, record.args, strict=True):
            if node.name not in places:
                raise Inexpressible(f"its schema has no argument {node.name!r}")
            declared = schema.arguments[places[node.name]]
            written, beside = self._value(value, memory)
            item = {"arg_name": node.name, "arg_type": _type_text(schema, places[node.name]), "value": written}
            if beside is not None:
                item[OWN] = beside
            # An argument after one that was left to its default is named: the IR's positions have no gaps.
            in_turn = not declared.keyword_only and len(positional) == places[node.name]
            (positional if in_turn else keywords).append(item)
        own = {"overload": kernel.overload, "schema": kernel.schema}
        return {
            "op_name": kernel.name,
            "replay_ir": {"list_pos_args": positional, "list_kwargs": keywords},
            "count": count,
            OWN: own,
        }

    def _value(self, value: Any, memory: _Memory) -> tuple[Any, Any]:
        """A value in the IR's form, and its extra members."""
        if value is None or isinstance(value, bool | str):
            return value, None
        if isinstance(value, DType | Layout | MemoryFormat):
            return int(value) - 1, None  # as traces store them: PyTorch's numbers
        if isinstance(value, int):
            return value, None
        if isinstance(value, float):
            return value, None
        if isinstance(value, complex):
            return str(value), None  # as Python's complex() reads it
        if isinstance(value, TensorValue):
            return self._tensor(value, memory)
        if isinstance(value, DeviceValue):
            return str(self._reader.devices[value.id]), None
        if isinstance(value, GeneratorValue):
            generator = self._reader.generators[value.id]
            if generator is None or not generator.default:
                raise Inexpressible("it draws from a random generator of its own")
            return None, {"generator": str(self._reader.devices[generator.device])}
        if isinstance(value, list | tuple):
            return self._items(value, memory)
        kind = "a storage" if isinstance(value, StorageValue) else type(value).__name__.removesuffix("Value").lower()
        raise Inexpressible(f"an argument is {kind}, which the IR has no form for")

    def _items(self, values: list[Any] | tuple[Any, ...], memory: _Memory) -> tuple[Any, Any]:
        if isinstance(values, tuple):
            raise Inexpressible("an argument is a tuple, which the IR has no form for")
        pairs = [self._value(each, memory) for each in values]
        beside = [own for _value, own in pairs]
        return [value for value, _own in pairs], beside if any(own is not None for own in beside) else None

    def _tensor(self, value: TensorValue, memory: _Memory) -> tuple[Any, Any]:
        meta = value.meta
        if meta.layout is not Layout.strided:
            raise Inexpressible(f"an argument is a tensor with the layout {meta.layout.name}")
        if meta.flags & TensorFlag.zero:
            raise Inexpressible("an argument is one of autograd's tensors without memory")
        if meta.dtype not in DTYPE_NAMES:
            raise Inexpressible(f"an argument is a tensor of dtype {meta.dtype.name}")
        spec = {
            "shape": list(meta.sizes),
            "dtype": DTYPE_NAMES[meta.dtype],
            "strides": list(meta.strides),
            "init": "normal" if meta.dtype in _REAL else "zeros",
        }
        own: dict[str, Any] = {"device": str(self._reader.devices[meta.device]), "offset": value.offset}
        if value.storage:
            own["storage"] = memory.number(value.storage)
            own["storage_bytes"] = self._reader.storage(value.storage).bytes
        flags = [name for flag, name in _FLAGS if meta.flags & flag]
        if flags:
            own["flags"] = flags
        return spec, own


class _Memory:
    """Numbers the storages of one call."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, storage: int) -> int:
        return self._numbers.setdefault(storage, len(self._numbers))


def _type_text(schema: OperatorSchema, place: int) -> str:
    return schema.arguments[place].type.text
