"""Writing imported calls as a capture: ops with their tensors and storages, scopes, unsupported records.

`ImportedSession` is for importers what the recorder is for a running program. It numbers storages and tensors as
records use them, brings in those that no call before produced, and keeps a few thousand records until it writes a
frame. What it is given is written; what is assumed about a call is the importer's to say, in the record's annotation.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import TracebackType
from typing import Any

from replayfmt.format.codes import UNKNOWN_NS, OpStatus, RecordKind, StorageOrigin, ValueKind
from replayfmt.format.model import Device, Generator, Kernel, Node, Recipe, Session, Signature
from replayfmt.format.records.columns import RecordColumns
from replayfmt.format.writer import CaptureWriter
from replayfmt.pytorch.environment import session_fields

from .values import NodeMaker, Slots, Tensor, TracedStorage, possible_bytes

PRODUCER = "opreplay-import"
_FRAME_RECORDS = 16_384
_UNKNOWN = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class Moment:
    """Where and when a record belongs. Times are in nanoseconds; `start_ns` counts from the trace's first event."""

    start_ns: int = 0
    duration_ns: int | None = None
    thread: int = 0
    scope: int = 0
    device_duration_ns: int | None = None


@dataclass
class _Pending:
    """Columns of the frame that is being filled."""

    signature: array = field(default_factory=lambda: array("I"))
    scope: array = field(default_factory=lambda: array("I"))
    thread: array = field(default_factory=lambda: array("I"))
    start: array = field(default_factory=lambda: array("q"))
    duration: array = field(default_factory=lambda: array("q"))
    device_duration: array = field(default_factory=lambda: array("Q"))
    annotation: array = field(default_factory=lambda: array("I"))
    tensors: array = field(default_factory=lambda: array("Q"))
    ints: array = field(default_factory=lambda: array("q"))
    floats: array = field(default_factory=lambda: array("d"))
    storage_bytes: array = field(default_factory=lambda: array("Q"))
    storage_device: array = field(default_factory=lambda: array("I"))
    storage_origin: array = field(default_factory=lambda: array("B"))
    storage_payload: array = field(default_factory=lambda: array("I"))
    definitions: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    timed: bool = False


def imported_session(kind: str, source: str, **fields: Any) -> Session:
    """The session of an import: what `fields` say of the captured program, nothing of the machine that imports.

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
    return Session(**(given | fields))


class ImportedSession:
    """One capture being made from a trace. Use as a context manager: it is completed where nothing went wrong,
    and removed where something did.

    Methods raise ValueError, and write nothing, for what the format cannot hold (sizes beyond its limits, integers
    beyond 64 bits): the importer makes an unsupported record of it. Writing raises CaptureFailed and OutputExists.
    """

    def __init__(self, path: str | PathLike[str], session: Session, *, force: bool = False) -> None:
        self._writer = CaptureWriter(path, session, force=force, doing="importing")
        self._pending = _Pending()
        self._next_storage, self._next_tensor, self._first_storage = 1, 1, 1
        self._without_memory: dict[tuple[int, int], int] = {}
        self._devices: dict[str, int] = {}
        self._generators: dict[int, int] = {}
        self._signatures: dict[Any, int] = {}
        self._nodes = NodeMaker(self._device_or_refuse, self.generator)
        self._last_ns = 0
        self.records = 0

    # --------------------------------------------------------------------------------------------------- definitions

    def device(self, name: str, described: Device | None = None) -> int:
        """The id of a device by name (`cpu`, `cuda:0`). `described` is its definition, needed at first use only where
        more is known of it than the name. Raises ValueError for text that names no device."""
        number = self._devices.get(name)
        if number is None:
            number = self._devices[name] = self._writer.device(described or plain_device(name))
        return number

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

    # -------------------------------------------------------------------------------------------------------- records

    def op(
        self,
        kernel: Kernel,
        arguments: Sequence[tuple[str, Any]],
        results: Sequence[Any] | None = None,
        moment: Moment = Moment(),
        annotation: Mapping[str, Any] | None = None,
    ) -> int:
        """Record one call; returns its ordinal. Argument values are None, bool, int, float, complex, str, DType,
        Layout, MemoryFormat, DeviceName, DefaultGenerator, Tensor, Storage (entered already), and lists and tuples of
        these.

        `results` are values likewise, one for each that the operator returns; None: they are not known, then none are
        recorded. A storage whose origin is not `op` is brought in before the first record that uses it; one that first
        appears among the results is born there. Raises ValueError for what a record cannot hold.
        """
        slots = Slots()
        args = tuple(self._nodes.node(value, slots, name) for name, value in arguments)
        taken = len(slots.tensors)
        returned = tuple(self._nodes.node(value, slots) for value in results or ())
        for tensor in slots.tensors:
            if tensor.storage is not None:
                possible_bytes(tensor.storage.bytes)
        metas = [self._writer.meta(tensor.meta) for tensor in slots.tensors]
        number = self._writer.kernel(kernel)
        signature = self._signature(
            (number, args, returned), lambda: Signature(RecordKind.op, args, returned, number, OpStatus.ok)
        )
        note = self._writer.annotation(annotation) if annotation else 0
        for tensor in slots.tensors[:taken]:
            if tensor.storage is not None and not tensor.storage.id:
                self._enter(tensor.storage, moment)
        for tensor in slots.tensors[taken:]:
            if tensor.storage is not None and not tensor.storage.id:
                self._bear(tensor.storage, StorageOrigin.op, 0)
        self._use(slots.tensors, metas)
        return self._add(signature, moment, slots, note)

    def scope_begin(self, name: str, moment: Moment, annotation: Mapping[str, Any] | None = None) -> int:
        """Record that a scope begins; `moment.scope` is its id."""
        note = self._writer.annotation(annotation) if annotation else 0
        return self._named(RecordKind.scope_begin, moment, note, name=name)

    def scope_end(self, name: str, moment: Moment) -> int:
        """Record that a scope ends."""
        return self._named(RecordKind.scope_end, moment, name=name)

    def unsupported(
        self, reason: str, op: str, detail: str, moment: Moment = Moment(), annotation: Mapping[str, Any] | None = None
    ) -> int:
        """Record work that the import could not turn into an op."""
        note = self._writer.annotation(annotation) if annotation else 0
        return self._named(RecordKind.unsupported, moment, note, reason=reason, op=op, detail=detail)

    def release(self, storages: Sequence[TracedStorage], moment: Moment = Moment()) -> None:
        """Record that nothing uses these storages any more: a replay need not keep them. Unused ones are left out."""
        for storage in storages:
            if storage.id and not storage.released:
                storage.released = True
                self._record(RecordKind.storage_release, (Node(ValueKind.storage, "storage"),), moment, [storage.id])

    # ------------------------------------------------------------------------------------------------------- storages

    def enter(self, storage: TracedStorage, moment: Moment = Moment()) -> None:
        """Bring a storage in ahead of its first use."""
        if not storage.id:
            self._enter(storage, moment)

    def _enter(self, storage: TracedStorage, moment: Moment) -> None:
        kind, number = ValueKind.none, 0
        if isinstance(storage.content, Recipe):
            kind, number = ValueKind.recipe, self._writer.recipe(storage.content)
        elif storage.content is not None:
            kind, number = ValueKind.payload, self._writer.payload(storage.content)
        self._bear(storage, storage.origin, number)
        nodes = (
            Node(ValueKind.storage, "storage"),
            Node(kind, "payload"),
            Node(ValueKind.int, "version"),
            Node(ValueKind.string, "reason", storage.reason),
        )
        ints = [storage.id, 0] if kind is ValueKind.none else [storage.id, number, 0]
        self._record(RecordKind.storage_import, nodes, Moment(moment.start_ns, None, moment.thread, moment.scope), ints)

    def _bear(self, storage: TracedStorage, origin: StorageOrigin, payload: int) -> None:
        storage.id = self._next_storage
        self._next_storage += 1
        self._pending.storage_bytes.append(storage.bytes)
        self._pending.storage_device.append(storage.device)
        self._pending.storage_origin.append(origin)
        self._pending.storage_payload.append(payload)

    def _use(self, tensors: Sequence[Tensor], metas: Sequence[int]) -> None:
        for tensor, meta in zip(tensors, metas, strict=True):
            if not tensor.id:
                # What lies alike on the same memory is one tensor, however often it is taken.
                views = self._without_memory if tensor.storage is None else tensor.storage.views
                tensor.id = views.setdefault((tensor.offset, meta), self._next_tensor)
                self._next_tensor += tensor.id == self._next_tensor
            storage = tensor.storage.id if tensor.storage is not None else 0
            self._pending.definitions[tensor.id] = (storage, tensor.offset, meta)

    # --------------------------------------------------------------------------------------------------------- columns

    def _signature(self, key: Any, make: Any) -> int:
        number = self._signatures.get(key)
        if number is None:
            number = self._signatures[key] = self._writer.signature(make())
        return number

    def _named(self, kind: RecordKind, moment: Moment, note: int = 0, **texts: str) -> int:
        nodes = tuple(Node(ValueKind.string, name, text) for name, text in texts.items())
        return self._record(kind, nodes, moment, (), note)

    def _record(
        self, kind: RecordKind, nodes: tuple[Node, ...], moment: Moment, ints: Sequence[int], note: int = 0
    ) -> int:
        signature = self._signature((kind, nodes), lambda: Signature(kind, nodes))
        return self._add(signature, moment, Slots(ints=list(ints)), note, without_time=0)

    def _add(self, signature: int, moment: Moment, slots: Slots, note: int, without_time: int = UNKNOWN_NS) -> int:
        pending = self._pending
        pending.signature.append(signature)
        pending.scope.append(moment.scope)
        pending.thread.append(moment.thread)
        start = self._last_ns = max(self._last_ns, moment.start_ns)
        pending.start.append(start)
        pending.duration.append(without_time if moment.duration_ns is None else moment.duration_ns)
        pending.timed |= moment.duration_ns is not None
        device = moment.device_duration_ns
        pending.device_duration.append(_UNKNOWN if device is None else device)
        pending.annotation.append(note)
        pending.tensors.extend(tensor.id for tensor in slots.tensors)
        pending.ints.extend(slots.ints)
        pending.floats.extend(slots.floats)
        self.records += 1
        if len(pending.signature) >= _FRAME_RECORDS:
            self._flush()
        return self.records - 1

    def _flush(self) -> None:
        pending, self._pending = self._pending, _Pending()
        known = any(value != _UNKNOWN for value in pending.device_duration)
        self._writer.records(
            RecordColumns(
                signature=pending.signature,
                scope=pending.scope,
                thread=pending.thread,
                start_ns=pending.start,
                duration_ns=pending.duration if pending.timed else None,
                tensors=pending.tensors,
                ints=pending.ints,
                floats=pending.floats,
                tensor_definitions=pending.definitions,
                first_storage=self._first_storage,
                storage_bytes=pending.storage_bytes,
                storage_device=pending.storage_device,
                storage_origin=pending.storage_origin,
                storage_payload=pending.storage_payload,
                device_duration_ns=pending.device_duration if known else None,
                annotation=pending.annotation if any(pending.annotation) else None,
            )
        )
        self._first_storage = self._next_storage

    # ------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Write what is left and complete the capture."""
        self._flush()
        self._writer.close(self._last_ns)

    def abandon(self) -> None:
        """Remove what was written: part of a trace is no import of it."""
        self._writer.discard()

    def __enter__(self) -> ImportedSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def plain_device(name: str) -> Device:
    """A device of which nothing but its name is known. Raises ValueError for text that names none."""
    kind, separator, index = name.partition(":")
    if not kind.isidentifier() or (separator and not index.isdigit()):
        raise ValueError(f"{name!r} names no device")
    return Device(kind, int(index) if separator else -1 if kind in ("cpu", "meta") else 0)
