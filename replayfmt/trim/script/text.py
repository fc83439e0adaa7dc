"""The text of a script: one line for each op, with the views and state it needs before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import ITEM_BYTES, DType, Layout, MemoryFormat, TensorFlag, ValueKind
from replayfmt.format.model import DeviceValue, GeneratorValue, Node, Record, StorageValue, TensorValue, Value
from replayfmt.format.reader import CaptureReader

from ..copying import nested_values
from .events import Draw, Event, Load, Remark, Resize, ScriptEvents, ScriptOp, ScriptSettings
from .values import argument, comment, device, dtype, enumeration, operator, scalar, setting

# Returns the tensor slots of arguments whose metadata an op changes in place: it needs its own views of them.
Changes = Callable[[Record], set[int]]


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
    """Writes the body of a script from its events."""

    def __init__(self, events: ScriptEvents, changes: Changes) -> None:
        self._events = events
        self._reader: CaptureReader = events.reader
        self._changes = changes
        self._there: set[int] = set()  # tensors that have a variable
        self._base = {each.storage: f"s{each.storage}" for each in events.inputs}  # the name of a storage
        self._last: dict[int, int] = defaultdict(int)  # storage → place of the last event that uses it
        self._body = ScriptBody()

    def write(self) -> ScriptBody:
        """The body."""
        events = self._events.events
        for place, event in enumerate(events):
            if isinstance(event, ScriptOp):
                for value in nested_values((*event.record.args, *event.record.results)):
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
            case ScriptOp():
                self._op(event.record, place)
            case ScriptSettings():
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
            case Remark():
                line(f"# {comment(event.text)}")

    # ---------------------------------------------------------------------------------------------------------- one op

    def _op(self, record: Record, place: int) -> None:
        kernel = self._reader.kernels[record.signature.kernel]
        assert kernel is not None
        changed = self._changes(record)
        arguments = []
        slot = 0
        for node, value in zip(record.signature.args, record.args, strict=True):
            text, slot = self._value(value, slot, changed)
            arguments.append(argument(node.name, text))
        targets, kept = [], False
        result_slot = slot
        for index, (node, value) in enumerate(zip(record.signature.results, record.results, strict=True)):
            text, result_slot, used = self._target(node, value, record, result_slot, place, index)
            targets.append(text)
            kept |= used
        call = f"{operator(kernel)}({', '.join(arguments)})"
        if kept:
            call = f"{', '.join(targets)} = {call}"
        self._body.lines.append(f"{call}  # {record.ordinal}: {self._described(record)}")

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
            assert given is not None
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

    def _described(self, record: Record) -> str:
        """An op's results, for the comment."""
        parts = []
        for value in nested_values(record.results):
            if isinstance(value, TensorValue):
                count = 1
                for size in value.meta.sizes:
                    count *= size
                sizes = ", ".join(map(str, value.meta.sizes))
                parts.append(f"{value.meta.dtype.name}[{sizes}], {count * ITEM_BYTES[value.meta.dtype]:,} bytes")
            elif isinstance(value, bool | int | float | complex | str):
                parts.append(f"{type(value).__name__} {value!a}")
        return comment("; ".join(parts)) or "no result"
