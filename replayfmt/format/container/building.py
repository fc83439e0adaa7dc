"""Making a FlatBuffer: one table's fields, given by name, as layouts.py has them; flatbuffer_tables.py reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import flatbuffers
import numpy as np

from .layouts import KEY_VALUE, SCALARS, Field, TableLayout

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
    """A body whose root is a table with these fields: an int for a scalar, bytes for a string, and for a vector an
    array of just its type, or a sequence of strings or of (key, value). None is a field that is absent.

    Raises ValueError if a value is not of its field's type, or a required field is absent.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, field in layout.fields.items():
        if field.required and name not in given:
            raise ValueError(f"{layout.name}.{name} is missing")
    # Room for all columns at once: the builder would otherwise double and copy its buffer again and again.
    columns = [value.nbytes + 16 for value in given.values() if isinstance(value, np.ndarray)]
    builder = flatbuffers.Builder(sum(columns) + 1024)
    places = {
        name: _place(builder, f"{layout.name}.{name}", layout.fields[name], value)
        for name, value in given.items()
        if layout.fields[name].type not in SCALARS
    }
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
