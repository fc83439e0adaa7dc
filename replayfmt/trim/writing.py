"""Writes the records of a trimmed capture one after the other, each with its prerequisites.

`write_stripped` writes a capture without any content: only metadata, safe to share. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import (
    CompositeValue,
    GeneratorValue,
    Node,
    OpaqueValue,
    PayloadValue,
    RangeValue,
    RecipeValue,
    Record,
    Signature,
    StorageValue,
    TensorValue,
    Value,
    nested_values,
)
from replayfmt.format.reader import CaptureReader
from replayfmt.format.record_frames import decode_record
from replayfmt.format.signature_layout import argument_nodes

from .copying import Copier, Values
from .schedule import Action, BeginScope, EndScope, EnterContent, KeptRecords, ReleaseStorage, Schedule, SettingChanges


@dataclass(frozen=True)
class EnteringContent:
    """Imported content: its id in the result, of the kind given by `origin` (0: none); its length in bytes."""

    origin: StorageOrigin
    number: int
    length: int


class EnteringContents(Protocol):
    """Returns the content to import once the earlier records have been written."""

    def enter(self, action: EnterContent) -> EnteringContent: ...


_CONTENT_NODES: dict[StorageOrigin, tuple[ValueKind, Callable[[int], Value]]] = {
    StorageOrigin.payload: (ValueKind.payload, PayloadValue),
    StorageOrigin.external_file: (ValueKind.range, RangeValue),
    StorageOrigin.initializer: (ValueKind.recipe, RecipeValue),
}


_SCALARS = frozenset({ValueKind.bool, ValueKind.int, ValueKind.float, ValueKind.complex, ValueKind.string})
_DIGEST_FREE = 2  # arguments of a host_read record before its digest


class Writing:
    """Goes through the kept records of a schedule in order. With `annotate`, ops are annotated with their original
    ordinals. Without `values` everything that a replay is compared with is left out: digests, and scalars that ops
    returned to the program."""

    def __init__(
        self,
        copier: Copier,
        schedule: Schedule,
        kept: KeptRecords,
        contents: EnteringContents,
        *,
        annotate: bool,
        values: bool = True,
    ) -> None:
        self.copier = copier
        self._schedule = schedule
        self._ordinals = kept.ordinals
        self._contents = contents
        self._annotate = annotate
        self._values = values
        if not values:
            copier.rewrite = without_values
        self._next = 0  # index into the kept ordinals
        self._lengths: dict[int, int] = {}  # bytes of each storage as the result knows them
        self._versions: dict[int, int] = {}
        self.ops: dict[int, int] = {}  # ordinal of a kept op → its ordinal in the result
        self.born: list[int] = []  # new storages of the op written last

    def up_to(self, ordinal: int) -> None:
        """Write every kept record before an ordinal."""
        while self._next < len(self._ordinals) and int(self._ordinals[self._next]) < ordinal:
            self.write()

    def write(self, ready: Callable[[Record], None] | None = None) -> Record:
        """Write the next kept record, with its prerequisites before it; `ready` is called between the two. Returns the
        record as the capture has it."""
        record = self.begin()
        if ready is not None:
            ready(record)
        if record.ordinal not in self._schedule.dropped:
            self.record(record)
        return record

    def begin(self) -> Record:
        """Write the prerequisites of the next kept record, and return it: `record` writes it."""
        reader = self.copier.reader
        ordinal = int(self._ordinals[self._next])
        self._next += 1
        frame = reader.frame(reader.frame_of(ordinal))
        record = decode_record(frame, ordinal - frame.first_ordinal, reader.definitions)
        for action in self._schedule.actions.get(ordinal, ()):
            self._act(action, record)
        return record

    def finish(self, last: Record | None = None) -> None:
        """Write the rest, and end the scopes that are still open."""
        while self._next < len(self._ordinals):
            last = self.write()
        for scope in self._schedule.ends:
            if last is None:
                raise InvalidCapture(f"{self.copier.reader.path}: a scope without records in it does not end")
            self._act(EndScope(scope), last)
        self.copier.flush()

    def record(self, record: Record) -> None:
        if record.kind is RecordKind.op:
            self.op(record)
        elif record.kind is RecordKind.digest:
            if self._values:
                self._digest(record)
        elif record.kind is RecordKind.host_read and not self._values:
            self.copier.add(record, record.kind, record.signature.args[:_DIGEST_FREE], record.args[:_DIGEST_FREE])
        elif record.kind is not RecordKind.generator_state:  # set again before the ops that draw
            if record.kind is RecordKind.storage_resize:
                storage, length = record.args
                if not isinstance(storage, StorageValue) or not isinstance(length, int):
                    raise InvalidCapture(
                        f"{self.copier.reader.path}: ordinal {record.ordinal}: a resize of no storage, or to no length"
                    )
                self._lengths[storage.id] = length
            self.copier.copy(record)

    def op(self, record: Record) -> None:
        """An op; storages that it returns and that are not known yet are allocated."""
        self.born = self.bears(record)
        for storage in self.born:
            born = self.copier.reader.storage(storage)
            known = born.origin in (StorageOrigin.op, StorageOrigin.uninitialized)
            self.bear(storage, born.bytes, born.origin if known else StorageOrigin.op, 0)
        for storage in _storages(record.args):  # storages without bytes to import
            if storage and storage not in self.copier.storages:
                self.bear(storage, self.copier.reader.storage(storage).bytes, StorageOrigin.uninitialized, 0)
        note = {"captured_ordinal": record.ordinal} if self._annotate else None
        if note and record.annotation and "captured_ordinal" in record.annotation:
            note = None  # already trimmed: the ordinal is that of the original capture
        self.ops[record.ordinal] = self.copier.copy(record, note)

    def bears(self, record: Record) -> list[int]:
        """The storages that an op returns and that the result does not know yet."""
        return [each for each in dict.fromkeys(_storages(record.results)) if each and each not in self.copier.storages]

    def bear(self, storage: int, length: int, origin: StorageOrigin, content: int) -> None:
        self.copier.bear(storage, length, origin, content)
        self._lengths[storage] = length

    def _digest(self, record: Record) -> None:
        of = record.argument("of")
        if isinstance(of, int) and of >= 0:
            if of not in self.ops:
                raise InvalidCapture(
                    f"{self.copier.reader.path}: ordinal {record.ordinal}: a digest of the result of ordinal {of}, "
                    "which is no op before it"
                )
            args = tuple(
                self.ops[of] if node.name == "of" else value
                for node, value in zip(record.signature.args, record.args, strict=True)
            )
            self.copier.add(record, RecordKind.digest, record.signature.args, args)
        else:
            self.copier.copy(record)

    def _act(self, action: Action, near: Record) -> None:
        add = self.copier.add
        match action:
            case BeginScope(scope) | EndScope(scope):
                definition = self.copier.reader.scopes[scope]
                if definition is None:
                    raise InvalidCapture(f"{self.copier.reader.path}: scope {scope} is not defined")
                kind = RecordKind.scope_begin if isinstance(action, BeginScope) else RecordKind.scope_end
                add(near, kind, argument_nodes(kind, name=definition.name), scope=scope)
            case ReleaseStorage(storage):
                kind = RecordKind.storage_release
                add(near, kind, argument_nodes(kind), [StorageValue(storage)])
            case SettingChanges(changes):
                add(
                    near,
                    RecordKind.global_state,
                    [Node.scalar(name, value) for name, value in changes.items()],
                    [value for value in changes.values() if type(value) in (int, float)],
                )
            case EnterContent():
                self._enter(action, near)

    def _enter(self, action: EnterContent, near: Record) -> None:
        storage = action.storage
        if action.first and storage in self.copier.storages:
            return
        content = self._contents.enter(action)
        if action.first:
            self.bear(storage, content.length, content.origin, content.number)
            version = 0
        else:
            version = max(self._versions.get(storage, 0), 1)
            if content.length != self._lengths[storage]:
                self.copier.add(
                    near,
                    RecordKind.storage_resize,
                    argument_nodes(RecordKind.storage_resize),
                    [StorageValue(storage), content.length],
                )
                self._lengths[storage] = content.length
        if content.origin is StorageOrigin.uninitialized:
            return  # no bytes at all
        self._versions[storage] = version + 1
        kind = ValueKind.none
        given: list[Value] = [StorageValue(storage), version]
        if content.origin in _CONTENT_NODES:
            kind, value = _CONTENT_NODES[content.origin]
            given.insert(1, value(content.number))
        self.copier.add(
            near,
            RecordKind.storage_import,
            argument_nodes(RecordKind.storage_import, payload=kind, reason=action.reason),
            given,
        )

    def generator_state(self, near: Record, generator: int, state: bytes | None) -> None:
        """Record a generator's state at this point; None if that is left out."""
        content: list[Value] = [] if state is None else [PayloadValue(self.copier.writer.payload(state))]
        self.copier.add(
            near,
            RecordKind.generator_state,
            argument_nodes(RecordKind.generator_state, payload=ValueKind.payload if content else ValueKind.none),
            [GeneratorValue(generator), *content],
        )


def without_values(signature: Signature, args: Values, results: Values) -> tuple[Signature, Values, Values]:
    """A record without the scalars that an op computed, and without content among its arguments. Scalars inside a
    composite are its shape."""
    given = [_without(node, value, is_result=False) for node, value in zip(signature.args, args, strict=True)]
    taken = [_without(node, value, is_result=True) for node, value in zip(signature.results, results, strict=True)]
    signature = replace(signature, args=tuple(node for node, _ in given), results=tuple(node for node, _ in taken))
    return signature, tuple(value for _, value in given), tuple(value for _, value in taken)


def _without(node: Node, value: Value, *, is_result: bool) -> tuple[Node, Value]:
    if is_result and node.kind in _SCALARS:
        return Node(ValueKind.none, node.name), None
    if node.kind in (ValueKind.payload, ValueKind.range, ValueKind.recipe):
        return Node(ValueKind.opaque, node.name, "content that was left out"), OpaqueValue("")
    if node.children and isinstance(value, list | tuple | CompositeValue):
        composite = isinstance(value, CompositeValue)
        parts = value.parts if isinstance(value, CompositeValue) else value
        pairs = [
            _without(child, each, is_result=is_result and not composite)
            for child, each in zip(node.children, parts, strict=True)
        ]
        values = tuple(each for _, each in pairs)
        inside = CompositeValue(value.form, values) if isinstance(value, CompositeValue) else values
        return replace(node, children=tuple(child for child, _ in pairs)), inside
    return node, value


def _storages(values: Iterable[Value]) -> Iterator[int]:
    for value in nested_values(values):
        if isinstance(value, TensorValue):
            yield value.storage
        elif isinstance(value, StorageValue):
            yield value.id


def is_meta(reader: CaptureReader, storage: int) -> bool:
    return reader.devices[reader.storage(storage).device].kind == "meta"


POLICIES = {"payload": "none", "digests": "none"}


class NoContent:
    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader

    def enter(self, action: EnterContent) -> EnteringContent:
        empty = not action.length or is_meta(self._reader, action.storage)
        return EnteringContent(StorageOrigin.uninitialized if empty else StorageOrigin.absent, 0, action.length)


class _Stripped(Writing):
    """Writes records without the values in them."""

    def record(self, record: Record) -> None:
        if record.kind is RecordKind.generator_state:
            generator = record.args[0]
            assert isinstance(generator, GeneratorValue)
            self.generator_state(record, generator.id, None)
        else:
            super().record(record)


def write_stripped(copier: Copier, schedule: Schedule, kept: KeptRecords, *, annotate: bool) -> None:
    """Write the records of a stripped capture. The copier should redact."""
    _Stripped(copier, schedule, kept, NoContent(copier.reader), annotate=annotate, values=False).finish()
