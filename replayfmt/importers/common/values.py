"""The values of an imported call, and how they become nodes and slots of a record.

A `TracedStorage` is memory that the importer gives a call, a `Tensor` a view of it. Both get their ids when a record
first uses them, because a capture numbers storages in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replayfmt.format.codes import ITEM_BYTES, DType, Layout, MemoryFormat, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import Node, Recipe, TensorMeta

from .arguments import DefaultGenerator, DeviceName

Bytes = bytes  # the type, where a field has its name
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@dataclass(eq=False)
class TracedStorage:
    """One allocation. `content` is a payload's bytes or a recipe, if it has any. `id` is 0 until it is used; `views`
    has the ids of the used tensors on it, by offset and metadata id.
    """

    bytes: int
    device: int
    origin: StorageOrigin = StorageOrigin.absent
    content: Bytes | Recipe | None = None
    reason: str = "import"  # of the storage_import record that imports it
    id: int = 0
    released: bool = False
    views: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(eq=False)
class Tensor:
    """A view on a storage, None for a tensor without memory. `offset` is in elements."""

    storage: TracedStorage | None
    meta: TensorMeta
    offset: int = 0


@dataclass
class Slots:
    """The slots of one record, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def bytes_needed(dtype: DType, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> int:
    """The length that a storage needs for a view. Raises ValueError for strides that reach below its beginning, and for
    more bytes than a storage can have."""
    if any(size < 0 for size in sizes) or offset < 0 or any(stride < 0 for stride in strides):
        raise ValueError(f"sizes {list(sizes)}, strides {list(strides)} and offset {offset}: expected none below zero")
    if len(sizes) != len(strides):
        raise ValueError(f"{len(sizes)} sizes {list(sizes)} with {len(strides)} strides {list(strides)}")
    if 0 in sizes:
        return 0
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return possible_bytes((last + 1) * ITEM_BYTES[dtype])


def possible_bytes(length: int) -> int:
    """A storage's length, if it is possible. Raises ValueError if no memory can have it."""
    if length > _MOST:
        raise ValueError(f"a storage of {length} bytes: expected no more than 2^63-1, the most that there can be")
    return length


def plain_tensor(
    dtype: DType,
    sizes: tuple[int, ...],
    strides: tuple[int, ...] | None,
    device: int,
    offset: int = 0,
    origin: StorageOrigin = StorageOrigin.absent,
) -> Tensor:
    """A tensor on a new storage of exactly the length it needs. Raises ValueError for impossible geometry."""
    strides = contiguous(sizes) if strides is None else strides
    storage = TracedStorage(bytes_needed(dtype, sizes, strides, offset), device, origin)
    return Tensor(storage, TensorMeta(dtype, Layout.strided, device, sizes, strides, TensorFlag(0)), offset)


_ENUMERATIONS = {DType: ValueKind.dtype, Layout: ValueKind.layout, MemoryFormat: ValueKind.memory_format}


class NodeMaker:
    """Makes nodes from values. `device_id` returns a device's id by name, `generator_id` that of a default
    generator."""

    def __init__(self, device_id: Any, generator_id: Any) -> None:
        self._device_id = device_id
        self._generator_id = generator_id

    def node(self, value: Any, slots: Slots, name: str = "") -> Node:
        """The node of a value; appends its slots. Raises ValueError for what a record cannot hold."""
        if value is None:
            return Node(ValueKind.none, name)
        if isinstance(value, Tensor):
            slots.tensors.append(value)
            return Node(ValueKind.tensor, name)
        if isinstance(value, bool):
            return Node(ValueKind.bool, name, int(value))
        if isinstance(value, DType | Layout | MemoryFormat):
            return Node(_ENUMERATIONS[type(value)], name, int(value))
        if isinstance(value, int):
            if not _LEAST <= value <= _MOST:
                raise ValueError(f"{name}={value} is not a 64-bit integer")
            slots.ints.append(value)
            return Node(ValueKind.int, name)
        if isinstance(value, float):
            slots.floats.append(value)
            return Node(ValueKind.float, name)
        if isinstance(value, complex):
            slots.floats += [value.real, value.imag]
            return Node(ValueKind.complex, name)
        if isinstance(value, str):
            return Node(ValueKind.string, name, value)
        if isinstance(value, DeviceName):
            return Node(ValueKind.device, name, self._device_id(value.name))
        if isinstance(value, TracedStorage):
            slots.ints.append(value.id)
            return Node(ValueKind.storage, name)
        if isinstance(value, DefaultGenerator):
            slots.ints.append(self._generator_id(value.device))
            return Node(ValueKind.generator, name)
        if isinstance(value, list | tuple):
            kind = ValueKind.list if isinstance(value, list) else ValueKind.tuple
            return Node(kind, name, None, tuple(self.node(each, slots) for each in value))
        raise ValueError(f"{name}: a value of type {type(value).__name__} cannot be recorded")
