"""What a trimmed capture needs besides the records that were selected: storages, metadata, settings, scopes, producers.

Producers are the ops that make irreproducible bytes which kept ops need. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from replayfmt.dump.selection import EDGES, KeptRecords
from replayfmt.format.codes import ITEM_BYTES, RecordKind, TensorFlag
from replayfmt.format.frames import MAX_LENGTH
from replayfmt.format.model import (
    MAPPED_FILE,
    PayloadValue,
    RangeValue,
    RecipeValue,
    Record,
    Scope,
    TensorMeta,
    TensorValue,
    is_dense,
    spanned,
)
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.record_frames import decode_record
from replayfmt.format.signature_layout import SlotLayout

Pass = tuple[int, int]  # scope id, ordinal of the record that began it (-1: no such record)


class OpenScopes:
    """Follows one pass over the records of a capture."""

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._scopes = scopes
        self._captured: list[Pass] = []
        self._result: list[Pass] = []

    def begin(self, scope: int, ordinal: int, *, kept: bool) -> None:
        """The capture enters a scope here; with `kept`, so does the result."""
        self._captured.append((scope, ordinal))
        if kept:
            self._result.append((scope, ordinal))

    def end(self, scope: int, *, kept: bool) -> None:
        """The capture leaves a scope here; with `kept`, so does the result."""
        for place in range(len(self._captured) - 1, -1, -1):
            if self._captured[place][0] == scope:
                passed = self._captured.pop(place)
                break
        else:
            passed = (scope, -1)
        if kept and passed in self._result:
            self._result.remove(passed)

    def restate(self, scope: int) -> tuple[list[int], list[int]]:
        """The scopes that the result has to leave and to enter, in this order, before a record inside `scope`."""
        over = [passed for passed in reversed(self._result) if passed not in self._captured]
        chain = []
        while scope:
            chain.append(scope)
            scope = self._scopes[scope].parent
        wanted = [self._present(each) for each in reversed(chain)]
        # A scope whose beginning is not recorded, such as one in a thread that outlives it, ends with its last record.
        over = [passed for passed in over if passed not in wanted]
        self._result = [passed for passed in self._result if passed not in over]
        entered = [passed for passed in wanted if passed not in self._result]
        self._result += entered
        return [passed[0] for passed in over], [passed[0] for passed in entered]

    def close(self) -> list[int]:
        """The scopes that are still open in the result, innermost first."""
        return [scope for scope, _ordinal in reversed(self._result)]

    def _present(self, scope: int) -> Pass:
        for passed in reversed(self._captured):
            if passed[0] == scope:
                return passed
        return scope, -1


Source = PayloadValue | RangeValue | RecipeValue | None


@dataclass(frozen=True)
class EnterContent:
    """An import of content. `first`: it adds the storage to the result. `source` is where the capture itself has
    exactly these bytes, None if they are computed, or if they are `absent`: in no capture. `length` is their number, as
    far as known. `unread`: the next op overwrites every byte without reading any."""

    storage: int
    first: bool
    reason: str
    source: Source
    length: int
    absent: bool = False
    unread: bool = False


@dataclass(frozen=True)
class BeginScope:
    scope: int


@dataclass(frozen=True)
class EndScope:
    scope: int


@dataclass(frozen=True)
class ReleaseStorage:
    storage: int


@dataclass(frozen=True)
class SettingChanges:
    changes: dict[str, Any]


Action = EnterContent | BeginScope | EndScope | ReleaseStorage | SettingChanges


@dataclass
class Schedule:
    """The prerequisites of each kept record, by its ordinal, and the kept records that have become meaningless.

    `settings` are those at the first kept record, `ends` the scopes to leave after the last. `unsupported` are ordinals
    of unsupported records that are left out although later work is kept; `kept_unsupported` is the first kept one.
    `digested` are the results that have a digest among the kept records: (op's ordinal, result, tensor).
    """

    settings: dict[str, Any]
    actions: dict[int, list[Action]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    ends: list[int] = field(default_factory=list)
    unsupported: list[int] = field(default_factory=list)
    kept_unsupported: int | None = None
    left_comparisons: int = 0  # host reads and digests of tensors that no kept op uses
    digested: set[tuple[int, int, int]] = field(default_factory=set)

    def enters(self) -> Iterator[EnterContent]:
        return (action for actions in self.actions.values() for action in actions if isinstance(action, EnterContent))


class RecordShape:
    """Where the records of one signature have the data needed here. `written` are slots of tensors they may write; with
    `writes_storages` they may also write storage arguments. `overwritten` are those written without being read."""

    def __init__(
        self, layout: SlotLayout, written: tuple[int, ...], overwritten: tuple[int, ...], writes_storages: bool
    ) -> None:
        self.kind = layout.signature.kind
        self.arg_tensors, self.storages = layout.arg_tensors, layout.arg_storages
        self.written, self.overwritten = written, overwritten
        self.written_storages = self.storages if writes_storages else []
        op = self.kind is RecordKind.op
        self.passive = (op and not written and not self.written_storages) or self.kind in _PASSIVE


_PASSIVE = EDGES | {RecordKind.digest, RecordKind.host_read, RecordKind.collective}


class Rows:
    """The columns of one frame as lists."""

    def __init__(self, frame: RecordFrame, zero_metas: np.ndarray) -> None:
        slots = frame.tensor_slots
        self.frame = frame
        self.signatures: list[int] = frame.signature.tolist()
        self.scopes: list[int] = frame.scope.tolist()
        self.ints = frame.ints
        self.int_first: list[int] = frame.int_first.tolist()
        self.tensor_first: list[int] = frame.tensor_first.tolist()
        storages = frame.tensor_storage[slots].astype(np.int64)
        storages[zero_metas[frame.tensor_meta[slots]]] = 0  # a ZeroTensor has no bytes to import
        self.storages: list[int] = storages.tolist()

    def arguments(self, row: int, shape: RecordShape) -> list[int]:
        """The storages an op uses as arguments, each once, in order."""
        first = self.tensor_first[row]
        taken = self.storages[first : first + shape.arg_tensors]
        taken += [int(self.ints[self.int_first[row] + slot]) for slot in shape.storages]
        return [storage for storage in dict.fromkeys(taken) if storage]

    def written(self, row: int, shape: RecordShape) -> set[int]:
        first = self.tensor_first[row]
        return {self.storages[first + slot] for slot in shape.written} | {
            int(self.ints[self.int_first[row] + slot]) for slot in shape.written_storages
        }


def zero_metas(reader: CaptureReader) -> np.ndarray:
    """A mask of the metadata ids that belong to ZeroTensors."""
    return np.array([meta is not None and bool(meta.flags & TensorFlag.zero) for meta in reader.metas])


class Planner:
    """Makes a schedule. `writes` returns the tensor slots that an op of a signature may write; None if nothing is
    computed (metadata only), so it does not matter. `overwrites` returns the slots that it overwrites completely
    without reading them."""

    def __init__(
        self,
        reader: CaptureReader,
        kept: KeptRecords,
        writes: Callable[[int], tuple[int, ...]] | None,
        overwrites: Callable[[int], tuple[int, ...]] = lambda _signature: (),
    ) -> None:
        self._reader = reader
        self._kept = kept
        self._writes = writes
        self._overwrites = overwrites
        self._shapes: dict[int, RecordShape] = {}
        self._open = OpenScopes(reader.scopes)
        self._there: set[int] = set()  # storages of the result
        self._stale: dict[int, str] = {}  # of these, those whose bytes have changed, and why
        self._mapped: set[int] = set()  # storages that were mappings of the file with their content
        self._source: dict[int, Source] = {}  # storages whose present bytes are in the capture
        self._absent: set[int] = set()  # storages whose content is not in the capture
        self._length: dict[int, int] = {}  # as the capture last said
        self._reach: dict[int, int] = {}  # how far tensors extend storages beyond their allocated length
        self._died: list[int] = []
        self._settings: dict[str, Any] = dict(reader.session.settings)
        self._stated: dict[str, Any] = {}
        self._extents = np.array([_extent(meta) for meta in reader.metas], np.int64).reshape(-1, 2)
        self._schedule = Schedule({})

    def plan(self) -> Schedule:
        reader, kept = self._reader, self._kept
        zeros = zero_metas(reader)
        ordinals = kept.ordinals
        for index, info in enumerate(reader.record_frames):
            if info.first_ordinal >= kept.stop:
                break
            low, high = np.searchsorted(ordinals, [info.first_ordinal, info.first_ordinal + info.count])
            chosen = np.zeros(info.count, bool)
            chosen[ordinals[low:high] - info.first_ordinal] = True
            frame = reader.frame(index)
            self._note_reach(frame)
            rows = Rows(frame, zeros)
            for row, keep in enumerate(chosen[: kept.stop - info.first_ordinal].tolist()):
                shape = self._shapes.get(rows.signatures[row]) or self._shape(rows.signatures[row])
                if keep:
                    self._keep(rows, row, info.first_ordinal + row, shape)
                elif not shape.passive:
                    self._leave(rows, row, info.first_ordinal + row, shape)
        self._schedule.ends = self._open.close()
        return self._schedule

    def _note_reach(self, frame: RecordFrame) -> None:
        """Ops can extend storages without a record of it; the tensors on them show it."""
        ends = (frame.tensor_offset + self._extents[frame.tensor_meta, 0]) * self._extents[frame.tensor_meta, 1]
        for storage, end in zip(frame.tensor_storage.tolist(), ends.tolist(), strict=True):
            if end > self._reach.get(storage, 0):
                self._reach[storage] = end

    def _shape(self, number: int) -> RecordShape:
        layout = self._reader.layouts[number]
        signature = layout.signature
        op = signature.kind is RecordKind.op
        written = self._writes(number) if self._writes is not None and op else ()
        kernel = self._reader.kernels[signature.kernel] if signature.kernel else None
        # PyTorch's own operators (set_) share a storage they are given; whether others do is unknown.
        own = kernel is None or kernel.name.startswith("aten::")
        shape = self._shapes[number] = RecordShape(layout, written, self._overwrites(number) if op else (), not own)
        return shape

    def _record(self, frame: Rows, row: int) -> Record:
        return decode_record(frame.frame, row, self._reader.definitions)

    def _leave(self, frame: Rows, row: int, ordinal: int, shape: RecordShape) -> None:
        kind = shape.kind
        if kind is RecordKind.op:
            for storage in frame.written(row, shape):
                self._changed(storage, "outside_write")
        elif kind is RecordKind.scope_begin:
            self._open.begin(frame.scopes[row], ordinal, kept=False)
        elif kind is RecordKind.scope_end:
            self._open.end(frame.scopes[row], kept=False)
        elif kind is RecordKind.unsupported:
            self._schedule.unsupported.append(ordinal)
        else:
            self._note(self._record(frame, row), left_out=True)

    def _changed(self, storage: int, reason: str) -> None:
        self._source.pop(storage, None)
        self._absent.discard(storage)
        if storage in self._there:
            self._stale[storage] = reason

    def _note(self, record: Record, *, left_out: bool) -> None:
        """Track a record about state rather than work."""
        values: dict[str, Any] = {
            node.name: value for node, value in zip(record.signature.args, record.args, strict=True)
        }
        if record.kind is RecordKind.global_state:
            self._settings.update(values)
            return
        if record.kind is RecordKind.generator_state:
            return
        storage = values["storage"].id
        if record.kind is RecordKind.storage_import:
            self._changed(storage, values["reason"])
            self._source[storage] = values["payload"]
            if values["reason"] == MAPPED_FILE:
                self._mapped.add(storage)
            if values["payload"] is None:
                self._absent.add(storage)
        elif record.kind is RecordKind.storage_resize:
            if left_out:
                self._changed(storage, "outside_write")
            self._source.pop(storage, None)
            self._length[storage] = values["bytes"]
        elif left_out and storage in self._there:  # it was released
            self._died.append(storage)

    def _keep(self, frame: Rows, row: int, ordinal: int, shape: RecordShape) -> None:
        if ordinal == self._kept.first:
            self._schedule.settings = dict(self._settings)
            self._stated = dict(self._settings)
        kind, scope = shape.kind, frame.scopes[row]
        actions: list[Action] = []
        if kind is RecordKind.scope_begin:
            definition = self._reader.scopes[scope]
            self._restate(definition.parent if definition is not None else 0, actions)
            self._open.begin(scope, ordinal, kept=True)
        else:
            self._restate(scope, actions)
        if kind is RecordKind.scope_end:
            self._open.end(scope, kept=True)
        elif kind is RecordKind.op:
            self._state(actions)
            self._op(frame, row, shape, actions)
        elif kind is RecordKind.global_state:
            self._note(self._record(frame, row), left_out=False)
            self._state(actions)
            self._schedule.dropped.add(ordinal)
        elif kind in (RecordKind.digest, RecordKind.host_read):
            self._comparison(self._record(frame, row))
        elif kind is RecordKind.stream_use:
            if frame.storages[frame.tensor_first[row]] not in self._there:
                self._schedule.dropped.add(ordinal)
        elif kind is RecordKind.unsupported:
            if self._schedule.kept_unsupported is None and self._record(frame, row).signature.unseen:
                self._schedule.kept_unsupported = ordinal
        elif kind in (RecordKind.storage_import, RecordKind.storage_resize, RecordKind.storage_release):
            record = self._record(frame, row)
            storage = record.args[0].id  # type: ignore[union-attr]
            if kind is RecordKind.storage_import or storage not in self._there or storage in self._stale:
                self._schedule.dropped.add(ordinal)  # content is imported where it is used, with the length it has then
            self._note(record, left_out=False)
        if actions:
            self._schedule.actions[ordinal] = actions

    def _restate(self, scope: int, actions: list[Action]) -> None:
        over, entered = self._open.restate(scope)
        actions += [ReleaseStorage(storage) for storage in self._died]
        self._died.clear()
        actions += [EndScope(each) for each in over]
        actions += [BeginScope(each) for each in entered]

    def _state(self, actions: list[Action]) -> None:
        """Add the settings that differ from those in the result so far."""
        changes = {
            name: value
            for name, value in self._settings.items()
            if name not in self._stated or (type(value), value) != (type(self._stated[name]), self._stated[name])
        }
        if changes:
            actions.append(SettingChanges(changes))
            self._stated.update(changes)

    def _op(self, frame: Rows, row: int, shape: RecordShape, actions: list[Action]) -> None:
        for storage in frame.arguments(row, shape):
            first = storage not in self._there
            if first or storage in self._stale:
                as_mapped = storage in self._mapped and isinstance(self._source.get(storage), RangeValue)
                reason = (MAPPED_FILE if as_mapped else "first_use") if first else self._stale.pop(storage)
                length = self._length.get(storage)
                if length is None:
                    length = max(self._reader.storage(storage).bytes, self._reach.get(storage, 0))
                unread = first and self._is_overwritten(frame, row, shape, storage, length)
                actions.append(
                    EnterContent(
                        storage, first, reason, self._source.get(storage), length, storage in self._absent, unread
                    )
                )
                self._there.add(storage)
        for storage in frame.written(row, shape):
            self._source.pop(storage, None)
        self._there.update(frame.storages[frame.tensor_first[row] + shape.arg_tensors : frame.tensor_first[row + 1]])
        self._there.discard(0)

    def _is_overwritten(self, frame: Rows, row: int, shape: RecordShape, storage: int, length: int) -> bool:
        """Whether an op overwrites every byte of a storage, through one tensor, and reads none."""
        first = frame.tensor_first[row]
        slots = [slot for slot in range(shape.arg_tensors) if frame.storages[first + slot] == storage]
        if len(slots) != 1 or slots[0] not in shape.overwritten:
            return False
        tensor = int(frame.frame.tensor_slots[first + slots[0]])
        meta = self._reader.metas[int(frame.frame.tensor_meta[tensor])]
        if meta is None or not is_dense(meta.sizes, meta.strides) or int(frame.frame.tensor_offset[tensor]):
            return False
        return meta.bytes == length

    def _comparison(self, record: Record) -> None:
        """Keep a digest or host read if the result computes the compared tensor."""
        tensor = next((value for value in record.args if isinstance(value, TensorValue)), None)
        of = record.argument("of") if record.kind is RecordKind.digest else -1
        known = tensor is not None and tensor.storage in self._there and tensor.storage not in self._stale
        if not known or (isinstance(of, int) and of >= 0 and not self._kept.holds(of)):
            self._schedule.dropped.add(record.ordinal)
            self._schedule.left_comparisons += 1
        elif isinstance(of, int) and of >= 0 and tensor is not None:
            result = record.argument("result")
            assert isinstance(result, int)
            self._schedule.digested.add((of, result, tensor.id))


def _extent(meta: TensorMeta | None) -> tuple[int, int]:
    """The number of elements that a tensor spans, and the bytes per element."""
    if meta is None or 0 in meta.sizes:
        return 0, 0
    return min(spanned(meta.sizes, meta.strides), MAX_LENGTH), ITEM_BYTES[meta.dtype]


Writes = Callable[[int], tuple[int, ...]]


def with_producers(
    reader: CaptureReader, kept: KeptRecords, opaque: Mapping[int, tuple[int, ...]], writes: Writes
) -> KeptRecords:
    """The kept ops, and those that produce irreproducible bytes for them, including all that write the same memory.

    `opaque` has the tensor slots of results that hold such bytes, by signature.
    """
    if not opaque:
        return kept
    walk = _OpWalk(reader, kept.stop, writes)
    chosen = np.zeros(kept.stop, bool)
    chosen[kept.ordinals] = True
    added = 0
    while more := _missing(walk, opaque, chosen):
        chosen[list(more)] = True
        added += len(more)
    return replace(kept, ordinals=np.flatnonzero(chosen).astype(np.int64), ops=kept.ops + added)


class _OpWalk:
    """The records before an ordinal, each with its columns, its row in them and its shape. Any number of times."""

    def __init__(self, reader: CaptureReader, stop: int, writes: Writes) -> None:
        self._reader, self._stop, self._writes = reader, stop, writes
        self._shapes: dict[int, RecordShape] = {}
        self._zeros = zero_metas(reader)

    def __iter__(self) -> Iterator[tuple[Rows, int, int, RecordShape]]:
        for index, info in enumerate(self._reader.record_frames):
            if info.first_ordinal >= self._stop:
                break
            rows = Rows(self._reader.frame(index), self._zeros)
            for row, number in enumerate(rows.signatures[: self._stop - info.first_ordinal]):
                yield rows, row, number, self._shapes.get(number) or self._shape(number)

    def _shape(self, number: int) -> RecordShape:
        layout = self._reader.layouts[number]
        written = self._writes(number) if layout.signature.kind is RecordKind.op else ()
        shape = self._shapes[number] = RecordShape(layout, written, (), False)
        return shape


def _missing(walk: _OpWalk, opaque: Mapping[int, tuple[int, ...]], chosen: np.ndarray) -> set[int]:
    """The ops that are not chosen and produce such bytes for chosen ones."""
    givers: dict[int, list[int]] = {}  # storages with such bytes → the ops that have written them since
    found: set[int] = set()
    for rows, row, number, shape in walk:
        if shape.kind is RecordKind.storage_import:
            for slot in shape.storages if givers else ():
                givers.pop(int(rows.ints[rows.int_first[row] + slot]), None)
        if shape.kind is not RecordKind.op:
            continue
        ordinal = rows.frame.first_ordinal + row
        if givers:
            if chosen[ordinal]:
                taken = rows.arguments(row, shape)
                found.update(each for storage in taken for each in givers.get(storage, ()) if not chosen[each])
            for storage in rows.written(row, shape):
                if storage in givers:
                    givers[storage].append(ordinal)
        for slot in opaque.get(number, ()):
            storage = rows.storages[rows.tensor_first[row] + slot]
            if storage:
                givers.setdefault(storage, []).append(ordinal)
    return found


def givers(reader: CaptureReader, schedule: Schedule, stop: int, writes: Writes) -> set[int]:
    """The ops whose bytes a schedule embeds: for each storage, the op that first returned it, and the last one that
    wrote to it before it is imported."""
    enters: dict[int, list[int]] = {}
    for ordinal, actions in schedule.actions.items():
        for each in actions:
            if isinstance(each, EnterContent) and not each.absent and not each.unread and each.source is None:
                enters.setdefault(ordinal, []).append(each.storage)
    wanted = {storage for storages in enters.values() for storage in storages}
    found: set[int] = set()
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for rows, row, _number, shape in _OpWalk(reader, stop, writes) if wanted else ():
        ordinal = rows.frame.first_ordinal + row
        for storage in enters.get(ordinal, ()):
            found.update(known[storage] for known in (born, last) if storage in known)
        if shape.kind is RecordKind.op:
            first = rows.tensor_first[row] + shape.arg_tensors
            for storage in wanted.intersection(rows.storages[first : rows.tensor_first[row + 1]]):
                born.setdefault(storage, ordinal)
            for storage in wanted & rows.written(row, shape):
                last[storage] = ordinal
    return found
