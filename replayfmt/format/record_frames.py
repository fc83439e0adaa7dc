"""A Records frame decoded: its columns as numpy arrays, every one of them checked, and single records made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from replayfmt.errors import InvalidCapture, UnsupportedVersion

from . import flatbuffer_tables
from .codes import (
    MAJOR_VERSION,
    MINOR_VERSION,
    UNKNOWN_DEVICE_NS,
    UNKNOWN_NS,
    DType,
    Layout,
    MemoryFormat,
    RecordKind,
    StorageOrigin,
    ValueKind,
)
from .definition_tables import DefinitionTables
from .flatbuffer_tables import RECORDS
from .frames import MAX_LENGTH, FrameHeader
from .model import (
    CompositeValue,
    DeviceValue,
    GeneratorValue,
    Node,
    OpaqueValue,
    PayloadValue,
    ProcessGroupValue,
    RangeValue,
    RecipeValue,
    Record,
    StorageValue,
    TensorValue,
    Value,
)
from .record_columns import ReferenceBounds, storages_problem
from .signature_layout import AMOUNTS, COLUMNS, members


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values of a one-dimensional array, ascending. np.unique imports numpy.ma, which is a large part of
    what it takes to start a command that only shows a few records."""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


def spans(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The numbers from each `first` on, as many as `count` says, one span after the other."""
    ends = np.cumsum(count)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(first - (ends - count), count)


# Values whose int slot holds an id, by the name of its family.
_REFERENCES = [ValueKind.storage, ValueKind.generator, ValueKind.payload, ValueKind.range, ValueKind.recipe]
_IS_REFERENCE = members(_REFERENCES, ValueKind)
_HAS_INT = members([ValueKind.int, *_REFERENCES], ValueKind)
_LAST_ORIGIN = int(max(StorageOrigin))


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """Consecutive records as columns; record `first_ordinal + i` is row i.

    `tensor_slots` index the tensor_* columns of this frame. Record i's slots are `tensor_first[i]` to
    `tensor_first[i + 1]` in `tensor_slots`, and likewise for ints and floats. Times are nanoseconds, `start_ns` since
    the session's start. `duration_ns` is None if nothing was timed, and UNKNOWN_NS of single records that were not.
    Arrays are read-only.
    """

    first_ordinal: int
    count: int
    offset: int
    signature: np.ndarray
    scope: np.ndarray
    thread: np.ndarray
    start_ns: np.ndarray
    duration_ns: np.ndarray | None
    device_duration_ns: np.ndarray | None
    tensor_slots: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    tensor_first: np.ndarray
    int_first: np.ndarray
    float_first: np.ndarray
    tensor_id: np.ndarray
    tensor_storage: np.ndarray
    tensor_offset: np.ndarray
    tensor_meta: np.ndarray
    first_storage: int
    storage_bytes: np.ndarray
    storage_device: np.ndarray
    storage_origin: np.ndarray
    storage_payload: np.ndarray
    placement: np.ndarray | None  # placement ids, 0: the default streams; None: of all records
    annotation: np.ndarray | None  # ids for CaptureReader.annotation, 0 for none; None: no record here has one

    def slots_of(self, row: int) -> np.ndarray:
        """A record's tensors, as rows of the tensor_* columns."""
        return self.tensor_slots[self.tensor_first[row] : self.tensor_first[row + 1]]

    def ints_of(self, row: int) -> np.ndarray:
        return self.ints[self.int_first[row] : self.int_first[row + 1]]


class RecordFrameDecoder:
    """Decodes the frames of one capture. Knows its definitions and where their records have references."""

    def __init__(self, definitions: DefinitionTables) -> None:
        self._definitions = definitions
        self._references = _IntReferences(definitions)
        self._contents = ReferenceBounds(
            0, *(definitions.column(name) for name in ("range_bytes", "recipe_dtype", "recipe_elements"))
        )

    def decode(
        self, body: bytes, header: FrameHeader, offset: int, where: str, counts: Mapping[str, int]
    ) -> RecordFrame:
        """A verified frame. `counts` says how many ids of each family of definitions, and of payloads (`payload`), the
        frame may refer to. Raises InvalidCapture."""
        contents = ReferenceBounds(
            counts["payload"],
            self._contents.range_bytes[: counts["range"]],
            self._contents.recipe_dtype[: counts["recipe"]],
            self._contents.recipe_elements[: counts["recipe"]],
        )
        return _Decoding(self._definitions, self._references, body, header, offset, where, counts, contents).frame()


def first_and_storages(body: bytes, where: str) -> tuple[int, int]:
    """First storage id and number of storages of a Records body, without decoding the rest."""
    table = flatbuffer_tables.root(body, RECORDS, where)
    born = table.column("storage_bytes")
    return table.scalar("first_storage"), 0 if born is None else len(born)


class _IntReferences:
    """Which int slots of which signatures hold ids."""

    def __init__(self, definitions: DefinitionTables) -> None:
        kinds = definitions.column("node_kind")
        node_slots = _HAS_INT[kinds]
        self.nodes = np.flatnonzero(_IS_REFERENCE[kinds])
        sizes = definitions.column("signature_nodes").astype(np.int64)
        owner = np.repeat(np.arange(1, len(sizes) + 1), sizes)[self.nodes]
        slot = np.concatenate(([0], np.cumsum(node_slots)))[self.nodes]
        firsts = np.concatenate(([0, 0], np.cumsum(definitions.slots[1, 1:])))
        # Row by row: the signature, the place among its record's int slots, the kind.
        self.place = slot - firsts[owner]
        self.kind = kinds[self.nodes]
        self.count = np.bincount(owner, minlength=len(sizes) + 1)
        self.first = np.concatenate(([0], np.cumsum(self.count)))

    def find(self, signature: np.ndarray, int_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in a frame's ints that hold ids, and the kind of each."""
        counts = self.count[signature]
        rows = np.flatnonzero(counts)
        counts = counts[rows]
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros(0, np.uint8)
        reference = spans(self.first[signature[rows]], counts)
        return np.repeat(int_first[rows], counts) + self.place[reference], self.kind[reference]


class _Decoding:
    def __init__(
        self,
        definitions: DefinitionTables,
        references: _IntReferences,
        body: bytes,
        header: FrameHeader,
        offset: int,
        where: str,
        counts: Mapping[str, int],
        contents: ReferenceBounds,
    ) -> None:
        self._contents = contents
        self._definitions = definitions
        self._counts = counts
        self._references = references
        self._table = flatbuffer_tables.root(body, RECORDS, where)
        self._header = header
        self._offset = offset
        self._where = where

    def _fail(self, what: str) -> InvalidCapture:
        return InvalidCapture(f"{self._where}: {what}")

    def _get(self, name: str) -> np.ndarray:
        column = self._table.column(name)
        return np.zeros(0, RECORDS.dtype(name)) if column is None else column

    def _rows(self, length: int, *names: str) -> list[np.ndarray]:
        columns = [self._get(name) for name in names]
        for name, column in zip(names, columns, strict=True):
            if len(column) != length:
                raise self._fail(f"column {name} has {len(column)} rows, expected {length}")
        return columns

    def _range(self, name: str, column: np.ndarray, lowest: int, highest: int, first: Callable[[int], str]) -> None:
        """`first` says what the row of a wrong value belongs to."""
        if len(column) and not (lowest <= int(column.min()) and int(column.max()) <= highest):
            row = next(row for row, value in enumerate(column.tolist()) if not lowest <= value <= highest)
            raise self._fail(
                f"{name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}; the first wrong "
                f"one is {int(column[row])}, of {first(row)}"
            )

    def _record(self, row: int) -> str:
        return f"record {self._header.first_ordinal + row}"

    def frame(self) -> RecordFrame:
        definitions, count = self._definitions, self._header.count
        signature, scope, thread = self._rows(count, "signature", "scope", "thread")
        self._range("signature", signature, 1, self._counts["signature"], self._record)
        self._range("scope", scope, 0, self._counts["scope"], self._record)
        start = self._start(count)
        duration = self._durations(signature, count)
        device_duration = self._optional("device_duration_ns", count)
        placement = self._optional("placement", count)
        if placement is not None:
            self._range("placement", placement, 0, self._counts["placement"], self._record)
        annotation = self._optional("annotation", count)
        if annotation is not None:
            self._range("annotation", annotation, 0, self._counts["string"], self._record)

        firsts = np.zeros((3, count + 1), np.int64)
        np.cumsum(definitions.slots.take(signature, axis=1), axis=1, out=firsts[:, 1:])
        tensor_first, int_first, float_first = firsts
        tensors, ints, floats = (
            self._rows(int(first[-1]), name)[0] for first, name in zip(firsts, COLUMNS, strict=True)
        )

        first_storage = self._table.scalar("first_storage")
        storage_bytes = self._get("storage_bytes")
        born = len(storage_bytes)
        if not 1 <= first_storage <= MAX_LENGTH:
            raise self._fail(f"first_storage is {first_storage}")
        device, origin, payload = self._rows(born, "storage_device", "storage_origin", "storage_payload")

        def storage(row: int) -> str:
            return f"storage {first_storage + row}"

        self._range("storage_bytes", storage_bytes, 0, MAX_LENGTH, storage)
        self._range("storage_device", device, 1, self._counts["device"], storage)
        if born and int(origin.max()) > _LAST_ORIGIN and self._header.minor > MINOR_VERSION:
            raise UnsupportedVersion(
                f"{self._where}: storage_origin {int(origin.max())} of format version "
                f"{MAJOR_VERSION}.{self._header.minor}"
            )
        self._range("storage_origin", origin, 1, _LAST_ORIGIN, storage)
        problem = storages_problem(origin, payload, storage_bytes, self._contents)
        if problem:
            raise self._fail(problem)
        storages = first_storage + born - 1

        tensor_id = self._get("tensor_id")
        tensor_storage, tensor_offset, tensor_meta = self._rows(
            len(tensor_id), "tensor_storage", "tensor_offset", "tensor_meta"
        )

        def user(slot: int) -> str:
            return self._record(int(np.searchsorted(tensor_first, slot, "right")) - 1)

        def tensor(row: int) -> str:
            used = np.flatnonzero(tensors == row)
            return f"tensor {int(tensor_id[row])}" + (f" in {user(int(used[0]))}" if len(used) else "")

        self._range("tensors", tensors, 0, len(tensor_id) - 1, user)
        self._range("tensor_id", tensor_id, 1, MAX_LENGTH, tensor)
        if len(tensor_id) > 1 and (tensor_id[1:] <= tensor_id[:-1]).any():
            raise self._fail("tensor_id is not ascending")
        self._range("tensor_storage", tensor_storage, 0, storages, tensor)
        self._range("tensor_offset", tensor_offset, 0, MAX_LENGTH, tensor)
        self._range("tensor_meta", tensor_meta, 1, self._counts["meta"], tensor)
        self._check_references(signature, ints, int_first, storages)
        self._check_amounts(signature, ints, int_first)
        return RecordFrame(
            self._header.first_ordinal,
            count,
            self._offset,
            signature,
            scope,
            thread,
            start,
            duration,
            device_duration,
            tensors,
            ints,
            floats,
            tensor_first,
            int_first,
            float_first,
            tensor_id,
            tensor_storage,
            tensor_offset,
            tensor_meta,
            first_storage,
            storage_bytes,
            device,
            origin,
            payload,
            placement,
            annotation,
        )

    def _check_amounts(self, signature: np.ndarray, ints: np.ndarray, int_first: np.ndarray) -> None:
        """Lengths and counts among the arguments of records: none is negative."""
        kinds = self._definitions.column("signature_kind")[signature.astype(np.int64) - 1]
        sizes = np.diff(int_first)
        for kind, names in AMOUNTS.items():
            rows = np.flatnonzero((kinds == kind) & (sizes > max(0, *names.values())))
            for name, place in names.items():
                slots = int_first[rows] + place if place >= 0 else int_first[rows + 1] + place
                self._range(
                    f"{name} of {kind.name}",
                    ints[slots],
                    0,
                    MAX_LENGTH,
                    lambda row, rows=rows: self._record(int(rows[row])),  # type: ignore[misc]
                )

    def _durations(self, signature: np.ndarray, count: int) -> np.ndarray | None:
        column = self._optional("duration_ns", count)
        untimed = self._get("untimed").astype(np.int64)
        if len(untimed):
            self._range("untimed", untimed, 0, count - 1, "row {}".format)
            if (np.diff(untimed) <= 0).any():
                raise self._fail("untimed is not ascending")
            if column is None or column[untimed].any():
                raise self._fail("untimed names records that have a duration, or a frame without durations")
        if column is None:
            return None
        ops = self._definitions.column("signature_kind")[signature.astype(np.int64) - 1] == RecordKind.op
        duration = column.astype(np.int64)
        duration[(column == 0) & ~ops] = UNKNOWN_NS
        duration[untimed] = UNKNOWN_NS
        return duration

    def _optional(self, name: str, count: int) -> np.ndarray | None:
        column = self._table.column(name)
        if column is not None and len(column) != count:
            raise self._fail(f"column {name} has {len(column)} rows, expected {count}")
        return column

    def _start(self, count: int) -> np.ndarray:
        base = self._table.scalar("start_base_ns")
        (delta,) = self._rows(count, "start_delta_ns")
        position = self._get("gap_position").astype(np.int64)
        (gap,) = self._rows(len(position), "gap_ns")
        steps = delta.astype(np.int64)
        if len(position):
            self._range("gap_position", position, 0, count - 1, "row {}".format)
            if (np.diff(position) <= 0).any():
                raise self._fail("gap_position is not ascending")
            self._range("gap_ns", gap, 0, MAX_LENGTH, lambda row: self._record(int(position[row])))
            if float(gap.astype(np.float64).sum()) > MAX_LENGTH:
                raise self._fail("gap_ns add up to more than 2^60")
            steps[position] += gap.astype(np.int64)
        if base > MAX_LENGTH:
            raise self._fail(f"start_base_ns is {base}")
        return np.cumsum(steps) + base

    def _check_references(self, signature: np.ndarray, ints: np.ndarray, int_first: np.ndarray, storages: int) -> None:
        positions, kinds = self._references.find(signature, int_first)
        if not len(positions):
            return
        highest = np.zeros(len(_IS_REFERENCE), np.int64)
        highest[ValueKind.storage] = storages
        for kind in _REFERENCES[1:]:
            highest[kind] = self._counts[kind.name]
        values = ints[positions]
        wrong = (values < 1) | (values > highest[kinds])
        if wrong.any():
            at = int(np.argmax(wrong))
            kind = ValueKind(int(kinds[at]))
            raise self._fail(
                f"int slot {int(positions[at])} refers to {kind.name} {int(values[at])}; there are {int(highest[kind])}"
            )


V = ValueKind


class _Slots:
    """A record's slots, taken one after the other as the nodes ask for them."""

    def __init__(self, frame: RecordFrame, row: int, definitions: DefinitionTables) -> None:
        def between(first: object, slots: object) -> list:
            return slots[first[row] : first[row + 1]].tolist()  # type: ignore[index]

        self._frame = frame
        self._definitions = definitions
        self._tensors = iter(between(frame.tensor_first, frame.tensor_slots))
        self._ints: Iterator[int] = iter(between(frame.int_first, frame.ints))
        self._floats: Iterator[float] = iter(between(frame.float_first, frame.floats))

    def value(self, node: Node) -> Value:
        """The value of one node and of what is below it. Nesting is bounded: signature_layout.py did that."""
        kind = node.kind
        if kind == V.tensor:
            row, frame = next(self._tensors), self._frame
            return TensorValue(
                int(frame.tensor_id[row]),
                int(frame.tensor_storage[row]),
                int(frame.tensor_offset[row]),
                self._definitions.metas[int(frame.tensor_meta[row])],
            )
        if kind == V.int:
            return next(self._ints)
        if kind == V.float:
            return next(self._floats)
        if kind == V.none:
            return None
        constant = node.constant
        if kind == V.bool:
            return bool(constant)
        if kind == V.string:
            return str(constant)
        if kind == V.list:
            return [self.value(child) for child in node.children]
        if kind == V.tuple:
            return tuple(self.value(child) for child in node.children)
        return self._rare(node)

    def _rare(self, node: Node) -> Value:
        kind, constant = node.kind, node.constant
        if kind == V.complex:
            return complex(next(self._floats), next(self._floats))
        if kind == V.storage:
            return StorageValue(next(self._ints))
        if kind == V.generator:
            return GeneratorValue(next(self._ints))
        if kind == V.payload:
            return PayloadValue(next(self._ints))
        if kind == V.range:
            return RangeValue(next(self._ints))
        if kind == V.recipe:
            return RecipeValue(next(self._ints))
        if kind == V.composite:
            return CompositeValue(str(constant), tuple(self.value(child) for child in node.children))
        if kind == V.process_group:
            return ProcessGroupValue(str(constant))
        if kind == V.opaque:
            return OpaqueValue(str(constant))
        assert isinstance(constant, int)
        if kind == V.device:
            return DeviceValue(constant)
        return {V.dtype: DType, V.layout: Layout, V.memory_format: MemoryFormat}[kind](constant)


def decode_record(frame: RecordFrame, row: int, definitions: DefinitionTables) -> Record:
    number = int(frame.signature[row])
    signature = definitions.signatures[number]
    slots = _Slots(frame, row, definitions)
    return Record(
        ordinal=frame.first_ordinal + row,
        signature_id=number,
        signature=signature,
        scope=int(frame.scope[row]),
        thread=int(frame.thread[row]),
        start_ns=int(frame.start_ns[row]),
        duration_ns=_unless_unknown(frame.duration_ns, row, UNKNOWN_NS),
        device_duration_ns=_unless_unknown(frame.device_duration_ns, row, UNKNOWN_DEVICE_NS),
        args=tuple(slots.value(node) for node in signature.args),
        results=tuple(slots.value(node) for node in signature.results),
        frame_offset=frame.offset,
        placement=0 if frame.placement is None else int(frame.placement[row]),
        annotation=None if frame.annotation is None else definitions.annotation(int(frame.annotation[row])),
    )


def _unless_unknown(column: np.ndarray | None, row: int, unknown: int) -> int | None:
    value = unknown if column is None else int(column[row])
    return None if value == unknown else value
