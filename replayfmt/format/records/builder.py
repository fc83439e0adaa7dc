"""Records one after the other, gathered into frames: what importers write captures with, and what copies them anew.

Storages and tensors get their ids here, in the order in which they come. A program's own records are gathered by the
recorder, which several threads append to without taking a lock (recording/stream/buffer.py).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from ..codes import UNKNOWN_DEVICE_NS, UNKNOWN_NS, RecordKind, StorageOrigin
from ..writer import CaptureWriter
from .columns import RecordColumns

_FRAME_RECORDS = 16_384


@dataclass(frozen=True)
class Moment:
    """Where and when a record belongs. Times are in nanoseconds; `start_ns` counts from the session's start."""

    start_ns: int = 0
    duration_ns: int | None = None
    thread: int = 0
    scope: int = 0
    device_duration_ns: int | None = None
    placement: int = 0


@dataclass
class RecordSlots:
    """The slots of one record, in order; `tensors` are ids."""

    tensors: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


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
    placement: array = field(default_factory=lambda: array("I"))
    tensors: array = field(default_factory=lambda: array("Q"))
    ints: array = field(default_factory=lambda: array("q"))
    floats: array = field(default_factory=lambda: array("d"))
    storage_bytes: array = field(default_factory=lambda: array("Q"))
    storage_device: array = field(default_factory=lambda: array("I"))
    storage_origin: array = field(default_factory=lambda: array("B"))
    storage_payload: array = field(default_factory=lambda: array("I"))
    definitions: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    timed: bool = False


class RecordBuilder:
    """Gathers records for `writer`, and writes a frame of them as soon as it is full. Raises what the writer raises."""

    def __init__(self, writer: CaptureWriter) -> None:
        self._writer = writer
        self._pending = _Pending()
        self._next_storage = self._first_storage = self._next_tensor = 1
        self.count = 0  # records so far: the next one's ordinal

    def bear(self, length: int, device: int, origin: StorageOrigin, content: int = 0) -> int:
        """The id of a new storage of `length` bytes. `content` is the id of its first content, of the family that
        `origin` says."""
        pending = self._pending
        pending.storage_bytes.append(length)
        pending.storage_device.append(device)
        pending.storage_origin.append(origin)
        pending.storage_payload.append(content)
        self._next_storage += 1
        return self._next_storage - 1

    def tensor(self, views: dict[tuple[int, int], int], storage: int, offset: int, meta: int) -> int:
        """The id of a tensor that the next record uses. What lies alike on the same memory is one tensor, however often
        it is taken: `views` keeps the ids of those on this storage (0: without memory), by offset and meta."""
        number = views.setdefault((offset, meta), self._next_tensor)
        self._next_tensor += number == self._next_tensor
        self._pending.definitions[number] = (storage, offset, meta)
        return number

    def add(self, signature: int, kind: RecordKind, moment: Moment, slots: RecordSlots, annotation: int = 0) -> int:
        """Add a record; returns its ordinal."""
        pending, duration, device = self._pending, moment.duration_ns, moment.device_duration_ns
        pending.signature.append(signature)
        pending.scope.append(moment.scope)
        pending.thread.append(moment.thread)
        pending.start.append(moment.start_ns)
        if duration is None:
            pending.duration.append(UNKNOWN_NS if kind is RecordKind.op else 0)
        else:
            pending.duration.append(duration)
            pending.timed = True
        pending.device_duration.append(UNKNOWN_DEVICE_NS if device is None else device)
        pending.annotation.append(annotation)
        pending.placement.append(moment.placement)
        pending.tensors.extend(slots.tensors)
        pending.ints.extend(slots.ints)
        pending.floats.extend(slots.floats)
        self.count += 1
        if len(pending.signature) >= _FRAME_RECORDS:
            self.flush()
        return self.count - 1

    @property
    def bears_nothing_but_storages(self) -> bool:
        """Whether storages wait without a record that bears them, which no frame can hold."""
        return bool(self._pending.storage_bytes) and not self._pending.signature

    def flush(self) -> None:
        """Write what waits as a frame."""
        pending, self._pending = self._pending, _Pending()
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
                device_duration_ns=_unless_all(pending.device_duration, UNKNOWN_DEVICE_NS),
                annotation=_unless_all(pending.annotation, 0),
                placement=_unless_all(pending.placement, 0),
            )
        )
        self._first_storage = self._next_storage


def _unless_all(column: array, unset: int) -> np.ndarray | None:
    """A column, unless nothing in it is set."""
    values = np.asarray(column)
    return values if (values != unset).any() else None
