"""One frame's worth of records as columns, and how they become a Records body.

The rules for a storage's first content are the same for the writer's columns and for those of a file.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from .codes import ITEM_BYTES, UNKNOWN_NS, DType, StorageOrigin
from .flatbuffer_tables import RECORDS, build_in_parts
from .frames import MAX_BODY_BYTES, MAX_FRAME_RECORDS, MAX_LENGTH
from .signature_layout import COLUMNS

_ITEM_SIZES = np.array([ITEM_BYTES[dtype] for dtype in sorted(DType)], np.int64)


@dataclass(frozen=True)
class ReferenceBounds:
    """What there is to refer to: the number of payloads, the length of each range, dtype and number of elements of each
    recipe, by id from 1."""

    payloads: int
    range_bytes: np.ndarray
    recipe_dtype: np.ndarray
    recipe_elements: np.ndarray


def storages_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: ReferenceBounds) -> str:
    """What is wrong with some storages, or ""."""
    plain = origin < StorageOrigin.external_file
    embedded = payload[plain]
    if len(embedded) and int(embedded.max()) > contents.payloads:
        return f"storage_payload holds {int(embedded.max())}, allowed 0..{contents.payloads}"
    if ((origin[plain] == StorageOrigin.payload) != (embedded != 0)).any():
        return "storages have a payload exactly if their origin is payload; one here does not"
    if plain.all():
        return ""
    return (
        _other(origin, payload, StorageOrigin.external_file, len(contents.range_bytes))
        or _other(origin, payload, StorageOrigin.initializer, len(contents.recipe_elements))
        or _ranges_problem(origin, payload, length, contents)
        or _recipes_problem(origin, payload, length, contents)
    )


def _other(origin: np.ndarray, payload: np.ndarray, kind: StorageOrigin, count: int) -> str:
    ids = payload[origin == kind]
    if len(ids) and not (int(ids.min()) >= 1 and int(ids.max()) <= count):
        return (
            f"storage_payload holds {int(ids.min())}..{int(ids.max())} where the origin is {kind.name}; "
            f"allowed 1..{count}"
        )
    return ""


def _ranges_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: ReferenceBounds) -> str:
    rows = origin == StorageOrigin.external_file
    ranges = contents.range_bytes[payload[rows].astype(np.int64) - 1].astype(np.uint64)
    wrong = ranges != length[rows]
    if wrong.any():
        return (
            f"a storage of {int(length[rows][np.argmax(wrong)])} bytes comes from a range of "
            f"{int(ranges[np.argmax(wrong)])}"
        )
    return ""


def _recipes_problem(origin: np.ndarray, payload: np.ndarray, length: np.ndarray, contents: ReferenceBounds) -> str:
    rows = origin == StorageOrigin.initializer
    recipes = payload[rows].astype(np.int64) - 1
    elements = length[rows].astype(np.int64) // _ITEM_SIZES[contents.recipe_dtype[recipes]]
    wrong = elements != contents.recipe_elements[recipes].astype(np.int64)
    if wrong.any():
        at = int(np.argmax(wrong))
        return (
            f"a storage of {int(length[rows][at])} bytes has room for {int(elements[at])} elements, its recipe has "
            f"{int(contents.recipe_elements[recipes][at])}"
        )
    return ""


Column = Any  # a numpy array, an array.array, or anything np.asarray takes without a copy

_LONGEST_DURATION = 0xFFFFFFFF


# The columns with a row for each record, and for each storage.
_OF_RECORDS = [
    "signature",
    "scope",
    "thread",
    "start_ns",
    "duration_ns",
    "device_duration_ns",
    "annotation",
    "placement",
]
OF_STORAGES = ("storage_bytes", "storage_device", "storage_origin", "storage_payload")


@dataclass
class RecordColumns:
    """Consecutive records. Arrays are only read, during the call that takes them.

    `start_ns` are nanoseconds since the session's start; `duration_ns` nanoseconds, saturated at 2^32 - 1, or None if
    not measured; of a single op, UNKNOWN_NS says so (other records have 0). `device_duration_ns`, `annotation`
    and `placement` are None if no record has one; 2^64 - 1, 0 and 0 say so of a single record. `tensors` are global
    tensor ids in record order, `tensor_definitions` maps each of them to (storage id, offset in elements, meta id), or
    is an int64[n, 4] of (tensor id, storage id, offset, meta id) by ascending id. The storages born in this frame have
    consecutive ids from `first_storage`.
    """

    signature: Column
    scope: Column
    thread: Column
    start_ns: Column
    duration_ns: Column | None
    tensors: Column
    ints: Column
    floats: Column
    tensor_definitions: Mapping[int, tuple[int, int, int]] | np.ndarray
    first_storage: int = 0
    storage_bytes: Column = ()
    storage_device: Column = ()
    storage_origin: Column = ()
    storage_payload: Column = ()
    device_duration_ns: Column | None = None
    annotation: Column | None = None
    placement: Column | None = None


def pieces(given: RecordColumns, slot_counts: np.ndarray) -> Iterator[RecordColumns]:
    """The same records in as many frames as the format's limits ask for: nearly always one. `slot_counts` are the slots
    of each signature by id (signature_layout.py).

    Storages are allocated in the first piece. A single record may still be too large for a frame.
    """
    signature = np.asarray(given.signature)
    slots = [np.asarray(column) for column in (given.tensors, given.ints, given.floats)]
    # At most 32 bytes for a tensor slot and the tensor it may bring along, 8 for others, 64 for record and storage.
    size = 32 * len(slots[0]) + 8 * len(slots[1]) + 8 * len(slots[2]) + 64 * (len(signature) + len(given.storage_bytes))
    half = len(signature) // 2
    if not half or (size < MAX_BODY_BYTES and len(signature) <= MAX_FRAME_RECORDS):
        yield given
        return
    if signature.dtype.kind not in "iu" or int(signature.min()) < 0 or int(signature.max()) >= slot_counts.shape[1]:
        yield given  # encoding says what is wrong with it
        return
    first_half: list[int] = slot_counts.take(signature[:half], axis=1).sum(axis=1).tolist()
    for first, place in ((True, slice(None, half)), (False, slice(half, None))):
        changes: dict[str, Any] = {
            name: np.asarray(column)[place] for name in _OF_RECORDS if (column := getattr(given, name)) is not None
        }
        for name, column, count in zip(COLUMNS, slots, first_half, strict=True):
            changes[name] = column[:count] if first else column[count:]
        if not first:
            changes.update(dict.fromkeys(OF_STORAGES, ()), first_storage=0)
        piece = replace(given, **changes)
        yield from pieces(piece, slot_counts)


@dataclass(frozen=True)
class Bounds:
    """What ids exist when a frame is written: the largest of each family."""

    signatures: int
    scopes: int
    metas: int
    devices: int
    strings: int
    placements: int
    next_storage: int
    contents: ReferenceBounds


def _column(values: Column, dtype: Any, name: str) -> np.ndarray:
    """`values` in the column's type, refused where they do not fit it."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise ValueError(f"column {name} has {given.ndim} dimensions")
    if given.dtype == dtype or not given.size:
        return np.ascontiguousarray(given, dtype)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        if given.dtype.kind not in "iu" or int(given.min()) < limits.min or int(given.max()) > limits.max:
            raise ValueError(f"column {name} does not fit {np.dtype(dtype).name}")
    return given.astype(dtype)


def _limit(column: np.ndarray, lowest: int, highest: int, name: str) -> None:
    if column.size and not (lowest <= int(column.min()) and int(column.max()) <= highest):
        raise ValueError(f"column {name} holds {int(column.min())}..{int(column.max())}, allowed {lowest}..{highest}")


def _check(column: np.ndarray, name: str, rows: int, lowest: int = 0, highest: int | None = None) -> None:
    """Raise ValueError for a column of another length, or with values out of bounds."""
    if len(column) != rows:
        raise ValueError(f"column {name} has {len(column)} rows, expected {rows}")
    if highest is not None:
        _limit(column, lowest, highest, name)


@dataclass(frozen=True)
class EncodedRecords:
    """A Records body and what the writer needs to know of it."""

    body: memoryview
    count: int
    storages: int
    signature: np.ndarray
    storage_origin: np.ndarray
    storage_bytes: np.ndarray
    annotation: np.ndarray | None


def encode_records(
    given: RecordColumns, bounds: Bounds, slot_counts: np.ndarray
) -> Generator[None, None, EncodedRecords]:
    """The Records body of these columns; yields between parts of the work. Raises ValueError if they contradict each
    other or the definitions."""
    signature = _column(given.signature, np.uint32, "signature")
    count = len(signature)

    def column(name: str, rows: int, lowest: int = 0, highest: int | None = None) -> np.ndarray:
        """A column in the type that the file has, as long as others and with ids that are there."""
        made = _column(getattr(given, name), RECORDS.dtype(name), name)
        _check(made, name, rows, lowest, highest)
        return made

    _limit(signature, 1, bounds.signatures, "signature")
    start = _column(given.start_ns, np.int64, "start_ns")
    _check(start, "start_ns", count)
    duration = given.duration_ns
    untimed = np.zeros(0, np.uint32)
    if duration is not None:
        given_ns = np.asarray(duration)
        unknown = given_ns == UNKNOWN_NS
        untimed = np.flatnonzero(unknown).astype(np.uint32)
        duration = _column(np.minimum(np.where(unknown, 0, given_ns), _LONGEST_DURATION), np.uint32, "duration_ns")
        _check(duration, "duration_ns", count)
    optional = {
        name: None if getattr(given, name) is None else column(name, count, 0, highest)
        for name, highest in (
            ("device_duration_ns", None),
            ("annotation", bounds.strings),
            ("placement", bounds.placements),
        )
    }
    if optional["placement"] is not None and not optional["placement"].any():
        optional["placement"] = None
    yield
    tensors = _column(given.tensors, np.uint64, "tensors")
    ints, floats = _column(given.ints, np.int64, "ints"), _column(given.floats, np.float64, "floats")
    expected_slots: list[int] = slot_counts.take(signature, axis=1).sum(axis=1).tolist()
    for name, slots, expected in zip(COLUMNS, (tensors, ints, floats), expected_slots, strict=True):
        if len(slots) != expected:
            raise ValueError(f"{len(slots)} {name} slots, but the records' signatures have {expected}")
    born = len(given.storage_bytes)
    if born and given.first_storage != bounds.next_storage:
        raise ValueError(f"first_storage is {given.first_storage}, the next storage id is {bounds.next_storage}")
    storage_bytes = column("storage_bytes", born)
    storage_origin = column("storage_origin", born, 1, max(StorageOrigin))
    storage_payload = column("storage_payload", born)
    problem = storages_problem(storage_origin, storage_payload, storage_bytes, bounds.contents)
    if problem:
        raise ValueError(problem)

    yield
    ids, tensor_slots = _distinct(tensors)
    yield
    rows = _tensor_rows(ids, given.tensor_definitions)
    storage, offset, meta = rows
    _limit(storage, 0, bounds.next_storage + born - 1, "tensor storage")
    _limit(offset, 0, MAX_LENGTH, "tensor offset")
    _limit(meta, 1, bounds.metas, "tensor meta")

    yield
    base, delta, gap_position, gap_ns = _times(start)
    scope, thread = column("scope", count, 0, bounds.scopes), column("thread", count)
    yield
    body = yield from build_in_parts(
        RECORDS,
        {
            "signature": signature,
            "scope": scope,
            "thread": thread,
            "start_delta_ns": delta,
            "gap_position": gap_position if gap_position.size else None,
            "gap_ns": gap_ns if gap_ns.size else None,
            "duration_ns": duration,
            **optional,
            "tensors": tensor_slots.astype(np.uint32),
            "ints": ints,
            "floats": floats,
            "tensor_id": ids,
            "tensor_storage": storage.astype(np.uint64),
            "tensor_offset": offset,
            "tensor_meta": meta.astype(np.uint32),
            "storage_bytes": storage_bytes,
            "storage_device": column("storage_device", born, 1, bounds.devices),
            "storage_origin": storage_origin,
            "storage_payload": storage_payload,
            "untimed": untimed if untimed.size else None,
            "start_base_ns": base,
            "first_storage": bounds.next_storage,
        },
    )
    return EncodedRecords(body, count, born, signature, storage_origin, storage_bytes, optional["annotation"])


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What np.unique(values, return_inverse=True) gives, in linear time where the values lie close together, or in few
    groups of which that is true."""
    if not values.size:
        return values, np.zeros(0, np.int64)
    recent = values >= np.uint64(max(int(values.max()) - 4 * len(values), 0))
    near = values[recent]
    if len(near) * 4 < len(values):
        return np.unique(values, return_inverse=True)
    base = near.min()
    places = (near - base).astype(np.int64)
    seen = np.zeros(int(places.max()) + 1, bool)
    seen[places] = True
    old, old_slots = _distinct(values[~recent])
    slots = np.empty(len(values), np.int64)
    slots[recent] = (np.cumsum(seen) - 1 + len(old))[places]
    slots[~recent] = old_slots
    return np.concatenate((old, np.flatnonzero(seen).astype(np.uint64) + base)), slots


def _tensor_rows(ids: np.ndarray, definitions: Mapping[int, tuple[int, int, int]] | np.ndarray) -> np.ndarray:
    """Storage, offset and meta of each tensor: int64[3, n]."""
    if ids.size and not ids[0]:
        raise ValueError("tensor ids count from 1")
    if isinstance(definitions, np.ndarray):
        wanted = ids.astype(np.int64)
        places = np.searchsorted(definitions[:, 0], wanted)
        found = places < len(definitions)
        found[found] = definitions[places[found], 0] == wanted[found]
        if not found.all():
            raise ValueError(f"tensor {int(wanted[~found][0])} has no definition")
        return definitions[:, 1:].T.take(places, axis=1)
    try:
        flat = chain.from_iterable(map(definitions.__getitem__, ids.tolist()))
        return np.fromiter(flat, np.int64, 3 * len(ids)).reshape(-1, 3).T
    except KeyError as error:
        raise ValueError(f"tensor {error} has no definition") from None


def _times(start: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """start_base_ns, start_delta_ns, gap_position, gap_ns of absolute start times."""
    if not start.size:
        return 0, np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.uint64)
    if int(start.min()) < 0:
        raise ValueError("start_ns is negative")
    if int(start.max()) > MAX_LENGTH:
        raise ValueError(f"start_ns is {int(start.max())}, more than 2^60")
    # Threads' records may have begun out of order; capture order wins.
    steady = np.maximum.accumulate(start)
    delta = np.diff(steady, prepend=steady[:1])
    position = np.flatnonzero(delta > _LONGEST_DURATION)
    gap = delta[position]
    delta[position] = 0
    return int(steady[0]), delta.astype(np.uint32), position.astype(np.uint32), gap.astype(np.uint64)
