"""The text of a script: its actions in order, one line for each op, with the views and state it needs before it.

`ScriptEvents` collects the actions instead of writing a trimmed capture's records; `BodyWriter` writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import (
    DType,
    KernelKind,
    Layout,
    MemoryFormat,
    OpStatus,
    RecordKind,
    StorageOrigin,
    TensorFlag,
    ValueKind,
)
from replayfmt.format.model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Node,
    OpaqueValue,
    PayloadValue,
    ProcessGroupValue,
    Record,
    StorageValue,
    TensorValue,
    Value,
    nested_values,
)
from replayfmt.format.reader import CaptureReader

from .schedule import SettingChanges
from .script_triton import (
    CodeSections,
    argument,
    comment,
    device,
    dtype,
    enumeration,
    identifier,
    operator,
    scalar,
    setting,
)


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


# An op, settings that change, content, or a comment on the following lines.
Event = Record | SettingChanges | Load | Resize | Draw | str


@dataclass(frozen=True)
class Input:
    """A storage that exists before the first op. `data` is a key of Events.data, None if it is to be synthesized."""

    storage: int
    length: int
    data: int | None


class ContentStore:
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
    writer: ContentStore = field(default_factory=ContentStore)
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
                self.events.append(record)
            case RecordKind.scope_begin:
                self.events.append(f"inside scope {self.reader.scope_path(record.scope)!a}")
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
            self.events.append(f"inside scope {self.reader.scope_path(scope)!a}")
        elif kind is RecordKind.global_state:
            changes: dict[str, Any] = {}
            for node in nodes:
                takes_slot = node.kind.name in ("int", "float")
                constant = bool(node.constant) if node.kind.name == "bool" else node.constant
                changes[node.name] = given.pop(0) if takes_slot else constant
            self.events.append(SettingChanges(changes))
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


# Returns tensor slots of an op's arguments: those whose metadata it changes in place, which needs its own views of
# them, and those whose content it writes.
Changes = Callable[[Record], tuple[set[int], set[int]]]


@dataclass
class ScriptBody:
    """The lines of a script's `run`, its arguments, and its return values: name of each result → expression.

    `tensors` maps a returned tensor's name to (ordinal, result slot); `first_uses` a storage to the first tensor on it.
    """

    lines: list[str] = field(default_factory=list)
    returned: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_uses: dict[int, TensorValue] = field(default_factory=dict)
    generators: set[int] = field(default_factory=set)
    loads: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)


class BodyWriter:
    def __init__(self, events: ScriptEvents, changes: Changes, triton: CodeSections) -> None:
        self._events = events
        self._triton = triton
        self._reader: CaptureReader = events.reader
        self._changes = changes
        self._there: set[int] = set()  # tensors that have a variable
        self._base = {each.storage: f"s{each.storage}" for each in events.inputs}  # the name of a storage
        self._last: dict[int, int] = defaultdict(int)  # storage → place of the last event that uses it
        self._body = ScriptBody()

    def write(self) -> ScriptBody:
        events = self._events.events
        for place, event in enumerate(events):
            if isinstance(event, Record):
                for value in nested_values((*event.args, *event.results)):
                    if isinstance(value, TensorValue):
                        self._last[value.storage] = place
                        self._body.first_uses.setdefault(value.storage, value)
                    elif isinstance(value, StorageValue):
                        self._last[value.id] = place
            elif isinstance(event, Load | Resize):
                self._last[event.storage] = place
        for place, event in enumerate(events):
            self._event(event, place)
        return self._body

    def _event(self, event: Event, place: int) -> None:
        line = self._body.lines.append
        match event:
            case Record():
                self._op(event, place)
            case SettingChanges():
                for name, value in event.changes.items():
                    if not name.startswith("autocast."):  # autocast acts above the level of these ops
                        line(setting(name, value))
            case Load():
                if event.storage in self._base:
                    if event.data is None:
                        line(f"# the program changed storage {event.storage} here, to what is not known")
                    else:
                        line(
                            f"load({self._base[event.storage]}, {event.data})  # changed since, "
                            f"{len(self._events.writer.by_number[event.data]):,} bytes"
                        )
                        self._body.loads.add(event.data)
            case Resize():
                if event.storage in self._base:
                    line(f"{self._base[event.storage]}.resize_({event.length})")
            case Draw():
                self._body.generators.add(event.generator)
                if event.data is None:
                    line(f"g{event.generator}.manual_seed(0)")
                else:
                    self._body.states.add(event.data)
                    line(f"g{event.generator}.set_state(STATES[{event.data}])")
            case str():
                line(f"# {comment(event)}")

    def _op(self, record: Record, place: int) -> None:
        kernel = self._reader.kernels[record.signature.kernel]
        changed, written = self._changes(record)
        arguments = {}
        slot = 0
        for node, value in zip(record.signature.args, record.args, strict=True):
            text, slot = self._value(value, slot, changed)
            arguments[node.name] = text
        given = [each for each in nested_values(record.args) if isinstance(each, TensorValue)]
        outputs = {each: given[each] for each in sorted(written - changed) if self._last[given[each].storage] == place}
        for each, tensor in outputs.items():  # what it writes into arguments are results, too
            self._body.returned[f"t{tensor.id}"] = f"t{tensor.id}"
            self._body.tensors[f"t{tensor.id}"] = (record.ordinal, each)
        targets, kept = [], False
        result_slot = slot
        for index, (node, value) in enumerate(zip(record.signature.results, record.results, strict=True)):
            text, result_slot, used = self._target(node, value, record, result_slot, place, index)
            targets.append(text)
            kept |= used
        if kernel.kind is KernelKind.operator:
            call = f"{operator(kernel)}({', '.join(argument(name, text) for name, text in arguments.items())})"
        else:
            call = self._triton.launch(kernel, arguments, self._current_device(given))
        if kept:
            call = f"{', '.join(targets)} = {call}"
        self._body.lines.append(
            f"{call}  # {record.ordinal}: {self._described(record, [given[each] for each in sorted(written)])}"
        )

    def _current_device(self, tensors: list[TensorValue]) -> str:
        """The context in which the device of tensors is the current one, "" if it is that of a new process."""
        places = (self._reader.devices[each.meta.device] for each in tensors)
        place = next((each for each in places if each is not None and each.kind != "cpu"), None)
        if place is None or place.index <= 0:
            return ""
        return f"torch.get_device_module({identifier(place.kind)!a}).device({place.index})"

    def _value(self, value: Value, slot: int, changed: set[int]) -> tuple[str, int]:
        """The expression of an argument, and the tensor slot behind it."""
        if isinstance(value, TensorValue):
            if slot in changed:
                return self._view(value), slot + 1
            if value.id not in self._there:
                self._body.lines.append(f"t{value.id} = {self._view(value)}")
                self._there.add(value.id)
            return f"t{value.id}", slot + 1
        if isinstance(value, list | tuple):
            parts = []
            for each in value:
                text, slot = self._value(each, slot, changed)
                parts.append(text)
            inside = ", ".join(parts)
            if isinstance(value, list):
                return f"[{inside}]", slot
            return f"({inside}{',' if len(parts) == 1 else ''})", slot
        return self._plain(value), slot

    def _plain(self, value: Value) -> str:
        if isinstance(value, StorageValue):
            return self._storage(value.id)
        if isinstance(value, GeneratorValue):
            self._body.generators.add(value.id)
            return f"g{value.id}"
        if isinstance(value, DeviceValue):
            given = self._reader.devices[value.id]
            return f"torch.device({device(given)})"
        if isinstance(value, DType | Layout | MemoryFormat):
            return enumeration(value)
        if isinstance(value, bool | int | float | complex | str | None):
            return scalar(value)
        raise ReplayRefused(f"{self._reader.path}: a value that a script cannot hold: {type(value).__name__}")

    def _storage(self, storage: int) -> str:
        if storage not in self._base:
            raise ReplayRefused(f"{self._reader.path}: storage {storage} is used before anything gives it")
        return self._base[storage]

    def _view(self, value: TensorValue) -> str:
        meta = value.meta
        offset = f", {value.offset}" if value.offset else ""
        text = f"view({self._storage(value.storage)}, {dtype(meta.dtype)}, {meta.sizes}, {meta.strides}{offset})"
        if meta.flags & TensorFlag.conj:
            text = f"torch.conj({text})"
        return f"torch._neg_view({text})" if meta.flags & TensorFlag.neg else text

    def _target(
        self, node: Node, value: Value, record: Record, slot: int, place: int, index: int
    ) -> tuple[str, int, bool]:
        """The target that a result is assigned to, its slot, and whether it is needed."""
        if isinstance(value, TensorValue):
            name = f"t{value.id}"
            if self._last[value.storage] == place:
                self._body.returned[name] = name
                self._body.tensors[name] = (record.ordinal, slot)
            new = value.id not in self._there
            self._there.add(value.id)
            if value.storage not in self._base:
                self._base[value.storage] = f"{name}.untyped_storage()"
            return (name, slot + 1, True) if new else ("_", slot + 1, False)
        if isinstance(value, list | tuple) and node.kind in (ValueKind.list, ValueKind.tuple):
            parts, used = [], False
            for child, each in zip(node.children, value, strict=True):
                text, slot, needed = self._target(child, each, record, slot, place, index)
                parts.append(text)
                used |= needed
            return f"[{', '.join(parts)}]", slot, used
        if isinstance(value, bool | int | float | complex | str):
            name = f"value_{record.ordinal}_{index}"
            self._body.returned[name] = name
            return name, slot, True
        return "_", slot, False

    def _described(self, record: Record, written: list[TensorValue]) -> str:
        """An op's results, or what it writes if it has none, for the comment."""
        parts = []
        for value in nested_values(record.results or tuple(written)):
            if isinstance(value, TensorValue):
                sizes = ", ".join(map(str, value.meta.sizes))
                parts.append(f"{value.meta.dtype.name}[{sizes}], {value.meta.bytes:,} bytes")
            elif isinstance(value, bool | int | float | complex | str):
                parts.append(f"{type(value).__name__} {value!a}")
        return comment("; ".join(parts)) or "no result"
