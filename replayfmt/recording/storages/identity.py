"""The program's storages: their identity, their import into the capture, their release.

A storage is known by its tracker (trackers.py), whose callback reports its release. A callback may run at any time in
any thread, so it only appends to a deque, which is drained later.

A storage that no captured op produced is imported at its first use, in the state it has then. Ordinary storages cost
one comparison of their length at each use. Storages that need more care (uninitialized, watched for writes from
outside, marked as written) have `size` -1 and a `State`.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import MAPPED_FILE
from replayfmt.pytorch.tensors.memory import address_of, host_view

from ..content.coverage import ByteRegion
from ..content.first_content import UNREADABLE, FirstContent, FirstContents
from ..content.storage_content import content_beside, content_number, is_synthesized, sample
from ..special_values import Handles
from ..stream.records import MetaParams, Records, TensorMetas, Unrepresentable
from ..stream.session import Entry, Session, pack_definition
from .trackers import (
    ATTRIBUTE,
    EXPORTED,
    GENERATED,
    Beside,
    HostMemory,
    State,
    Tracker,
    Unexplained,
    Unwritten,
    has_bytes,
    owner_of,
)

RELEASE_BATCH = 64
_ENTERS_BYTES = 1 << 28  # unwritten memory larger than this is left out of digests rather than embedded
# Why bytes that nothing wrote enter: an op reads them, or declares that it writes them.
_AS_IT_IS = ("uninitialized_read", "written_argument")
_CPU = torch.device("cpu")
_64_BITS = (1 << 64) - 1
_hide_from_collector = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


class Storages:
    """Every storage that the capture knows. Callers hold the recorder's lock."""

    def __init__(
        self,
        records: Records,
        metas: TensorMetas,
        contents: FirstContents,
        handles: Handles,
        session: Session,
        *,
        audit: bool,
    ) -> None:
        self._session = session
        self._records = records
        self._metas = metas
        self._contents = contents
        self._handles = handles
        self._content = contents.recorded
        self._audit = audit and contents.recorded
        self.compares = audit and contents.exact  # whether a call's arguments are compared with what they were
        self.live: dict[int, Tracker] = {}
        self.dead: deque[Tracker] = deque()
        self._memory = HostMemory(self.live)
        self.unexplained = Unexplained(records)
        self.settle: Callable[[], None] = lambda: None  # waits for the devices: copies to the host may be under way
        self.readable: Callable[[], bool] = lambda: True  # whether memory of devices can be read now
        # Records digests of what captured ops wrote of a storage whose content is about to enter.
        self.digest_written: Callable[[Tracker, torch.UntypedStorage], None] = lambda _tracker, _storage: None
        # Some bytes of a storage are about to be used that a collective may have written.
        self.arrived: Callable[[Tracker, int, int], None] = lambda _tracker, _begin, _end: None
        self._copies: list[int] = []  # storages of the capture alone, not released yet
        self._aliases: dict[int, list[Tracker]] = {}  # by storage id: others on the same memory
        self.watches_natively = False  # whether the hot path may compare the content of watched storages

    # -------------------------------------------------------------------------------------------------------- identity

    def tracker_of(self, storage: torch.UntypedStorage) -> Tracker | None:
        tracker: Tracker | None = getattr(storage, ATTRIBUTE, None)
        if tracker is not None:
            return tracker
        found = self._session.adopt(storage._cdata)
        if found is None:
            return None
        entry, number, length, sampled, generated = found
        tracker = self.live[number] = self._track(storage, entry, number, length)
        tracker.offered = True
        self._memory.add(tracker)
        if generated:
            setattr(storage, GENERATED, True)
        if sampled is not None:
            self._begin_coverage(tracker, length, sampled)
        return tracker

    def no_longer_generated(self, storage: torch.UntypedStorage) -> None:
        """The code that allocated a storage has handed it to the program."""
        if self.tracker_of(storage) is not None and hasattr(storage, GENERATED):
            delattr(storage, GENERATED)

    def adopt_all(self) -> None:
        """Make sure that every live storage has a tracker."""
        for storage in self._session.unadopted():
            self.tracker_of(storage)

    def _track(self, storage: torch.UntypedStorage, entry: Entry, number: int, length: int) -> Tracker:
        tracker = Tracker(storage, self.dead.append)
        tracker.entry = entry
        tracker.offered = False
        tracker.id = number
        tracker.state = None
        tracker.size = length
        tracker.imports = 0
        setattr(storage, ATTRIBUTE, tracker)
        # A program that lists what the collector knows does not find objects that PyTorch made for the recorder.
        _hide_from_collector(storage)
        return tracker

    def _add_storage(
        self,
        storage: torch.UntypedStorage,
        length: int,
        device: torch.device,
        origin: StorageOrigin,
        payload: int,
        readable: bool,
    ) -> Tracker:
        number = self._session.add_storage(length, self._records.device(device), int(origin), payload)
        entry = self._session.track(storage._cdata, number, length)
        tracker = self.live[number] = self._track(storage, entry, number, length)
        self._memory.add(tracker)
        if self._audit and readable:
            self.watch(tracker)
        if not readable and device.type != "meta":  # a ZeroTensor's: not to be mistaken for others of the same metadata
            self.state(tracker).unreadable = True
            tracker.need_care()
        return tracker

    def view(self, tracker: Tracker, meta: int, offset: int, item: int) -> int:
        """The tensor id of a view. `offset` is in elements of `item` bytes."""
        state = tracker.state
        if state is not None and state.alias_of is not None:
            if state.delta % item:
                shared = f"memory shared {state.delta} bytes into a storage, with elements of {item} bytes"
                raise Unrepresentable("overlapping_storages", shared)
            return self.view(state.alias_of, meta, offset + state.delta // item, item)
        entry = tracker.entry
        if state is not None and state.synthesized and not entry.find(meta, offset) and not entry.written():
            self._reveal(tracker, state, self._metas.params[meta])
        number = entry.view(meta, offset)
        if not tracker.offered:
            tracker.offer()
        return number

    def _reveal(self, tracker: Tracker, state: State, params: MetaParams) -> None:
        """A storage whose content was left out as floats is about to be viewed as another dtype. As integers its bytes
        matter, so they are imported; as bytes it is just loaded, copied or saved."""
        storage = tracker()
        if is_synthesized(params.dtype) or params.dtype is torch.uint8 or storage is None:
            return
        self._enter_again(tracker, state, storage, "integer_use", params.dtype)

    # ---------------------------------------------------------------------------------------------------- new storages

    def produced(self, storage: torch.UntypedStorage, *, uninitialized: bool) -> Tracker:
        """A new storage that an op returned."""
        length, device = storage.nbytes(), storage.device
        readable = has_bytes(storage, length, device)
        if not uninitialized:
            return self._add_storage(storage, length, device, StorageOrigin.op, 0, readable)
        tracker = self._add_storage(storage, length, device, StorageOrigin.uninitialized, 0, readable)
        if length and readable:
            self._begin_coverage(tracker, length, sample(storage))
        return tracker

    def _begin_coverage(self, tracker: Tracker, length: int, sampled: bytes) -> None:
        """Nothing has been written to it. `sampled`: as it is (`sample`)."""
        self.state(tracker).begin_coverage(length, sampled)
        tracker.need_care()

    def enter(self, storage: torch.UntypedStorage, dtype: torch.dtype | None, reason: str = "first_use") -> Tracker:
        """A storage that no captured op produced, at its first use, as `dtype` (None: as a bare storage): its content
        is imported."""
        length, device = storage.nbytes(), storage.device
        if not length or not has_bytes(storage, length, device):
            return self._add_storage(storage, length, device, StorageOrigin.uninitialized, 0, not length)
        held = self._handles.held_by(storage) if device == _CPU else None
        if held is not None and (base := self.tracker_of(held)) is not None:
            return self._alias(storage, base, 0, length)
        # Memory that torch did not allocate, or that other processes share: others may write it.
        external = device == _CPU and (not storage.resizable() or storage.is_shared())
        exported = device == _CPU and getattr(storage, EXPORTED, False)
        private, shared = self._contents.is_private(storage), False
        if device == _CPU and (external or self._memory.shared):
            overlapping = self._overlapping(storage, length)
            alias = self._containing(storage, length, dtype) if overlapping else None
            if alias is not None:
                return alias
            shared = bool(overlapping)
            self._watch_all(overlapping)
        hashed = private and self.watches_natively and (external or exported)
        before = self._session.content_hash(address_of(storage), length) if hashed else None
        content = self._contents.first(storage, dtype, external and not private, private)
        if reason == "first_use" and content.found is not None and content.found.mapped is not None:
            reason = MAPPED_FILE  # aligned as in the file, which affects the last bits of some kernels
        try:
            tracker = self._add_storage(storage, length, device, content.origin, content.id, True)
            self._records.storage_import(tracker.id, content, 0, reason)
        except BaseException:
            self._disown(storage)  # an interrupt: without its import the storage is unknown, and enters as a new one
            raise
        tracker.imports = 1
        if external:
            self._memory.add_external(tracker.id, storage)
        if external or shared or exported:
            self.watch(tracker, private=private)
        if device != _CPU and not storage.resizable():
            self._records.unsupported(
                "foreign_memory",
                "",
                f"{length} bytes on {device} that torch did not allocate (another process's, or another "
                f"library's): writes by others are not seen",
            )
        self._note_content(tracker, content)
        self.synchronize(tracker, storage, before)
        return tracker

    def embed_copy(self, storage: torch.UntypedStorage, meta: int, offset: int) -> int | None:
        """The tensor id of a copy of a view as it is now, in a storage that the program does not have. None if that
        takes a real copy: it has holes, another device has it, or its content does not enter as it is."""
        params = self._metas.params[meta]
        dense = None if params.flags or storage.device.type != "cpu" else params.region(offset).dense()
        if dense is None or not self._contents.embeds(dense[1] - dense[0]):
            return None
        content = self._contents.embedded(host_view(storage)[dense[0] : dense[1]])
        device = self._records.device(storage.device)
        number = self._session.add_storage(dense[1] - dense[0], device, int(content.origin), content.id)
        self._copies.append(number)
        self._records.storage_import(number, content, 0, "first_use")
        return self._session.define_tensor(number, 0, meta)

    def _note_content(self, tracker: Tracker, content: FirstContent) -> None:
        """Remember what is needed of imported content."""
        if content is UNREADABLE:
            self.state(tracker).opaque, self.state(tracker).mapped = True, None
            self._records.unsupported(
                "foreign_memory", "", f"storage {tracker.id} is memory that cannot be read: its file was made shorter"
            )
        synthesized = content.origin is StorageOrigin.initializer
        if synthesized or tracker.state is not None:
            self.state(tracker).synthesized = synthesized
        if content.found is not None and content.found.mapped is not None:
            self._contents.keep(content.found, tracker)
            if not self._audit:
                self.state(tracker).mapped = content.found.mapped

    # ------------------------------------------------------------------------------------------------- shared memory

    def _containing(self, storage: torch.UntypedStorage, length: int, dtype: torch.dtype | None) -> Tracker | None:
        """A tracker for memory that lies entirely within another storage of the capture, or None."""
        begin = address_of(storage)
        for base, low in self._memory.containing(begin, begin + length):
            delta = begin - low
            if not (delta % dtype.itemsize if dtype is not None else delta):
                return self._alias(storage, base, delta, length)
        return None

    def _overlapping(self, storage: torch.UntypedStorage, length: int) -> list[Tracker]:
        """Those that a storage shares memory with."""
        begin = address_of(storage)
        for born in self._session.overlapping(begin, begin + length):
            self.tracker_of(born)
        return self._memory.overlapping(begin, begin + length)

    def _watch_all(self, others: list[Tracker]) -> None:
        """They partly overlap a storage: from now on a write to one is a write from outside to the others."""
        for other in others:
            memory = other()
            if memory is not None and not self.state(other).watched:
                self.share(other, memory)

    def _alias(self, storage: torch.UntypedStorage, base: Tracker, delta: int, length: int) -> Tracker:
        tracker = self._track(storage, self._session.track(storage._cdata, base.id, length), base.id, -1)
        state = tracker.state = State(length)
        state.alias_of, state.delta = base, delta
        self._aliases.setdefault(base.id, []).append(tracker)
        self.watch(base, windowed=True)
        return tracker

    # ------------------------------------------------------------------------------------------------------------ uses

    def state(self, tracker: Tracker) -> State:
        if tracker.state is None:
            tracker.state = State(tracker.size)
        return tracker.state

    def watch(self, tracker: Tracker, *, windowed: bool = False, private: bool | None = None) -> None:
        """Compare its content at each use from now on. `windowed`: because the program has a window on its memory.
        `private`: see `State` (None: to be found out). The caller synchronizes."""
        state, storage = self.state(tracker), tracker()
        state.windowed |= windowed
        if not state.watched or tracker.size >= 0 or (state.private and storage is not None and storage.is_shared()):
            if state.watched and self.written_outside(tracker):  # what it is known to hold is forgotten here
                state.outside = True
            state.watched = True
            if self.watches_natively and storage is not None:
                if private is None:
                    private = self._session.allocated(storage._cdata) or self._contents.is_private(storage)
                state.private = private
                tracker.entry.content = None  # that was a number of another kind
            tracker.need_care()

    def share(self, tracker: Tracker, storage: torch.UntypedStorage, windowed: bool = True) -> None:
        """Others may write to it from now on, through a window that the program has on its memory if `windowed`."""
        if tracker.state is None and self.watches_natively and self._session.allocated(storage._cdata):
            state = tracker.state = State(tracker.size)
            state.watched, state.private, state.windowed = True, True, windowed
            tracker.size, tracker.offered = -1, True
            tracker.entry.watch()
            return
        self.watch(tracker, windowed=windowed)
        if tracker.entry.content is None:  # else they may have written to it before
            self.synchronize(tracker, storage)
        if not tracker.offered:
            tracker.offer()

    def content_now(self, tracker: Tracker, storage: torch.UntypedStorage) -> int:
        """A number that identifies the content of a storage."""
        state = tracker.state
        if state is not None and state.private:
            return self._session.content_hash(address_of(storage), storage.nbytes())
        return content_number(storage, None if state is None else state.mapped) & _64_BITS

    def written_outside(self, tracker: Tracker) -> bool:
        """Whether a storage is watched and its content differs from what the stream says."""
        state, storage = tracker.state, tracker()
        if state is None or storage is None or not state.watched or not storage.nbytes():
            return False
        known = tracker.entry.content
        return known is not None and self.content_now(tracker, storage) != known

    def mark_written_outside(self, tracker: Tracker) -> None:
        """Its content is imported again at its next use."""
        state = self.state(tracker)
        if state.alias_of is not None:
            tracker, state = state.alias_of, self.state(state.alias_of)
        state.outside = True
        for meta, offset, number in tracker.entry.views():  # they may have been lost with the row that was to hold them
            self._session.definitions.append(pack_definition(number, tracker.id, offset, meta))
        tracker.need_care()

    def forget(self, storage: torch.UntypedStorage) -> None:
        """A storage whose origin was not recorded: it is imported at its next use, if any."""
        tracker = self.tracker_of(storage)
        if tracker is not None and not tracker.imports and tracker.state is None:
            self._untrack(storage, tracker)

    def _disown(self, storage: torch.UntypedStorage) -> None:
        tracker = self.tracker_of(storage)
        if tracker is not None:
            self._untrack(storage, tracker)

    def _untrack(self, storage: torch.UntypedStorage, tracker: Tracker) -> None:
        tracker.entry.forget()
        delattr(storage, ATTRIBUTE)
        self.live.pop(tracker.id, None)

    def use(
        self,
        tracker: Tracker,
        storage: torch.UntypedStorage,
        reads: bool,
        op: str,
        unwritten: Unwritten = Unwritten.unseen,
        region: ByteRegion | None = None,
        writes: bool = False,
    ) -> Tracker:
        """Before an op (or the recorder) uses it. `region`: the bytes that it uses, if not all. Returns the tracker to
        use from here on."""
        state = tracker.state
        length = storage.nbytes()
        if state is not None and state.alias_of is not None:
            return self._use_alias(tracker, state, storage, reads, op, unwritten, region, writes)
        self.measure(tracker, storage, b"")
        state = tracker.state
        if state is None:
            return tracker
        if state.in_flight and (reads or writes):
            self.arrived(tracker, *((0, state.length) if region is None else (region.start, region.end)))
        if state.outside and length:
            self._enter_again(tracker, state, storage, "outside_write")
        partly = reads and length and self._reads_unwritten(tracker, state, storage, op, unwritten, region)
        if reads and not partly and unwritten is not Unwritten.passed_on:
            self.unexplained.report(tracker, op)
        if state.watched and length:
            content, known = self.content_now(tracker, storage), tracker.entry.content
            if known is not None and content != known:
                self._enter_again(tracker, state, storage, "outside_write")
            else:
                tracker.entry.content = content
        return tracker

    def look_beside(self, all_of_them: dict[int, Beside], tracker: Tracker, region: ByteRegion) -> bool:
        """Before an op writes a region: what lies beside it in the watched storage that owns its memory, and beside
        what else the op writes there. False if nothing does, or nobody else may write."""
        owner, state = owner_of(tracker), tracker.state
        if state is not None and state.alias_of is not None:
            region, state = replace(region, start=region.start + state.delta), owner.state
        storage = owner()
        if state is None or storage is None or not state.watched or state.mapped is not None or storage.device != _CPU:
            return False
        before = all_of_them.get(owner.id)
        regions = [region] if before is None else [*before.regions, region]
        now = all_of_them[owner.id] = Beside(owner, regions, content_beside(storage, regions))
        self.compare_beside([] if before is None else [before])
        return now.number is not None

    def compare_beside(self, all_of_them: Iterable[Beside]) -> None:
        """A storage that others have written since enters again."""
        for tracker, regions, before in all_of_them:
            storage = None if before is None else tracker()
            if storage is not None and content_beside(storage, regions) not in (None, before):
                self.mark_written_outside(tracker)

    def measure(self, tracker: Tracker, storage: torch.UntypedStorage, sampled: bytes) -> None:
        """Record its length if that has changed. `sampled`: as it was right after that; empty if nobody looked then."""
        state, length = tracker.state, storage.nbytes()
        if length != (tracker.size if state is None else state.length):
            self._records.storage_resize(tracker.id, length)
            self.resized(tracker, length, sampled)

    def _reads_unwritten(
        self,
        tracker: Tracker,
        state: State,
        storage: torch.UntypedStorage,
        op: str,
        unwritten: Unwritten,
        region: ByteRegion | None,
    ) -> bool:
        """If an op reads bytes that no captured op wrote, these enter as they are, because what is computed from them
        depends on them. Returns whether it does."""
        coverage = state.coverage
        if coverage is None:
            return False
        if coverage.covers(region or ByteRegion(0, (state.length,), (1,), 1)):
            if coverage.complete:
                state.coverage = None
                tracker.settle()
            return False
        unwritten = self.unexplained.way(unwritten)
        if state.windowed:
            self._enter_again(tracker, state, storage, "outside_write")
            return True
        if coverage.touched and (not self._contents.exact or not self.readable()):
            return False  # as if it were written: nothing is compared, or nothing can be read
        if unwritten is Unwritten.explained:
            self._enter_again(tracker, state, storage, "unseen_write")
            return True
        alone = state.was_left_alone(storage)
        if alone is False and state.watched:  # by those who asked for its address
            self._enter_again(tracker, state, storage, "outside_write")
            return True
        if unwritten is Unwritten.copied:
            if alone is not False:
                return False  # the copy is as unwritten as this
            unwritten = Unwritten.unseen
        if unwritten is Unwritten.as_is or alone or (alone is None and coverage.touched):
            if self._content:  # without content it stays unwritten
                reason = "written_argument" if unwritten is Unwritten.as_is else "uninitialized_read"
                self._enter_again(tracker, state, storage, reason)
        elif alone is None and unwritten is Unwritten.passed_on:
            if self._content:
                self._enter_again(tracker, state, storage, "unseen_write")
            self.unexplained.note_unwritten(tracker, state.length, op)
        else:
            self.unexplained.unwritten(tracker, state.length, op, changed=alone is False)
            self._enter_again(tracker, state, storage, "unseen_write")
        return True

    def filled(self, tracker: Tracker, storage: torch.UntypedStorage) -> None:
        """C++ code of PyTorch's own may have written what no captured op did: that enters as it is."""
        state = tracker.state
        if state is not None and state.coverage is not None and not state.was_left_alone(storage):
            self._enter_again(tracker, state, storage, "unseen_write")

    def enter_unwritten(self, tracker: Tracker, storage: torch.UntypedStorage, op: str) -> None:
        """`op` is about to write a part of it, so that the rest could not be told from it: the rest enters."""
        state = tracker.state
        if state is not None and self._contents.exact and state.length <= _ENTERS_BYTES and self.readable():
            if state.was_left_alone(storage) is False and not state.watched:
                self.unexplained.unwritten(tracker, state.length, op, changed=True)
            self._enter_again(tracker, state, storage, "uninitialized_read")

    def _use_alias(
        self,
        tracker: Tracker,
        state: State,
        storage: torch.UntypedStorage,
        reads: bool,
        op: str,
        unwritten: Unwritten,
        region: ByteRegion | None,
        writes: bool,
    ) -> Tracker:
        base = state.alias_of
        assert base is not None
        memory = base()
        if memory is None or storage.nbytes() != state.length:
            # The storage it shared memory with is gone, so it is recorded on its own from now on.
            delattr(storage, ATTRIBUTE)
            return self.enter(storage, None)
        shifted = None if region is None else replace(region, start=region.start + state.delta)
        self.use(base, memory, reads, op, unwritten, shifted, writes)
        return tracker

    def _enter_again(
        self,
        tracker: Tracker,
        state: State,
        storage: torch.UntypedStorage,
        reason: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        if reason in _AS_IT_IS and state.coverage is not None and state.coverage.touched:
            self.digest_written(tracker, storage)
        unwritten = reason == "unseen_write" or reason in _AS_IT_IS
        version = tracker.imports if unwritten else max(tracker.imports, 1)
        tracker.imports = version + 1
        comparable = state.watched and state.mapped is None and storage.nbytes()
        before = self.content_now(tracker, storage) if comparable else None
        content = self._contents.again(storage, self.dtype(tracker) if dtype is None else dtype)
        self._records.storage_import(tracker.id, content, version, reason)
        self._note_content(tracker, content)
        state.outside, state.unexplained = False, None
        state.arbitrary = reason in _AS_IT_IS
        tracker.entry.unmark()
        state.coverage = None
        self.synchronize(tracker, storage, before)
        tracker.settle()

    def dtype(self, tracker: Tracker) -> torch.dtype | None:
        """The dtype that a storage is used as: integers if any of its views is, bytes only if all are. None: it has no
        views."""
        dtypes = [self._metas.params[meta].dtype for meta, _, _ in tracker.entry.views()]
        dtypes = [dtype for dtype in dtypes if dtype is not torch.uint8] or dtypes
        return next((dtype for dtype in dtypes if not is_synthesized(dtype)), dtypes[0] if dtypes else None)

    def resized(self, tracker: Tracker, length: int, sampled: bytes) -> None:
        """Its length changed. Added bytes are unwritten. `sampled`: as it was right after that (empty: unknown)."""
        state = self.state(tracker)
        before, state.length = state.length, length
        if length > before:
            touched = before and (state.coverage is None or state.coverage.touched)
            state.begin_coverage(length, sampled)
            if touched:
                assert state.coverage is not None
                state.coverage.write(ByteRegion(0, (before,), (1,), 1))
        elif length == 0:
            state.coverage = None
            tracker.entry.clear_written()
        tracker.entry.content = None
        tracker.settle()

    # ---------------------------------------------------------------------------------------------------------- writes

    def wrote_anything(self, tracker: Tracker, storage: torch.UntypedStorage, *, touched: bool) -> None:
        """A captured op copied bytes to an unwritten storage: which of them are written is not tracked. `touched`: some
        are."""
        state = self.state(tracker)
        if state.alias_of is not None:
            tracker, state = state.alias_of, self.state(state.alias_of)
        state.begin_coverage(state.length, b"")
        assert state.coverage is not None
        state.coverage.touched, state.coverage.exact = touched, False
        tracker.entry.clear_written()
        tracker.need_care()
        self.synchronize(tracker, storage)

    def copied(
        self, tracker: Tracker, storage: torch.UntypedStorage, region: ByteRegion, written: np.ndarray, source: State
    ) -> None:
        """A captured op copied to a region what is written in part: by element, where `written` says so."""
        state = self.state(tracker)
        if state.coverage is None:
            state.begin_coverage(state.length, b"")
            assert state.coverage is not None
            if region.once().dense() != (0, state.length):
                state.coverage.write(ByteRegion(0, (state.length,), (1,), 1))
        state.coverage.assign(region, written)
        state.coverage.touched |= bool(written.any())
        state.sampled = sample(storage) if source.sampled else b""
        tracker.need_care()
        self.synchronize(tracker, storage)

    def wrote(
        self,
        tracker: Tracker,
        storage: torch.UntypedStorage,
        tensor: int,
        meta: int,
        offset: int,
        everything: bool,
        places: np.ndarray | Sequence[ByteRegion] | None = None,
    ) -> None:
        """A captured op wrote to a view: to every element of it (`everything`) or to these places (None: unknown)."""
        state = self.state(tracker)
        if state.alias_of is not None:
            memory = state.alias_of()
            if memory is not None:
                if self._handles.stands_for(memory):
                    self._records.unsupported("opaque_argument", "", f"storage {tracker.id} held an address")
                item = self._metas.params[meta].item
                self.wrote(state.alias_of, memory, tensor, meta, offset + state.delta // item, everything)
            return
        length = storage.nbytes()
        if length != state.length:
            self.resized(tracker, length, sample(storage))  # the op itself resized it, as it will on replay
        tracker.entry.note_written(tensor)
        if state.coverage is not None:
            region = self._metas.params[meta].region(offset)
            if everything:
                state.coverage.write(region)
            elif places is not None:
                state.coverage.write_places(region, places)
            else:
                state.coverage.touched, state.coverage.exact = True, False
            if state.coverage.complete:
                state.coverage = None
                tracker.settle()
                tracker.offer()
        if everything and state.unexplained is not None:
            self.unexplained.wrote(tracker, self._metas.params[meta].region(offset))
        self.synchronize(tracker, storage)

    def synchronize(self, tracker: Tracker, storage: torch.UntypedStorage, content: int | None = None) -> None:
        """Its content is known, from an import or a captured write. `content`: its number from before an import (None:
        as it is now), so that what others write meanwhile shows at the next use."""
        state = tracker.state
        if state is not None and state.watched:
            if state.mapped is not None and state.mapped.mapping.shared and tracker.entry.written():
                state.mapped = None  # the file has the written bytes, so the memory itself must be read from now on
            if storage.device.type == "cpu":
                self.settle()
            if content is None and storage.nbytes():
                content = self.content_now(tracker, storage)
            tracker.entry.content = content

    # ---------------------------------------------------------------------------------------------------------- deaths

    def drain(self, *, all_of_them: bool = True) -> None:
        """Record the storages released since the last call; those that Python does not know only if it is time to look
        for them, or if `all_of_them` are to be recorded."""
        dead = [self.dead.popleft() for _ in range(len(self.dead))]
        for tracker in dead:
            tracker.entry.forget()
        ids = [tracker.id for tracker in dead if tracker.state is None or self._forget(tracker)]
        if all_of_them or self._session.drains:
            ids += self._session.dead()
        for number in ids:
            self.live.pop(number, None)
            self._memory.forget(number)
        ids += self._copies
        self._copies.clear()
        if ids:
            self._records.storage_releases(ids)
            self._session.release_head = self._records.release_head()  # from now on the hot path tells its own

    def _forget(self, tracker: Tracker) -> bool:
        """A storage that needed care, or an alias, died. Returns whether its id ends with it."""
        number = tracker.id
        if self.live.get(number) is not tracker:
            others = self._aliases.get(number, [])
            others[:] = [other for other in others if other is not tracker]
            return False
        self._aliases.pop(number, None)
        return True

    def forget_all(self) -> None:
        """Remove the trackers from the program's storages."""
        for tracker in list(self.live.values()):
            storage = tracker()
            if storage is not None and self.tracker_of(storage) is tracker:
                delattr(storage, ATTRIBUTE)
            for alias in self._aliases.get(tracker.id, ()):
                shared = alias()
                if shared is not None and self.tracker_of(shared) is alias:
                    delattr(shared, ATTRIBUTE)
        self.live.clear()
        self.dead.clear()
        self._session.clear()
