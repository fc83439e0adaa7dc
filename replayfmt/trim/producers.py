"""Finds the ops that produce the irreproducible bytes which kept ops need.

Content that a replay computes may hold bytes that no replay reproduces (addresses, unwritten memory). If such bytes
were embedded, they would come from another process, and an op that uses them as addresses would crash. The ops that
produce them are therefore kept too, and produce them again. Needs no torch; the caller says what ops write, and which
results hold such bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader, RecordFrame

from .schedule import Enter, RecordShape, Rows, Schedule, zero_metas
from .selection import Kept

Writes = Callable[[int], tuple[int, ...]]


def with_producers(reader: CaptureReader, kept: Kept, opaque: Mapping[int, tuple[int, ...]], writes: Writes) -> Kept:
    """The kept ops, and those that produce irreproducible bytes for them, including all that write the same memory.

    `opaque` has the tensor slots of results that hold such bytes, by signature.
    """
    if not opaque:
        return kept
    search = _ProducerSearch(reader, kept.stop, opaque, writes)
    chosen = np.zeros(kept.stop, bool)
    chosen[kept.ordinals] = True
    added = 0
    while more := search.missing(chosen):
        chosen[list(more)] = True
        added += len(more)
    return replace(kept, ordinals=np.flatnonzero(chosen).astype(np.int64), ops=kept.ops + added)


class _ProducerSearch:
    """Goes through the records before an ordinal, any number of times."""

    def __init__(self, reader: CaptureReader, stop: int, opaque: Mapping[int, tuple[int, ...]], writes: Writes) -> None:
        self._reader, self._stop, self._opaque, self._writes = reader, stop, opaque, writes
        self._shapes: dict[int, RecordShape] = {}
        self._zeros = zero_metas(reader)

    def missing(self, chosen: np.ndarray) -> set[int]:
        """The ops that are not chosen and produce such bytes for chosen ones."""
        givers: dict[int, list[int]] = {}  # storages with such bytes → the ops that have written them since
        found: set[int] = set()
        for index, info in enumerate(self._reader.record_frames):
            if info.first_ordinal >= self._stop:
                break
            rows = Rows(self._reader.frame(index), self._zeros)
            for row, number in enumerate(rows.signatures[: self._stop - info.first_ordinal]):
                shape = self._shape(number)
                if shape.kind is RecordKind.op:
                    self._op(rows, row, number, shape, chosen, givers, found)
                elif shape.kind is RecordKind.storage_import and givers:
                    for slot in shape.storages:
                        givers.pop(int(rows.ints[rows.int_first[row] + slot]), None)
        return found

    def _op(
        self,
        rows: Rows,
        row: int,
        number: int,
        shape: RecordShape,
        chosen: np.ndarray,
        givers: dict[int, list[int]],
        found: set[int],
    ) -> None:
        ordinal = rows.frame.first_ordinal + row
        if givers:
            taken = rows.arguments(row, shape)
            if chosen[ordinal]:
                found.update(each for storage in taken for each in givers.get(storage, ()) if not chosen[each])
            for storage in rows.written(row, shape):
                if storage in givers:
                    givers[storage].append(ordinal)
        for slot in self._opaque.get(number, ()):
            storage = rows.storages[rows.tensor_first[row] + slot]
            if storage:
                givers.setdefault(storage, []).append(ordinal)

    def _shape(self, number: int) -> RecordShape:
        if number not in self._shapes:
            layout = self._reader.layouts[number]
            written = self._writes(number) if layout.signature.kind is RecordKind.op else ()
            self._shapes[number] = RecordShape(layout, written, (), False)
        return self._shapes[number]


def givers(reader: CaptureReader, schedule: Schedule, stop: int, writes: Writes) -> set[int]:
    """The ops whose bytes a schedule embeds: for each storage, the op that first returned it, and the last one that
    wrote to it before it is imported."""
    enters = {
        ordinal: [
            each
            for each in actions
            if isinstance(each, Enter) and not each.absent and not each.unread and each.source is None
        ]
        for ordinal, actions in schedule.actions.items()
    }
    wanted = np.array(sorted({each.storage for actions in enters.values() for each in actions}), np.int64)
    found: set[int] = set()
    if not len(wanted):
        return found
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    slots: dict[int, tuple[set[int], int]] = {}
    for index, info in enumerate(reader.record_frames):
        if info.first_ordinal >= stop:
            break
        frame = reader.frame(index)
        places = np.flatnonzero(np.isin(frame.tensor_storage[frame.tensor_slots].astype(np.int64), wanted))
        rows = np.searchsorted(frame.tensor_first, places, "right") - 1
        by_row: dict[int, list[int]] = {}
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            by_row.setdefault(row, []).append(place)
        entering = [
            ordinal - info.first_ordinal
            for ordinal in enters
            if info.first_ordinal <= ordinal < info.first_ordinal + info.count
        ]
        for row in sorted({*by_row, *entering}):
            ordinal = info.first_ordinal + row
            for each in enters.get(ordinal, ()):
                found.update(known[each.storage] for known in (born, last) if each.storage in known)
            _note(reader, frame, row, by_row.get(row, []), writes, slots, born, last)
    return found


def _note(
    reader: CaptureReader,
    frame: RecordFrame,
    row: int,
    places: list[int],
    writes: Writes,
    slots: dict[int, tuple[set[int], int]],
    born: dict[int, int],
    last: dict[int, int],
) -> None:
    """What an op returned or wrote of the storages at these places of the frame's tensor column."""
    number = int(frame.signature[row])
    if number not in slots:
        layout = reader.layouts[number]
        op = layout.signature.kind is RecordKind.op
        slots[number] = (set(writes(number)) if op else set(), layout.arg_tensors if op else -1)
    written, arguments = slots[number]
    first = int(frame.tensor_first[row])
    for place in places:
        storage = int(frame.tensor_storage[frame.tensor_slots[place]])
        ordinal = frame.first_ordinal + row
        if arguments >= 0 and place - first >= arguments:
            born.setdefault(storage, ordinal)
        elif place - first in written:
            last[storage] = ordinal
