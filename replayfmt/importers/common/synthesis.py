"""Writes imported calls as a capture: their tensors, storages and other values, scopes, unsupported records.

A `TracedStorage` is memory that an importer gives a call, a `Tensor` a view of it. Both get their ids when a record
first uses them, because a capture numbers storages in that order. `ImportedSession` is for importers what the recorder
is for a running program: it numbers storages and tensors, imports those that no earlier call produced, and buffers a
few thousand records until it writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from types import TracebackType
from typing import Any

import torch

from replayfmt.format.codes import (
    ITEM_BYTES,
    DType,
    KernelKind,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    StorageOrigin,
    ValueKind,
)
from replayfmt.format.model import CaptureInfo, Device, Generator, Kernel, Node, Recipe, Signature, TensorMeta
from replayfmt.format.signature_layout import argument_nodes
from replayfmt.format.writer import CaptureWriter, Moment, RecordBuilder, RecordSlots
from replayfmt.pytorch.environment import session_fields
from replayfmt.pytorch.overloads import printed_schema

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
    tensors: list[Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class OpForm:
    """What calls have in common that differ in their storages alone. `tensors` has of each slot its storage's place
    among those of the call, -1 for a tensor without memory, its offset and the id of its metadata; the first `taken`
    are arguments."""

    signature: int
    taken: int
    tensors: list[tuple[int, int, int]]
    ints: list[int]
    floats: list[float]


def contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=1 << 14)
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
    dtype: DType, sizes: tuple[int, ...], strides: tuple[int, ...] | None, device: int, offset: int = 0
) -> Tensor:
    """A tensor on a new storage of exactly the length it needs. Raises ValueError for impossible geometry."""
    strides = contiguous(sizes) if strides is None else strides
    storage = TracedStorage(bytes_needed(dtype, sizes, strides, offset), device)
    return Tensor(storage, strided_meta(dtype, device, sizes, strides), offset)


@lru_cache(maxsize=1 << 14)
def strided_meta(dtype: DType, device: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> TensorMeta:
    """What is said of a strided tensor, made once: calls repeat."""
    return TensorMeta(dtype, Layout.strided, device, sizes, strides)


_node_of = lru_cache(maxsize=1 << 14)(Node)  # of a kind, a name and a value: calls repeat
_ENUMERATIONS = {DType: ValueKind.dtype, Layout: ValueKind.layout, MemoryFormat: ValueKind.memory_format}


PRODUCER = "opreplay-import"
_FAR = 1 << 15
_AT_START = Moment()


def imported_session(kind: str, source: str, **fields: Any) -> CaptureInfo:
    """The session of an import: `fields` describe the captured program; the importing machine is not described.

    `kind` names the trace's format, `source` the file (its base name).
    """
    own = session_fields()
    policies = {"payload": "none", "digests": "none", "import": kind, "source": source, **fields.pop("policies", {})}
    given: dict[str, Any] = {
        "session_id": own["session_id"],
        "producer": PRODUCER,
        "producer_version": own["producer_version"],
        "created_unix_ns": own["created_unix_ns"],
        "settings": {},
        "policies": policies,
    }
    return CaptureInfo(**(given | fields))


def of_ranks(together: bool) -> dict[str, str]:
    """What the policies of a session say whose collectives all ranks replay together."""
    return {"collective-results": "none"} if together else {}


class ImportedSession:
    """One capture being made from a trace. Use as a context manager: the capture is completed on success, and removed
    on an error.

    Methods raise ValueError, and write nothing, for what the format cannot hold (sizes beyond its limits, integers
    beyond 64 bits): the importer makes an unsupported record instead. Writing raises CaptureFailed and OutputExists.
    """

    def __init__(self, path: str | PathLike[str], session: CaptureInfo, *, force: bool = False) -> None:
        self._writer = CaptureWriter(path, session, force=force, doing="importing")
        self._builder = RecordBuilder(self._writer)
        self._without_memory: dict[tuple[int, int], int] = {}
        self._devices: dict[str, int] = {}
        self._generators: dict[int, int] = {}
        self._signatures: dict[Any, int] = {}
        self._notes: dict[Any, int] = {}
        self._last_ns = 0
        self._far_threads: dict[int, int] = {}

    @property
    def records(self) -> int:
        """How many records have been written: the next one's ordinal."""
        return self._builder.count

    def device(self, name: str, described: Device | None = None) -> int:
        """The id of a device by name (`cpu`, `cuda:0`). `described` is its definition, needed only at first use and
        only if more than the name is known. Raises ValueError for text that is not a device name."""
        number = self._devices.get(name)
        if number is None:
            number = self._devices[name] = self._writer.device(described or plain_device(name))
        return number

    def attachment(self, role: str, name: str, content: bytes) -> None:
        """Keep bytes that belong to no kernel. Raises ValueError for a role that is no identifier."""
        self._writer.attach([(role, name, content)])

    def code_kernel(self, schema: torch.FunctionSchema, attached: Iterable[tuple[str, str, bytes]]) -> Kernel:
        overload = schema.overload_name or "default"
        kept = self._writer.attach(attached)
        return Kernel(schema.name, overload, printed_schema(schema), KernelKind.triton, kept)

    def _device_or_refuse(self, name: str | None) -> int:
        if name is None:
            raise ValueError("a device argument whose device is not known")
        return self.device(name)

    def generator(self, device: str | None) -> int:
        """The id of a device's default generator."""
        number = self.device(device or "cpu")
        if number not in self._generators:
            self._generators[number] = self._writer.generator(Generator(number, True))
        return self._generators[number]

    def scope(self, parent: int, name: str) -> int:
        """The id of the scope `name` inside scope `parent` (0: top level)."""
        return self._writer.scope(parent, name)

    def op(
        self,
        kernel: Kernel,
        arguments: Sequence[tuple[str, Any]],
        results: Sequence[Any] | None = None,
        moment: Moment = _AT_START,
        annotation: Mapping[str, Any] | None = None,
    ) -> int:
        """Record one call; returns its ordinal. Argument values are None, bool, int, float, complex, str, DType,
        Layout, MemoryFormat, DeviceName, DefaultGenerator, Tensor, Storage (imported already), and lists and tuples of
        these.

        `results` are such values too, one for each result of the operator; None if they are unknown, and then none are
        recorded. A storage whose origin is not `op` is imported before the first record that uses it; one that first
        appears among the results is allocated there. Raises ValueError for what a record cannot hold.
        """
        form, storages = self.form(kernel, arguments, results)
        return self.repeat(form, storages, moment, annotation)

    def form(
        self, kernel: Kernel, arguments: Sequence[tuple[str, Any]], results: Sequence[Any] | None = None
    ) -> tuple[OpForm, list[TracedStorage]]:
        """What `op` records of a call, and the storages of its tensors: with others it can be recorded again, unless
        an argument is a storage. Raises ValueError for what a record cannot hold."""
        slots = Slots()
        args = tuple(self._node(value, slots, name) for name, value in arguments)
        taken = len(slots.tensors)
        returned = tuple(self._node(value, slots) for value in results or ())
        places: dict[TracedStorage | None, int] = {None: -1}
        for tensor in slots.tensors:
            if tensor.storage is not None:
                possible_bytes(tensor.storage.bytes)
                places.setdefault(tensor.storage, len(places) - 1)
        tensors = [(places[each.storage], each.offset, self._writer.meta(each.meta)) for each in slots.tensors]
        number = self._writer.kernel(kernel)
        signature = self._signature(
            (number, args, returned), lambda: Signature(RecordKind.op, args, returned, number, OpStatus.ok)
        )
        storages = [each for each in places if each is not None]
        return OpForm(signature, taken, tensors, slots.ints, slots.floats), storages

    def repeat(
        self,
        form: OpForm,
        storages: Sequence[TracedStorage],
        moment: Moment = _AT_START,
        annotation: Mapping[str, Any] | None = None,
    ) -> int:
        """Record a call of this form with these storages; returns its ordinal."""
        note = self._note(annotation)
        for place, _offset, _meta in form.tensors[: form.taken]:
            if place >= 0:
                self.enter(storages[place], moment)
        for place, _offset, _meta in form.tensors[form.taken :]:
            if place >= 0 and not storages[place].id:
                self._bear(storages[place], StorageOrigin.op, 0)
        tensors = [
            self._builder.tensor(storages[place].views, storages[place].id, offset, meta)
            if place >= 0
            else self._builder.tensor(self._without_memory, 0, offset, meta)
            for place, offset, meta in form.tensors
        ]
        return self._add(form.signature, RecordKind.op, moment, RecordSlots(tensors, form.ints, form.floats), note)

    def scope_begin(self, name: str, moment: Moment, annotation: Mapping[str, Any] | None = None) -> int:
        """Record that a scope begins; `moment.scope` is its id."""
        return self._record(RecordKind.scope_begin, moment, (), self._note(annotation), name=name)

    def scope_end(self, name: str, moment: Moment) -> int:
        return self._record(RecordKind.scope_end, moment, (), name=name)

    def unsupported(
        self, reason: str, op: str, detail: str, moment: Moment = _AT_START, annotation: Mapping[str, Any] | None = None
    ) -> int:
        """Record work that the import could not turn into an op."""
        texts = {"reason": reason, "op": op, "detail": detail}
        return self._record(RecordKind.unsupported, moment, (), self._note(annotation), **texts)

    def release(self, storages: Sequence[TracedStorage], moment: Moment = _AT_START) -> None:
        """Record that these storages are no longer used: a replay need not keep them. Unused ones are left out."""
        for storage in storages:
            if storage.id and not storage.released:
                storage.released = True
                self._record(RecordKind.storage_release, moment, [storage.id])

    def enter(self, storage: TracedStorage, moment: Moment = _AT_START) -> None:
        """Import a storage, unless it was used before."""
        if storage.id:
            return
        kind, number = ValueKind.none, 0
        if isinstance(storage.content, Recipe):
            kind, number = ValueKind.recipe, self._writer.recipe(storage.content)
        elif storage.content is not None:
            kind, number = ValueKind.payload, self._writer.payload(storage.content)
        self._bear(storage, storage.origin, number)
        ints = [storage.id, 0] if kind is ValueKind.none else [storage.id, number, 0]
        moment = Moment(moment.start_ns, None, moment.thread, moment.scope)
        self._record(RecordKind.storage_import, moment, ints, payload=kind, reason=storage.reason)

    def _bear(self, storage: TracedStorage, origin: StorageOrigin, payload: int) -> None:
        storage.id = self._builder.bear(storage.bytes, storage.device, origin, payload)

    def _note(self, annotation: Mapping[str, Any] | None) -> int:
        """The id of an annotation, 0 without one. Most have the same few words."""
        if not annotation:
            return 0
        words = [_words(value) for value in annotation.values()]
        if None in words:
            return self._annotation(annotation)
        key = (*annotation, *words)
        number = self._notes.get(key)
        if number is None:
            number = self._notes[key] = self._annotation(annotation)
        return number

    def _annotation(self, annotation: Mapping[str, Any]) -> int:
        try:
            return self._writer.annotation(annotation)
        except ValueError:
            return self._writer.annotation({name: _plain(value) for name, value in annotation.items()})

    def _node(self, value: Any, slots: Slots, name: str = "") -> Node:
        """The node of a value; appends its slots. Raises ValueError for what a record cannot hold."""
        if value is None:
            return _node_of(ValueKind.none, name)
        if isinstance(value, Tensor):
            slots.tensors.append(value)
            return _node_of(ValueKind.tensor, name)
        if isinstance(value, bool):
            return _node_of(ValueKind.bool, name, int(value))
        if type(value) in _ENUMERATIONS:
            return _node_of(_ENUMERATIONS[type(value)], name, int(value))
        if isinstance(value, int):
            if not _LEAST <= value <= _MOST:
                raise ValueError(f"{name}={value} is not a 64-bit integer")
            slots.ints.append(value)
            return _node_of(ValueKind.int, name)
        if isinstance(value, float):
            slots.floats.append(value)
            return _node_of(ValueKind.float, name)
        if isinstance(value, complex):
            slots.floats += [value.real, value.imag]
            return _node_of(ValueKind.complex, name)
        if isinstance(value, str):
            return _node_of(ValueKind.string, name, value)
        if isinstance(value, DeviceName):
            return _node_of(ValueKind.device, name, self._device_or_refuse(value.name))
        if isinstance(value, TracedStorage):
            slots.ints.append(value.id)
            return _node_of(ValueKind.storage, name)
        if isinstance(value, DefaultGenerator):
            slots.ints.append(self.generator(value.device))
            return _node_of(ValueKind.generator, name)
        if isinstance(value, list | tuple):
            kind = ValueKind.list if isinstance(value, list) else ValueKind.tuple
            return Node(kind, name, None, tuple(self._node(each, slots) for each in value))
        raise ValueError(f"{name}: a value of type {type(value).__name__} cannot be recorded")

    def _signature(self, key: Any, make: Any) -> int:
        number = self._signatures.get(key)
        if number is None:
            number = self._signatures[key] = self._writer.signature(make())
        return number

    def _record(
        self, kind: RecordKind, moment: Moment, ints: Sequence[int], note: int = 0, **given: str | ValueKind
    ) -> int:
        signature = self._signature((kind, *given.values()), lambda: Signature(kind, argument_nodes(kind, **given)))
        return self._add(signature, kind, moment, RecordSlots(ints=list(ints)), note)

    def _add(self, signature: int, kind: RecordKind, moment: Moment, slots: RecordSlots, note: int) -> int:
        if moment.start_ns < self._last_ns:
            moment = moment._replace(start_ns=self._last_ns)
        if moment.thread >= 2 * _FAR:  # a system's number of a thread: records have 16 bits for it
            number = self._far_threads.setdefault(moment.thread, len(self._far_threads))
            moment = moment._replace(thread=_FAR + number % _FAR)
        self._last_ns = moment.start_ns
        return self._builder.add(signature, kind, moment, slots, note)

    def __enter__(self) -> ImportedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._builder.flush()
            self._writer.close(self._last_ns)
        else:
            self._writer.discard()  # a partial import must not look like an import


def plain_device(name: str) -> Device:
    """A device of which only the name is known. Raises ValueError for text that is not a device name."""
    kind, separator, index = name.partition(":")
    if not kind.isidentifier() or (separator and not index.isdigit()):
        raise ValueError(f"{name!r} names no device")
    return Device(kind, int(index) if separator else -1 if kind in ("cpu", "meta") else 0)


def _words(value: Any) -> str | tuple[str, ...] | None:
    """A text, or the texts of a list; None if it is anything else."""
    if type(value) is list:
        return tuple(value) if all([type(each) is str for each in value]) else None
    return value if type(value) is str else None


def _plain(value: Any, depth: int = 4) -> Any:
    """What a trace holds, as an annotation can hold it: no NaN, and no lists in lists without end."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each, depth - 1) for name, each in value.items()} if depth else "…"
    if isinstance(value, list | tuple):
        return [_plain(each, depth - 1) for each in value] if depth else "…"
    return value
