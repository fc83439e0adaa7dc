"""The first pass over a capture: where everything is last used, what is written, where windows may be cut.

`ContentSource` and `MissingContent` say where content that enters comes from, `TensorKeys` which tensor ids can share
one variable, `CutFinder` where windows end, each of which becomes one straight-line function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from replayfmt.format.codes import RecordKind, StorageOrigin, TensorFlag, ValueKind
from replayfmt.format.model import PayloadValue, RangeValue, RecipeValue, Signature, Storage, TensorMeta, Value
from replayfmt.format.reader import CaptureReader, RecordFrame
from replayfmt.format.signature_layout import SlotLayout
from replayfmt.pytorch.collectives import WAIT, reads_results

from .kernels import Effects

# How a storage that was there before the first op that uses it may be born.
IMPORTED = (StorageOrigin.payload, StorageOrigin.absent, StorageOrigin.external_file, StorageOrigin.initializer)


class ContentSource(NamedTuple):
    """`kind` is payload, range, recipe, or none where the capture has nothing; `id` is the id of that kind."""

    kind: ValueKind
    id: int


NOTHING = ContentSource(ValueKind.none, 0)


def source_of(value: Value) -> ContentSource:
    """The source that a storage import's `payload` argument names."""
    if isinstance(value, PayloadValue):
        return ContentSource(ValueKind.payload, value.id)
    if isinstance(value, RangeValue):
        return ContentSource(ValueKind.range, value.id)
    return ContentSource(ValueKind.recipe, value.id) if isinstance(value, RecipeValue) else NOTHING


class MissingContent(NamedTuple):
    """Content that the capture does not have, entering a storage. `version` counts its imports from 0; `recipe` is a
    recipe id or 0. `ordinal` is the import's, -1 where there is no import record."""

    ordinal: int
    storage: int
    version: int
    recipe: int


class TensorKeys:
    """Assigns keys, frame by frame. Forgets a storage's keys once the storage is released."""

    def __init__(self, metas: Sequence[TensorMeta | None]) -> None:
        self._plain = _without_requires_grad(metas)
        self._keys: dict[int, dict[tuple[int, int], int]] = {}
        self.count = 0

    def of_frame(self, frame: RecordFrame) -> np.ndarray:
        """The key of each of the frame's tensors, int64, by local index."""
        known, count = self._keys, self.count
        keys = []
        for storage, offset, meta in zip(
            frame.tensor_storage.tolist(),
            frame.tensor_offset.tolist(),
            self._plain[frame.tensor_meta].tolist(),
            strict=True,
        ):
            of_storage = known.get(storage)
            if of_storage is None:
                of_storage = known[storage] = {}
            key = of_storage.get((offset, meta))
            if key is None:
                key = of_storage[(offset, meta)] = count
                count += 1
            keys.append(key)
        self.count = count
        return np.array(keys, dtype=np.int64)

    def forget(self, storage: int) -> None:
        """The program freed it: no later tensor is on it."""
        self._keys.pop(storage, None)


def _without_requires_grad(metas: Sequence[TensorMeta | None]) -> np.ndarray:
    """For each meta id, the first id of the same metadata, autograd's flag aside."""
    first: dict[TensorMeta, int] = {}
    plain = np.zeros(len(metas), dtype=np.int64)
    for meta_id, meta in enumerate(metas):
        if meta is not None:
            bare = replace(meta, flags=meta.flags & ~TensorFlag.requires_grad)
            plain[meta_id] = first.setdefault(bare, meta_id)
    return plain


_HASHED_OPS = 8  # how many ops before a place decide whether it is cut there
_SCOPE_LEVELS = 63
_HASH_BITS = 48
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class WindowSize:
    """Bounds of a window in records.

    `staged_bytes` bounds what is imported ahead of it; None: by what the capture is known to have had alive at most.
    """

    least: int = 512
    most: int = 4096
    staged_bytes: int | None = None


class CutFinder:
    """Finds the cuts while records are fed in order."""

    def __init__(self, window: WindowSize) -> None:
        self._window = window
        self._cuts: list[int] = []
        self._start = 0  # where the window being looked for begins
        self._scores = np.zeros(0, dtype=np.uint64)  # score of a cut before record start + i
        self._recent = np.zeros(_HASHED_OPS, dtype=np.uint64)  # signatures of the last ops
        self._last_kind = RecordKind.none
        self._depth = 0

    def feed(self, signatures: np.ndarray, kinds: np.ndarray) -> None:
        """The next records. A cut before record n is judged by the records up to n."""
        if not len(kinds):
            return
        self._scores = np.concatenate([self._scores, self._score(signatures, kinds)])
        self._choose()

    def finish(self) -> list[int]:
        """Ordinals of the first record of every window but the first."""
        return self._cuts

    def _choose(self) -> None:
        least, most = self._window.least, self._window.most
        while len(self._scores) > most:
            length = least + int(np.argmax(self._scores[least : most + 1]))
            self._start += length
            self._cuts.append(self._start)
            self._scores = self._scores[length:]

    def _score(self, signatures: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """How good a place each record's beginning is for a cut; 0 for never."""
        before = np.concatenate([[self._last_kind], kinds[:-1]])
        steps = (kinds == RecordKind.scope_begin).astype(np.int64) - (kinds == RecordKind.scope_end)
        depth_before = self._depth + np.concatenate([[0], np.cumsum(steps)[:-1]])
        at_scope = (before == RecordKind.scope_end) | (
            (kinds == RecordKind.scope_begin) & (before != RecordKind.scope_begin)
        )
        level = np.clip(_SCOPE_LEVELS - depth_before, 1, _SCOPE_LEVELS).astype(np.uint64)
        after_op = before == RecordKind.op
        hashes = self._hashes_before(signatures, kinds)
        scores = np.where(after_op, hashes | np.uint64(1), np.uint64(0))
        scores = np.where(at_scope, level << np.uint64(_HASH_BITS), scores)
        self._depth += int(steps.sum())
        self._last_kind = RecordKind(int(kinds[-1]))
        return scores

    def _hashes_before(self, signatures: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """For each record, a hash of the signatures of the last ops before it."""
        is_op = kinds == RecordKind.op
        ops = np.concatenate([self._recent, signatures[is_op].astype(np.uint64) + np.uint64(1)])
        rolling = np.zeros(len(ops) - _HASHED_OPS + 1, dtype=np.uint64)
        for lag in range(_HASHED_OPS):
            part = ops[_HASHED_OPS - 1 - lag : (len(ops) - lag)] * _MULTIPLIER
            part ^= part >> np.uint64(29)
            rolling = rolling * _MULTIPLIER + part
        rolling ^= rolling >> np.uint64(32)
        rolling *= _MULTIPLIER
        rolling >>= np.uint64(64 - _HASH_BITS)
        self._recent = ops[-_HASHED_OPS:]
        return rolling[np.concatenate([[0], np.cumsum(is_op)[:-1]]).astype(np.int64)]


# How many of the ordinals where something was found are kept to be shown.
SHOWN = 3


class GrowingArray:
    """A numpy array that grows; new elements are `fill`."""

    def __init__(self, dtype: type, fill: int) -> None:
        self._fill = fill
        self.values: np.ndarray = np.full(1024, fill, dtype=dtype)

    def reach(self, length: int) -> np.ndarray:
        """The array, with at least `length` elements."""
        if length > len(self.values):
            grown = np.full(max(length, 2 * len(self.values)), self._fill, dtype=self.values.dtype)
            grown[: len(self.values)] = self.values
            self.values = grown
        return self.values


@dataclass
class Imports:
    """Every first import of a storage, in capture order."""

    ordinals: list[int] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)


@dataclass
class Occurrences:
    """How often something occurred, and where it first did."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, ordinals: np.ndarray) -> None:
        self.count += len(ordinals)
        self.first += ordinals[: max(0, SHOWN - len(self.first))].tolist()


class Scan:
    """What one pass over the records up to `stop` (None: all of them) found out.

    With `checks`, digest and host_read records count as uses of their tensor: a verifying replay needs it then. With
    `needed`, a mask over all records, only those of it count as uses.
    `effects` returns an op signature's effects.
    """

    def __init__(
        self,
        reader: CaptureReader,
        effects: Callable[[int, SlotLayout], Effects],
        *,
        checks: bool,
        window: WindowSize,
        stop: int | None = None,
        needed: np.ndarray | None = None,
    ) -> None:
        self.reader = reader
        self.checks = checks
        self.stop = reader.record_count if stop is None else stop
        self.needed = needed
        self._effects = effects
        self._last_use = GrowingArray(np.int32 if reader.record_count < 2**31 else np.int64, -1)
        self._storage_last_use = GrowingArray(self._last_use.values.dtype.type, -1)
        self._written = GrowingArray(np.bool_, 0)
        self._imported_again = GrowingArray(np.bool_, 0)
        self._released = GrowingArray(np.bool_, 0)
        self.imports = Imports()
        self.signature_calls = np.zeros(len(reader.signatures), dtype=np.int64)
        self._first: dict[int, list[int]] = {}
        self.signature_devices: dict[int, set[int]] = defaultdict(set)
        self.metas: set[int] = set()
        self._entrances: list[MissingContent] = []
        self._absent_births: set[int] = set()
        self.threads: set[int] = set()
        self.known_peak_bytes = 0
        self.longest_resize_bytes = 0
        self._live_bytes = 0
        self._storage_bytes: dict[int, int] = {}
        self._kinds = reader.signature_kinds
        self._waits = () if reads_results() else waits(reader)
        self._meta_device = np.array([0, *(meta.device for meta in reader.metas[1:])], dtype=np.int64)
        self._keys = TensorKeys(reader.metas)
        cutter = CutFinder(window)
        for index, info in enumerate(reader.record_frames):
            if info.first_ordinal >= self.stop:
                break
            frame = reader.frame(index)
            count = min(frame.count, self.stop - frame.first_ordinal)
            kinds = self._kinds[frame.signature[:count]]
            self._frame(frame, count, kinds)
            cutter.feed(frame.signature[:count], kinds)
        self.window_cuts = self._cut_at_imports(cutter.finish(), window)

    @property
    def last_use(self) -> np.ndarray:
        """Ordinal of the last use of each tensor key, -1 where a key has none."""
        return self._last_use.reach(self._keys.count)

    def storage_last_uses(self, storages: np.ndarray) -> np.ndarray:
        """Likewise for these storages."""
        return self._storage_last_use.reach(int(storages.max(initial=0)) + 1)[storages]

    def last_use_of(self, storage: int) -> int:
        """Ordinal of a storage's last use, -1 where it has none."""
        return int(self._storage_last_use.reach(storage + 1)[storage])

    def occurring(self, *kinds: RecordKind) -> Iterator[tuple[int, Signature]]:
        """The signatures of these kinds that records have, by id."""
        for number, signature in enumerate(self.reader.signatures):
            if signature is not None and signature.kind in kinds and self.signature_calls[number]:
                yield number, signature

    def seen(self, signatures: Iterable[int]) -> Occurrences:
        """How often records of these signatures occur, and where they first do."""
        numbers = list(signatures)
        first = sorted(ordinal for number in numbers for ordinal in self._first.get(number, ()))
        return Occurrences(int(self.signature_calls[numbers].sum()), first[:SHOWN])

    def is_written(self, storage: int) -> bool:
        """Whether an op or an import after the first may change its bytes."""
        return bool(self._written.reach(storage + 1)[storage] or self._imported_again.reach(storage + 1)[storage])

    def entrances(self) -> list[MissingContent]:
        """Content that is used but not in the capture, in order. Empty storages have none."""
        imported = {each.storage for each in self._entrances if each.version == 0}
        births = [MissingContent(-1, storage, 0, 0) for storage in sorted(self._absent_births - imported)]
        return [
            each
            for each in (*births, *self._entrances)
            if self.last_use_of(each.storage) > each.ordinal and self._holds_bytes(each.storage)
        ]

    def _holds_bytes(self, storage: int) -> bool:
        born = self.reader.storage(storage)
        device = self.reader.devices[born.device]
        return bool(born.bytes) and device is not None and device.kind != "meta"

    def is_released(self, storage: int) -> bool:
        """Whether the program freed it during the capture."""
        return bool(self._released.reach(storage + 1)[storage])

    def layout(self, signature_id: int) -> SlotLayout:
        """Where records of a signature keep their slots."""
        return self.reader.layouts[signature_id]

    def effects(self, signature_id: int) -> Effects:
        return self._effects(signature_id, self.layout(signature_id))

    def _frame(self, frame: RecordFrame, count: int, kinds: np.ndarray) -> None:
        signatures = frame.signature[:count]
        first = frame.first_ordinal
        self.threads.update(np.unique(frame.thread[:count][kinds == RecordKind.op]).tolist())
        keys = self._keys.of_frame(frame)
        self.metas.update(np.unique(frame.tensor_meta).tolist())
        ends = frame.tensor_first[count]
        record_of_slot = np.repeat(np.arange(count), np.diff(frame.tensor_first[: count + 1]))
        local = frame.tensor_slots[:ends]
        used = kinds[record_of_slot]
        counts = used == RecordKind.op
        if self.checks:
            counts |= (used == RecordKind.digest) | (used == RecordKind.host_read)
        if self.needed is not None:
            counts &= self.needed[record_of_slot + first]
        for signature_id in self._waits:
            rows = np.flatnonzero(signatures == signature_id)
            results = self.layout(signature_id).arg("results")
            if results is not None:
                slots = frame.tensor_first[rows].astype(np.int64)[:, None] + np.array(results.tensors, dtype=np.int64)
                counts[slots.ravel()] = False
        self._note_uses(keys, frame.tensor_storage, local[counts], record_of_slot[counts] + first)
        self._note_devices(frame, signatures, record_of_slot, local)
        absent = np.flatnonzero(frame.storage_origin == StorageOrigin.absent)
        self._absent_births.update((absent + frame.first_storage).tolist())
        released: list[tuple[int, int]] = []
        values, counted = np.unique(signatures, return_counts=True)
        self.signature_calls[values] += counted
        for signature_id in values.tolist():
            known = self._first.setdefault(signature_id, [])
            if len(known) < SHOWN:
                known += (np.flatnonzero(signatures == signature_id)[: SHOWN - len(known)] + first).tolist()
            kind = self._kinds[signature_id]
            if kind == RecordKind.op:
                self._note_writes(frame, signatures, signature_id, local, first)
            elif kind in (RecordKind.storage_import, RecordKind.storage_resize, RecordKind.storage_release):
                rows = np.flatnonzero(signatures == signature_id)
                released += self._note_storages(frame, rows, signature_id, first)
        storages, index = np.unique(frame.tensor_storage[local], return_index=True)
        appeared = dict(zip(storages.tolist(), record_of_slot[index].tolist(), strict=True))
        self._note_memory(frame, appeared, released)
        for _position, storage in released:
            self._keys.forget(storage)

    def _note_uses(self, keys: np.ndarray, storages: np.ndarray, slots: np.ndarray, ordinals: np.ndarray) -> None:
        if not len(slots):
            return
        last = np.full(len(keys), -1, dtype=np.int64)
        np.maximum.at(last, slots, ordinals)
        seen = np.flatnonzero(last >= 0)
        np.maximum.at(self._last_use.reach(self._keys.count), keys[seen], last[seen])
        by_storage = self._storage_last_use.reach(int(storages.max(initial=0)) + 1)
        np.maximum.at(by_storage, storages[seen].astype(np.int64), last[seen])

    def _note_devices(
        self, frame: RecordFrame, signatures: np.ndarray, record_of_slot: np.ndarray, local: np.ndarray
    ) -> None:
        width = len(self.reader.devices) + 1
        devices = self._meta_device[frame.tensor_meta]
        pairs = np.unique(signatures[record_of_slot].astype(np.int64) * width + devices[local])
        for pair in pairs.tolist():
            self.signature_devices[pair // width].add(pair % width)

    def _note_writes(
        self, frame: RecordFrame, signatures: np.ndarray, signature_id: int, local: np.ndarray, first: int
    ) -> None:
        layout = self.layout(signature_id)
        effects = self.effects(signature_id)
        storage_slots = [each.int_slot for each in layout.nodes(ValueKind.storage)]
        written = effects.writes + effects.unsure
        if not storage_slots and not written:
            return
        rows = np.flatnonzero(signatures == signature_id)
        if written:
            slots = frame.tensor_first[rows][:, None] + np.array(written, dtype=np.int64)
            storages = np.unique(frame.tensor_storage[local[slots.ravel()]]).astype(np.int64)
            self._written.reach(int(storages.max()) + 1)[storages] = True
        if self.needed is not None:
            rows = rows[self.needed[rows + first]]
        for slot in storage_slots if len(rows) else ():
            storages = frame.ints[frame.int_first[rows] + slot]
            np.maximum.at(self._storage_last_use.reach(int(storages.max()) + 1), storages, rows + first)

    def _note_storages(
        self, frame: RecordFrame, rows: np.ndarray, signature_id: int, first: int
    ) -> list[tuple[int, int]]:
        """Imports, resizes and releases of one signature; returns the releases, as (position, storage)."""
        layout = self.layout(signature_id)
        kind = layout.signature.kind
        storages = frame.ints[frame.int_first[rows] + _slot(layout, "storage")]
        top = int(storages.max()) + 1
        if kind is RecordKind.storage_release:
            self._released.reach(top)[storages] = True
            return list(zip(rows.tolist(), storages.tolist(), strict=True))
        ordinals = rows + first
        if kind is RecordKind.storage_resize:
            self._written.reach(top)[storages] = True
            longest = int(frame.ints[frame.int_first[rows] + _slot(layout, "bytes")].max())
            self.longest_resize_bytes = max(self.longest_resize_bytes, longest)
        if kind is RecordKind.storage_import:
            versions = frame.ints[frame.int_first[rows] + _slot(layout, "version")].tolist()
            content = layout.arg("payload")
            if content is not None and content.node.kind in (ValueKind.none, ValueKind.recipe):
                recipes = [0] * len(rows)
                if content.node.kind is ValueKind.recipe:
                    recipes = frame.ints[frame.int_first[rows] + content.int_slot].tolist()
                self._entrances += map(MissingContent, ordinals.tolist(), storages.tolist(), versions, recipes)
            again = np.array(
                [
                    not enters(version, self.reader.storage(storage))
                    for version, storage in zip(versions, storages.tolist(), strict=True)
                ]
            )
            self.imports.ordinals += ordinals[~again].tolist()
            self.imports.storages += storages[~again].tolist()
            storages, ordinals = storages[again], ordinals[again]
            self._imported_again.reach(top)[storages] = True
        if self.needed is not None:
            storages, ordinals = storages[self.needed[ordinals]], ordinals[self.needed[ordinals]]
        np.maximum.at(self._storage_last_use.reach(top), storages, ordinals)
        return []

    def _note_memory(self, frame: RecordFrame, appeared: dict[int, int], released: list[tuple[int, int]]) -> None:
        """Follow how many bytes of the storages that the capture knows were alive at once, at least. `appeared`:
        storages used in the frame, each with the position of the record that uses it first."""
        first, count = frame.first_storage, len(frame.storage_bytes)
        events: list[tuple[int, int]] = []
        for storage, position in appeared.items():
            if first <= storage < first + count:
                length = int(frame.storage_bytes[storage - first])
                self._storage_bytes[storage] = length
                events.append((2 * position, length))
        events += [(2 * position + 1, -self._storage_bytes.pop(storage, 0)) for position, storage in released]
        if events:
            events.sort()
            alive = self._live_bytes + np.cumsum([change for _, change in events])
            self.known_peak_bytes = max(self.known_peak_bytes, int(alive.max()))
            self._live_bytes = int(alive[-1])

    def _cut_at_imports(self, cuts: list[int], window: WindowSize) -> list[int]:
        """More cuts, so that staging a window's imports ahead of it adds little to what the program had alive.

        Only storages that the program freed again can matter: the others were there at the end, and may as well have
        been there from the beginning.
        """
        budget = window.staged_bytes if window.staged_bytes is not None else max(1 << 20, self.known_peak_bytes // 50)
        added: list[int] = []
        window_index, staged = -1, 0
        bounds = np.array([*cuts, self.stop], dtype=np.int64)
        for ordinal, storage in zip(self.imports.ordinals, self.imports.storages, strict=True):
            here = int(np.searchsorted(bounds, ordinal, side="right"))
            if here != window_index:
                window_index, staged = here, 0
            if not self.is_released(storage):
                continue
            staged += self.reader.storage(storage).bytes
            if staged > budget:
                if ordinal:
                    added.append(ordinal)
                staged = self.reader.storage(storage).bytes
        return sorted({*cuts, *added})


def waits(reader: CaptureReader) -> list[int]:
    """The signatures of waits for collectives."""
    names = {number for number, kernel in enumerate(reader.kernels) if kernel is not None and kernel.name == WAIT}
    return [
        number
        for number, each in enumerate(reader.signatures)
        if each is not None and each.kind is RecordKind.op and each.kernel in names
    ]


def enters(version: int, storage: Storage) -> bool:
    """Whether an import brings a storage into the replay; otherwise it gives new content to one that is there."""
    return version == 0 and storage.origin in IMPORTED


def _slot(layout: SlotLayout, name: str) -> int:
    place = layout.arg(name)
    assert place is not None, f"a {layout.signature.kind.name} record without {name}"
    return place.int_slot
