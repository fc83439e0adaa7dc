"""How many bytes of a capture's storages are alive at each record, by device: exactly, from their lifetimes.

A storage begins with the first record that names it, a use or an import. So what came from outside (parameters, inputs)
counts from its first use, not from when the program allocated it. Its length is that at its birth, and from a resize on
the new one. If the program released it, it ends after the last record that uses it, as in a replay; otherwise it is
alive to the end.

Recorders notice releases late, many at once, so a program may have held a storage longer than that, but at most until
the record of its release: what it really held lies between the two. What kernels allocate and free within a call is not
in a capture, and neither is what an allocator rounds up or keeps. Storages on the meta device have no bytes.

The walks take one frame at a time and keep the storages that are alive, and 16 bytes for each storage of the capture.
Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replayfmt.errors import InvalidCapture

from .codes import RecordKind, StorageOrigin, ValueKind
from .reader import CaptureReader, RecordFrame
from .record_frames import distinct

_WITHOUT_BYTES = "meta"
_MADE_HERE = (StorageOrigin.op, StorageOrigin.uninitialized)
_MOST_BYTES = 1 << 62  # sums stay below, so that none overflows
_FRAMES_SEARCHED = 4  # for the op that first uses a storage from outside: its import comes right before that
_NEVER = np.iinfo(np.int64).max

# The storages that are alive, by ascending id: length, device id, the record that first names them and its signature,
# and the last record at which they are alive.
ALIVE = np.dtype(
    [("id", "i8"), ("bytes", "i8"), ("device", "i8"), ("origin", "u1"), ("born", "i8"), ("signature", "i8")]
    + [("end", "i8")]
)


@dataclass(frozen=True)
class PeakStorage:
    """A storage that is alive at a peak, with its length then. `ordinal` is the first record that names it, `op` the op
    that made it or, if it is `outside` memory, the one that first used it; None where that is not known."""

    storage: int
    bytes: int
    outside: bool
    origin: str
    ordinal: int
    op: str | None
    scope: str


@dataclass(frozen=True)
class PeakShare:
    """What the storages that one op made add to a peak, over all its calls. `op` is None for those that came from
    outside (`outside`), and for those whose first record is no op."""

    op: str | None
    outside: bool
    storages: int
    bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes alive on one device.

    `peak_bytes` are alive at the record `peak_ordinal`, the first with that many, in `peak_storages` storages: all of
    them are in `shares`, by op and with the largest first, and the `largest` ones are listed. `end_bytes` are alive at
    the last record. `held_peak_bytes` is the most if each storage is held until its release was recorded.

    Step i of the picture stands for the records from `ordinals[i]` up to `ordinals[i + 1]` (the last one: to the end),
    and between `least_bytes[i]` and `most_bytes[i]` are alive at them: int64 arrays of one length. Where each step is
    one record, the two are the same.
    """

    device: str
    peak_bytes: int
    peak_ordinal: int
    peak_storages: int
    end_bytes: int
    held_peak_bytes: int
    shares: tuple[PeakShare, ...]
    largest: tuple[PeakStorage, ...]
    ordinals: np.ndarray
    least_bytes: np.ndarray
    most_bytes: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, under the names of the fields."""
        made = dict(vars(self))
        for name in ("shares", "largest"):
            made[name] = [dict(vars(each)) for each in made[name]]
        for name in ("ordinals", "least_bytes", "most_bytes"):
            made[name] = made[name].tolist()
        return made


@dataclass(frozen=True)
class FrameMemory:
    """One frame of records. `bytes` has for each device id with storages so far the bytes that are alive at each of the
    frame's records; `before` are the storages that were alive at the record before them."""

    frame: RecordFrame
    before: np.ndarray
    bytes: dict[int, np.ndarray]


def memory_by_device(reader: CaptureReader, *, steps: int = 2000, largest: int = 20) -> list[DeviceMemory]:
    """The memory of each device that has storages, in the order of the capture's devices. At most `steps` steps, and
    the `largest` storages of each peak. Raises InvalidCapture for a damaged frame."""
    ends = StorageEnds(reader)
    walk = LifetimeWalk(reader, ends.used)
    bounds = np.arange(0, max(reader.record_count, 1), max(1, -(-reader.record_count // max(1, steps))))
    found: dict[int, _DeviceCurve] = {}
    for memory in walk:
        for device, alive in memory.bytes.items():
            if device not in found:
                found[device] = _DeviceCurve(np.zeros(len(bounds), np.int64), np.zeros(len(bounds), np.int64))
            found[device].add(memory, bounds, alive)
    held: dict[int, int] = {}
    for memory in LifetimeWalk(reader, ends.released):
        for device, alive in memory.bytes.items():
            held[device] = max(held.get(device, 0), int(alive.max()))
    made = []
    for device in sorted(found):
        each = found[device]
        at_peak = walk.alive_at(each.frame, each.before, each.peak_ordinal)
        at_peak = at_peak[at_peak["device"] == device]
        made.append(
            DeviceMemory(
                str(reader.devices[device]),
                each.peak,
                each.peak_ordinal,
                len(at_peak),
                each.end,
                held[device],
                _shares(reader, at_peak),
                _largest(reader, at_peak, largest),
                bounds,
                each.least,
                each.most,
            )
        )
    return made


@dataclass
class _DeviceCurve:
    """The picture of one device so far, and where its peak is: in a frame, and with what alive before that frame."""

    least: np.ndarray
    most: np.ndarray
    peak: int = -1
    peak_ordinal: int = 0
    end: int = 0
    frame: int = 0
    before: np.ndarray = field(default_factory=lambda: np.zeros(0, ALIVE))

    def add(self, memory: FrameMemory, bounds: np.ndarray, alive: np.ndarray) -> None:
        start = memory.frame.first_ordinal
        first, last = (int(each) for each in np.searchsorted(bounds, (start, start + memory.frame.count - 1), "right"))
        starts = np.maximum(bounds[first - 1 : last] - start, 0)
        least, most = np.minimum.reduceat(alive, starts), np.maximum.reduceat(alive, starts)
        if bounds[first - 1] < start:  # its step began before the frame
            least[0] = min(least[0], self.least[first - 1])
            most[0] = max(most[0], self.most[first - 1])
        self.least[first - 1 : last], self.most[first - 1 : last] = least, most
        highest = int(np.argmax(alive))
        if int(alive[highest]) > self.peak:
            self.peak, self.peak_ordinal = int(alive[highest]), start + highest
            self.frame, self.before = start, memory.before
        self.end = int(alive[-1])


class _NamedStorages:
    """Where records name storages besides those of their tensors: the int slots of each signature."""

    def __init__(self, reader: CaptureReader) -> None:
        self._reader = reader
        self._slots: dict[int, list[int]] = {}

    def named(self, frame: RecordFrame) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
        """Positions of records in the frame and the storage ids that they name, and whether they release them."""
        record_of_slot = np.repeat(np.arange(frame.count), np.diff(frame.tensor_first))
        yield record_of_slot, frame.tensor_storage[frame.tensor_slots].astype(np.int64), False
        for signature in distinct(frame.signature).tolist():
            layout = self._reader.layouts[signature]
            if signature not in self._slots:
                self._slots[signature] = [each.int_slot for each in layout.nodes(ValueKind.storage)]
            slots = self._slots[signature]
            if slots:
                rows = np.flatnonzero(frame.signature == signature)
                storages = frame.ints[frame.int_first[rows][:, None] + slots]
                rows = np.repeat(rows, len(slots))
                yield rows, storages.ravel(), layout.signature.kind is RecordKind.storage_release


class StorageEnds:
    """The last record at which each storage is alive, by id: if released storages end with the last record that uses
    them (`used`), or before the record of their release (`released`). The largest int64 stands for the end of the
    capture. One pass over the records."""

    def __init__(self, reader: CaptureReader) -> None:
        self.used = np.full(reader.storage_count + 1, -1, np.int64)
        self.released = np.full(reader.storage_count + 1, _NEVER, np.int64)
        slots = _NamedStorages(reader)
        for index in range(len(reader.record_frames)):
            frame = reader.frame(index)
            for rows, storages, releases in slots.named(frame):
                if releases:
                    np.minimum.at(self.released, storages, rows + (frame.first_ordinal - 1))
                else:
                    np.maximum.at(self.used, storages, rows + frame.first_ordinal)
        self.used[self.released == _NEVER] = _NEVER


class LifetimeWalk:
    """The frames of a capture in order, each with what is alive at its records. `ends` has the last record at which
    each storage is alive, by id (StorageEnds). Can be walked any number of times."""

    def __init__(self, reader: CaptureReader, ends: np.ndarray) -> None:
        self._reader = reader
        self._ends = ends
        self._slots = _NamedStorages(reader)
        self._counted = np.array(
            [False, *(each is not None and each.kind != _WITHOUT_BYTES for each in reader.devices[1:])]
        )

    def __iter__(self) -> Iterator[FrameMemory]:
        alive = np.zeros(0, ALIVE)
        levels: dict[int, int] = {}
        for index in range(len(self._reader.record_frames)):
            frame = self._reader.frame(index)
            if not frame.count:
                if len(frame.storage_bytes):
                    raise InvalidCapture(
                        f"{self._reader.path}: frame {index} has storages and no record that names them"
                    )
                continue
            before = alive
            positions, devices, changes, alive = self._changes(frame, before, frame.count)
            made: dict[int, np.ndarray] = {}
            for device in sorted({*levels, *distinct(devices).tolist()}):
                steps = np.zeros(frame.count, np.int64)
                own = devices == device
                np.add.at(steps, positions[own], changes[own])
                level = made[device] = levels.get(device, 0) + np.cumsum(steps)
                levels[device] = int(level[-1])
            yield FrameMemory(frame, before, made)

    def alive_at(self, first_ordinal: int, before: np.ndarray, ordinal: int) -> np.ndarray:
        """What is alive at a record (rows of ALIVE), if `before` was alive before the frame that it is in."""
        frame = self._reader.frame(self._reader.frame_of(first_ordinal))
        return self._changes(frame, before, ordinal - first_ordinal + 1)[3]

    def _changes(
        self, frame: RecordFrame, before: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What changes at the first `count` records: positions, device ids and differences in bytes, and what is alive
        at the last of them."""
        born = self._born(frame)
        born = born[born["born"] < frame.first_ordinal + count]
        resizes = self._resizes(frame, count)
        most = sum(float(column.sum(dtype=np.float64)) for column in (before["bytes"], born["bytes"], resizes[:, 2]))
        if most > _MOST_BYTES:
            raise InvalidCapture(
                f"{self._reader.path}: the storages alive at ordinal {frame.first_ordinal} add up to more than 2^62 "
                f"bytes"
            )
        alive = np.concatenate([before, born])
        changes = [(born["born"] - frame.first_ordinal, born["device"], born["bytes"])]
        ids = np.ascontiguousarray(alive["id"])
        for position, storage, length in resizes.tolist():
            place = int(np.searchsorted(ids, storage))
            if place < len(ids) and ids[place] == storage and position + frame.first_ordinal <= alive["end"][place]:
                row = alive[place]
                changes.append((np.array([position]), row["device"][None], np.array([length - int(row["bytes"])])))
                row["bytes"] = length
        ends = alive["end"] < frame.first_ordinal + count - 1
        gone = alive[ends]
        changes.append((gone["end"] + 1 - frame.first_ordinal, gone["device"], -gone["bytes"]))
        positions, devices, differences = (np.concatenate(column) for column in zip(*changes, strict=True))
        return positions, devices, differences, alive[~ends]

    def _born(self, frame: RecordFrame) -> np.ndarray:
        """The storages born in a frame that have bytes, as rows of ALIVE."""
        made = np.zeros(len(frame.storage_bytes), ALIVE)
        first = np.full(len(made), frame.count, np.int64)
        for rows, storages, _releases in self._slots.named(frame):
            here = storages >= frame.first_storage
            np.minimum.at(first, storages[here] - frame.first_storage, rows[here])
        first[first == frame.count] = 0  # no record of the frame names it: it is there from the frame's beginning
        made["id"] = np.arange(frame.first_storage, frame.first_storage + len(made))
        made["bytes"], made["device"] = frame.storage_bytes, frame.storage_device
        made["origin"] = frame.storage_origin
        made["born"], made["signature"] = first + frame.first_ordinal, frame.signature[first]
        made["end"] = np.maximum(self._ends[made["id"]], made["born"])
        return made[self._counted[frame.storage_device]]

    def _resizes(self, frame: RecordFrame, count: int) -> np.ndarray:
        """Resizes among the first `count` records, in order: position, storage and new length of each."""
        found = [np.zeros((0, 3), np.int64)]
        signatures = frame.signature[:count]
        for signature in distinct(signatures).tolist():
            if self._reader.signatures[signature].kind is RecordKind.storage_resize:
                rows = np.flatnonzero(signatures == signature)
                first = frame.int_first[rows]
                found.append(np.stack([rows, frame.ints[first], frame.ints[first + 1]], axis=1))
        resizes = np.concatenate(found)
        return resizes[np.argsort(resizes[:, 0], kind="stable")]


def _is_outside(origins: np.ndarray) -> np.ndarray:
    return ~np.isin(origins, [int(each) for each in _MADE_HERE])


def _shares(reader: CaptureReader, alive: np.ndarray) -> tuple[PeakShare, ...]:
    shares: dict[tuple[str | None, bool], list[int]] = {}
    outside = _is_outside(alive["origin"])
    for signature in distinct(alive["signature"]).tolist():
        for is_outside in (False, True):
            own = alive[(alive["signature"] == signature) & (outside == is_outside)]
            if len(own):
                share = shares.setdefault((None if is_outside else _op(reader, signature), is_outside), [0, 0])
                share[0] += len(own)
                share[1] += int(own["bytes"].sum())
    made = [PeakShare(op, is_outside, *counts) for (op, is_outside), counts in shares.items()]
    return tuple(sorted(made, key=lambda each: (-each.bytes, each.op or "")))


def _largest(reader: CaptureReader, alive: np.ndarray, most: int) -> tuple[PeakStorage, ...]:
    chosen = alive[np.lexsort((alive["id"], -alive["bytes"]))[:most]]
    made = []
    for row, outside in zip(chosen, _is_outside(chosen["origin"]).tolist(), strict=True):
        number, ordinal = int(row["id"]), int(row["born"])
        frame = reader.frame(reader.frame_of(ordinal))
        made.append(
            PeakStorage(
                number,
                int(row["bytes"]),
                outside,
                StorageOrigin(int(row["origin"])).name,
                ordinal,
                _first_user(reader, number, ordinal) if outside else _op(reader, int(row["signature"])),
                reader.scope_path(int(frame.scope[ordinal - frame.first_ordinal])),
            )
        )
    return tuple(made)


def _op(reader: CaptureReader, signature: int) -> str | None:
    """The operator of a signature's records; None if they are no ops."""
    kernel = reader.kernels[reader.signatures[signature].kernel]
    return None if kernel is None else kernel.qualified_name


def _first_user(reader: CaptureReader, storage: int, ordinal: int) -> str | None:
    """The op that first uses a storage, from the record that first names it on; None if it is not soon after."""
    first = reader.frame_of(ordinal)
    for index in range(first, min(first + _FRAMES_SEARCHED, len(reader.record_frames))):
        frame = reader.frame(index)
        record_of_slot = np.repeat(np.arange(frame.count), np.diff(frame.tensor_first))
        used = record_of_slot[frame.tensor_storage[frame.tensor_slots] == storage]
        for row in distinct(used).tolist():
            name = _op(reader, int(frame.signature[row]))
            if name is not None:
                return name
    return None
