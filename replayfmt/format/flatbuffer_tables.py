"""FlatBuffers, written and read: the fields of the schema's tables, reading that trusts nothing, and building.

A buffer may be hostile: every offset and length is checked against it before it is followed. `TableLayout` lists the
fields of a table in order; reading and building go by it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import flatbuffers
import numpy as np

from replayfmt.errors import InvalidCapture

SCALARS: dict[str, np.dtype] = {
    "bool": np.dtype("u1"),
    "ubyte": np.dtype("u1"),
    "ushort": np.dtype("<u2"),
    "int": np.dtype("<i4"),
    "uint": np.dtype("<u4"),
    "long": np.dtype("<i8"),
    "ulong": np.dtype("<u8"),
    "double": np.dtype("<f8"),
}


@dataclass(frozen=True)
class Field:
    """One field of a table: its slot in the vtable, its type as the schema spells it, whether it must be there."""

    slot: int
    type: str
    required: bool
    default: int


@dataclass(frozen=True)
class TableLayout:
    name: str
    fields: dict[str, Field]

    def dtype(self, name: str) -> np.dtype:
        """What a vector of scalars holds."""
        return SCALARS[self.fields[name].type[1:-1]]


def table_layout(name: str, text: str) -> TableLayout:
    """The layout of a table whose fields are listed in order, in the schema's words (`!` stands for `(required)`)."""
    fields = {}
    for slot, line in enumerate(text.split()):
        field, _, kind = line.partition(":")
        kind, _, default = kind.partition("=")
        fields[field] = Field(slot, kind.rstrip("!"), kind.endswith("!"), int(default or 0))
    return TableLayout(name, fields)


KEY_VALUE = table_layout("KeyValue", "key:string! value:string!")

HEAD = table_layout(
    "Head",
    """
    session_id:string! producer:string! producer_version:string! created_unix_ns:ulong
    torch_version:string python_version:string platform:string host:string cpu:string cpu_capability:string
    argv:[string] working_directory:string rank:int world_size:int=1
    libraries:[KeyValue] settings:[KeyValue] policies:[KeyValue]
""",
)

RECORDS = table_layout(
    "Records",
    """
    signature:[uint] scope:[uint] thread:[ushort]
    start_base_ns:ulong start_delta_ns:[uint] gap_position:[uint] gap_ns:[ulong]
    duration_ns:[uint] device_duration_ns:[ulong]
    tensors:[uint] ints:[long] floats:[double]
    tensor_id:[ulong] tensor_storage:[ulong] tensor_offset:[long] tensor_meta:[uint]
    first_storage:ulong storage_bytes:[ulong] storage_device:[uint] storage_origin:[ubyte] storage_payload:[uint]
    annotation:[uint] untimed:[uint] placement:[uint]
""",
)

SUMMARY = table_layout(
    "Summary",
    """
    ended_ns:ulong recovered:bool record_counts:[ulong] kernel_calls:[ulong]
    storages:ulong storage_payload_bytes:ulong absent_storages:ulong
    unsupported_reason:[string] unsupported_count:[ulong]
    storage_origins:[ulong] storage_origin_bytes:[ulong] annotated_records:ulong
""",
)


_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")


class _Buffer:
    """The bytes, who they are for error messages, and how many of them were not returned yet."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data = data
        self.where = where
        self.left = len(data)

    def fail(self, what: str) -> InvalidCapture:
        return InvalidCapture(f"{self.where}: not a valid FlatBuffer: {what} (of {len(self.data)} bytes)")

    def spend(self, count: int, what: str) -> None:
        self.left -= count
        if self.left < 0:
            raise self.fail(f"{what} overlap other fields")


class Table:
    """One verified table. Fields are requested by name, as its layout spells them."""

    def __init__(self, buffer: _Buffer, position: int, layout: TableLayout) -> None:
        self._buffer = buffer
        self._layout = layout
        self._position = position
        data, size = buffer.data, len(buffer.data)
        if position % 4 or not 0 <= position <= size - 4:
            raise buffer.fail(f"table {layout.name} at {position}")
        vtable = position - _I32.unpack_from(data, position)[0]
        if vtable % 2 or not 0 <= vtable <= size - 4:
            raise buffer.fail(f"vtable of {layout.name} at {vtable}")
        vtable_bytes, table_bytes = struct.unpack_from("<HH", data, vtable)
        if vtable_bytes % 2 or vtable_bytes < 4 or vtable + vtable_bytes > size:
            raise buffer.fail(f"vtable of {layout.name} of {vtable_bytes} bytes at {vtable}")
        if table_bytes < 4 or position + table_bytes > size:
            raise buffer.fail(f"table {layout.name} of {table_bytes} bytes at {position}")
        buffer.spend(table_bytes, f"table {layout.name}")
        self._table_bytes = table_bytes
        self._slots = struct.unpack_from(f"<{(vtable_bytes - 4) // 2}H", data, vtable + 4)
        for name, field in layout.fields.items():
            if field.required and not self._place(field):
                raise buffer.fail(f"{layout.name}.{name} is missing")

    def _place(self, field: Field) -> int:
        """Where a field's inline value lies; 0 if the field is absent."""
        offset = self._slots[field.slot] if field.slot < len(self._slots) else 0
        if not offset:
            return 0
        size = SCALARS[field.type].itemsize if field.type in SCALARS else 4
        place = self._position + offset
        if offset < 4 or offset + size > self._table_bytes or place % size:
            raise self._buffer.fail(f"{self._layout.name} field {field.slot} at {place}")
        return place

    def _vector(self, name: str, item_bytes: int) -> tuple[int, int] | None:
        """First byte and length of a vector; None if it is absent."""
        place = self._place(self._layout.fields[name])
        if not place:
            return None
        what = f"{self._layout.name}.{name}"
        target = place + _U32.unpack_from(self._buffer.data, place)[0]
        if target % 4 or target > len(self._buffer.data) - 4:  # four readable bytes are there
            raise self._buffer.fail(f"{what} at {target}")
        count = _U32.unpack_from(self._buffer.data, target)[0]
        first = target + 4
        if first + count * item_bytes > len(self._buffer.data) or first % min(item_bytes, 8):
            raise self._buffer.fail(f"{what} with {count} elements at {first}")
        self._buffer.spend(4 + count * item_bytes, what)
        return first, count

    def scalar(self, name: str) -> int:
        """A scalar field, its default where it is absent."""
        field = self._layout.fields[name]
        place = self._place(field)
        if not place:
            return field.default
        return int(np.frombuffer(self._buffer.data, SCALARS[field.type], 1, place)[0])

    def column(self, name: str) -> np.ndarray | None:
        """A vector of scalars as a read-only view of the buffer; None if it is absent."""
        dtype = self._layout.dtype(name)
        vector = self._vector(name, dtype.itemsize)
        return None if vector is None else np.frombuffer(self._buffer.data, dtype, vector[1], vector[0])

    def string(self, name: str) -> str | None:
        """A string; None if it is absent."""
        vector = self._vector(name, 1)
        return None if vector is None else self._text(vector[0], vector[1], name)

    def _text(self, first: int, count: int, name: str) -> str:
        data = self._buffer.data
        if first + count >= len(data) or data[first + count]:
            raise self._buffer.fail(f"{self._layout.name}.{name} has a string at {first} without its final zero")
        try:
            return data[first : first + count].decode()
        except UnicodeDecodeError as error:
            raise self._buffer.fail(
                f"{self._layout.name}.{name} has a string at {first} that is not UTF-8: {error.reason}"
            ) from None

    def _targets(self, name: str) -> np.ndarray:
        """What a vector of offsets points to, as checked positions."""
        vector = self._vector(name, 4)
        if vector is None:
            return np.zeros(0, np.int64)
        first, count = vector
        offsets = np.frombuffer(self._buffer.data, "<u4", count, first).astype(np.int64)
        targets = offsets + np.arange(first, first + 4 * count, 4)
        if count and (int(targets.max()) > len(self._buffer.data) - 4 or (targets % 4).any()):
            raise self._buffer.fail(f"{self._layout.name}.{name} has an offset that leads nowhere")
        return targets

    def strings(self, name: str) -> list[str]:
        """A vector of strings, empty if it is absent."""
        targets = self._targets(name)
        if not len(targets):
            return []
        data = self._buffer.data
        lengths = np.frombuffer(data, "<u4", len(data) // 4)[targets // 4].astype(np.int64)
        ends = targets + 4 + lengths
        if int(ends.max()) >= len(data):
            raise self._buffer.fail(f"{self._layout.name}.{name} has a string that runs past the end")
        self._buffer.spend(int(lengths.sum()) + 5 * len(targets), f"{self._layout.name}.{name}")
        if np.frombuffer(data, "u1")[ends].any():
            raise self._buffer.fail(f"{self._layout.name}.{name} has a string without its final zero")
        try:
            return [data[begin:end].decode() for begin, end in zip((targets + 4).tolist(), ends.tolist(), strict=True)]
        except UnicodeDecodeError as error:
            what = f"{self._layout.name}.{name} has a string that is not UTF-8: {error.reason}"
            raise self._buffer.fail(what) from None

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """A vector of KeyValue tables, empty if it is absent."""
        tables = (Table(self._buffer, target, KEY_VALUE) for target in self._targets(name).tolist())
        return [(table.string("key") or "", table.string("value") or "") for table in tables]


def root(data: bytes, layout: TableLayout, where: str) -> Table:
    """The root table of a buffer. Raises InvalidCapture if it is not whole, and so does asking for its fields.

    Ask for each field once: what is returned is counted.
    """
    buffer = _Buffer(data, where)
    if len(data) < 8:
        raise buffer.fail("too short")
    return Table(buffer, _U32.unpack_from(data, 0)[0], layout)


Texts = Sequence[bytes]
Pairs = Sequence[tuple[bytes, bytes]]
Value = int | bytes | Texts | Pairs | np.ndarray

_PREPEND: dict[str, str] = {
    "bool": "PrependBoolSlot",
    "ubyte": "PrependUint8Slot",
    "ushort": "PrependUint16Slot",
    "int": "PrependInt32Slot",
    "uint": "PrependUint32Slot",
    "long": "PrependInt64Slot",
    "ulong": "PrependUint64Slot",
}


def build(layout: TableLayout, values: Mapping[str, Value | None]) -> memoryview:
    """What `build_in_parts` makes."""
    parts = build_in_parts(layout, values)
    while True:
        try:
            next(parts)
        except StopIteration as made:
            return made.value


_PART_BYTES = 128 << 10  # of columns that are placed at once


def build_in_parts(layout: TableLayout, values: Mapping[str, Value | None]) -> Generator[None, None, memoryview]:
    """A body whose root is a table with these fields: an int for a scalar, bytes for a string, and for a vector an
    array of just its type, or a sequence of strings or of (key, value). None is a field that is absent. Yields between
    parts of the work.

    Raises ValueError if a value is not of its field's type, or a required field is absent.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, field in layout.fields.items():
        if field.required and name not in given:
            raise ValueError(f"{layout.name}.{name} is missing")
    # Room for all columns at once: the builder would otherwise double and copy its buffer again and again.
    columns = [value.nbytes + 16 for value in given.values() if isinstance(value, np.ndarray)]
    builder = flatbuffers.Builder(sum(columns) + 1024)
    places, placed = {}, 0
    for name, value in given.items():
        if layout.fields[name].type in SCALARS:
            continue
        places[name] = _place(builder, f"{layout.name}.{name}", layout.fields[name], value)
        placed += value.nbytes if isinstance(value, np.ndarray) else 0
        if placed >= _PART_BYTES:
            placed = 0
            yield
    builder.StartObject(len(layout.fields))
    for name, value in given.items():
        field = layout.fields[name]
        if name in places:
            builder.PrependUOffsetTRelativeSlot(field.slot, places[name], 0)
        else:
            prepend: Callable[[int, object, int], None] = getattr(builder, _PREPEND[field.type])
            prepend(field.slot, value, field.default)
    builder.Finish(builder.EndObject())
    return memoryview(builder.Bytes)[builder.Head() :]


def _place(builder: flatbuffers.Builder, what: str, field: Field, value: Value) -> int:
    """Where the builder put what is not in the table itself."""
    if field.type == "string":
        return int(builder.CreateString(value))
    if field.type == "[string]":
        return _vector(builder, [builder.CreateString(text) for text in value])  # type: ignore[union-attr]
    if field.type == f"[{KEY_VALUE.name}]":
        return _vector(builder, [_pair(builder, *pair) for pair in value])  # type: ignore[union-attr, misc]
    dtype = SCALARS[field.type.strip("[]")]
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise ValueError(f"{what} takes an array of {dtype}, not {getattr(value, 'dtype', type(value).__name__)}")
    return int(builder.CreateNumpyVector(value))


def _vector(builder: flatbuffers.Builder, places: Sequence[int]) -> int:
    builder.StartVector(4, len(places), 4)
    for place in reversed(places):
        builder.PrependUOffsetTRelative(place)
    return int(builder.EndVector())


def _pair(builder: flatbuffers.Builder, key: bytes, value: bytes) -> int:
    places = {"key": builder.CreateString(key), "value": builder.CreateString(value)}
    builder.StartObject(len(KEY_VALUE.fields))
    for name, place in places.items():
        builder.PrependUOffsetTRelativeSlot(KEY_VALUE.fields[name].slot, place, 0)
    return int(builder.EndObject())
