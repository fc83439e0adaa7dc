"""Collects the actions of a script, in order, instead of writing a trimmed capture's records.

`ScriptEvents` replaces a `Copier`: it receives the same calls, and keeps the capture's own ids, so a script names
tensors as a dump of the capture does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import OpStatus, RecordKind, StorageOrigin, TensorFlag
from replayfmt.format.model import (
    CompositeValue,
    GeneratorValue,
    Node,
    OpaqueValue,
    PayloadValue,
    ProcessGroupValue,
    Record,
    StorageValue,
    TensorValue,
    Value,
)
from replayfmt.format.reader import CaptureReader

from ..copying import nested_values


@dataclass(frozen=True)
class ScriptOp:
    record: Record


@dataclass(frozen=True)
class ScriptSettings:
    changes: dict[str, Any]


@dataclass(frozen=True)
class Load:
    """New content for an existing storage. `data` is a key of Events.data, None if unknown."""

    storage: int
    data: int | None


@dataclass(frozen=True)
class Resize:
    storage: int
    length: int


@dataclass(frozen=True)
class Draw:
    """The state of a generator; None if unknown."""

    generator: int
    data: int | None


@dataclass(frozen=True)
class Remark:
    """A comment on the following lines."""

    text: str


Event = ScriptOp | ScriptSettings | Load | Resize | Draw | Remark


@dataclass(frozen=True)
class Input:
    """A storage that exists before the first op. `data` is a key of Events.data, None if it is to be synthesized."""

    storage: int
    length: int
    data: int | None


class Data:
    """Replaces a writer: keeps content under numbers from 1, equal content once."""

    def __init__(self) -> None:
        self.by_number: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    def payload(self, content: bytes | memoryview) -> int:
        content = bytes(content)
        number = self._numbers.setdefault(content, len(self._numbers) + 1)
        self.by_number[number] = content
        return number


@dataclass
class ScriptEvents:
    """All actions in order. Raises ReplayRefused for an action that a script cannot express."""

    reader: CaptureReader
    events: list[Event] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    writer: Data = field(default_factory=Data)
    storages: dict[int, int] = field(default_factory=dict)
    count: int = 0

    def payload(self, number: int) -> int:
        return self.writer.payload(self.reader.payload(number))

    def content(self, data: bytes | memoryview) -> int:
        return self.writer.payload(data)

    def bear(self, storage: int, length: int, origin: StorageOrigin, content: int = 0) -> int:
        self.storages[storage] = storage
        if origin in (StorageOrigin.payload, StorageOrigin.absent):
            self.inputs.append(Input(storage, length, content or None))
        elif origin is StorageOrigin.uninitialized and length == 0:
            self.inputs.append(Input(storage, 0, None))
        return storage

    def copy(self, record: Record, annotation: Mapping[str, Any] | None = None) -> int:
        match record.kind:
            case RecordKind.op:
                self._check(record)
                self.events.append(ScriptOp(record))
            case RecordKind.scope_begin:
                self.events.append(Remark(f"inside scope {self.reader.scope_path(record.scope)!a}"))
            case RecordKind.storage_resize:
                storage, length = record.args
                assert isinstance(storage, StorageValue) and isinstance(length, int)
                self.events.append(Resize(storage.id, length))
            case RecordKind.unsupported | RecordKind.collective:
                raise ReplayRefused(
                    f"{self.reader.path}: ordinal {record.ordinal} ({record.kind.name}) cannot be written into a script"
                )
        return record.ordinal

    def add(
        self,
        near: Record,
        kind: RecordKind,
        nodes: Sequence[Node],
        values: Sequence[Value] = (),
        scope: int | None = None,
    ) -> int:
        given = list(values)
        if kind is RecordKind.scope_begin and scope is not None:
            self.events.append(Remark(f"inside scope {self.reader.scope_path(scope)!a}"))
        elif kind is RecordKind.global_state:
            changes: dict[str, Any] = {}
            for node in nodes:
                takes_slot = node.kind.name in ("int", "float")
                constant = bool(node.constant) if node.kind.name == "bool" else node.constant
                changes[node.name] = given.pop(0) if takes_slot else constant
            self.events.append(ScriptSettings(changes))
        elif kind is RecordKind.generator_state:
            generator = given[0]
            assert isinstance(generator, GeneratorValue)
            state = given[1] if len(given) > 1 else None
            self.events.append(Draw(generator.id, state.id if isinstance(state, PayloadValue) else None))
        elif kind is RecordKind.storage_resize:
            assert isinstance(given[0], StorageValue) and isinstance(given[1], int)
            self.events.append(Resize(given[0].id, given[1]))
        elif kind is RecordKind.storage_import and given[-1] != 0:
            assert isinstance(given[0], StorageValue)
            self.events.append(Load(given[0].id, given[1].id if isinstance(given[1], PayloadValue) else None))
        return near.ordinal

    def flush(self) -> None:
        """Nothing is buffered."""

    def _check(self, record: Record) -> None:
        what = f"{self.reader.path}: ordinal {record.ordinal}"
        if record.signature.status is OpStatus.raised:
            raise ReplayRefused(f"{what} raised an exception; a script of it would end there")
        for value in nested_values((*record.args, *record.results)):
            if isinstance(value, CompositeValue):
                raise ReplayRefused(f"{what} has a {value.form} tensor; a script takes strided ones only")
            if isinstance(value, OpaqueValue | ProcessGroupValue):
                raise ReplayRefused(f"{what} takes a value that was not captured as one")
            if isinstance(value, TensorValue):
                device = self.reader.devices[value.meta.device]
                if value.meta.flags & TensorFlag.zero or (device is not None and device.kind == "meta"):
                    raise ReplayRefused(f"{what} has a tensor without memory; a script cannot make it")
