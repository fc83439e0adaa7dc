"""Digests for verification, and memory events outside of recorded operators.

`Digests` records digests of live storages at certain moments, or of every op's results. `Outside` handles what hooks
report: memory was written unseen, is shared with others, or a value in it was read by the host.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from replayfmt.format.codes import RecordKind, TensorFlag
from replayfmt.format.model import TensorDigest
from replayfmt.pytorch.tensors.digests import digest_view
from replayfmt.pytorch.tensors.memory import is_zerotensor, offset_of, storage_of

from ..content.coverage import Coverage
from ..content.storage_content import sample
from ..kernels import tensors_in
from ..special_values import plain_parts
from ..stream.buffer import RecordBuffer
from ..stream.records import MetaParams, Records, TensorMetas
from .identity import Storages
from .trackers import EXPORTED, Tracker, owner_of

_REPEATED_BYTES = 1 << 20  # a view that repeats its elements is digested as it is up to this size
_VIEWS = 64  # written views of one storage that are digested one by one
LISTED = 64  # written ranges of a partly written storage, where an op chooses what it writes
_RANGES = 1024  # written ranges of one storage that are digested
_NOT_AS_MEMORY = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


class Digests:
    """Computes digests and records them. Callers hold the recorder's lock."""

    def __init__(self, buffer: RecordBuffer, records: Records, metas: TensorMetas, storages: Storages) -> None:
        self._buffer = buffer
        self._records = records
        self._metas = metas
        self._storages = storages
        self.left_out: set[int] = set()  # storages of which some written bytes were not digested
        self._fresh_from = 1  # storages with ids from here on were allocated after the last sweep

    def sweep(self, being_written: Collection[int] = ()) -> None:
        """Digest every live storage that captured ops wrote since the last sweep, on whichever stream; but not those at
        these addresses, which ops of other threads are writing: they are digested in the next one."""
        self._storages.settle()
        newest = self._fresh_from
        for number, tracker in list(self._storages.live.items()):
            newest = max(newest, number + 1)
            storage = tracker()
            if storage is None or storage._cdata in being_written:
                continue
            state = tracker.state
            if state is not None and state.coverage is not None and not self._written_whole(tracker, state.coverage):
                if tracker.entry.written() and not state.opaque and not state.outside:
                    self.written_ranges(tracker, storage)
                tracker.entry.clear_written()
                continue
            self.record(tracker, storage, self._written_views(number, tracker, storage).values())
        self._fresh_from = newest

    def _written_views(
        self, number: int, tracker: Tracker, storage: torch.UntypedStorage
    ) -> dict[int, tuple[int, int]]:
        state, entry = tracker.state, tracker.entry
        written = {tensor: (meta, offset) for tensor, meta, offset in entry.written()}
        if written:
            entry.clear_written()
        if number >= self._fresh_from and not tracker.imports and (state is None or state.coverage is None):
            written.update((tensor, (meta, offset)) for meta, offset, tensor in entry.views()[:1])
        if not written or (state is not None and (state.opaque or state.outside)):
            return {}
        length = tracker.size if state is None else state.length
        params = self._metas.params
        for tensor, (meta, offset) in written.items():
            if params[meta].region(offset).dense() == (0, length):
                return {tensor: (meta, offset)}
        if len(written) <= _VIEWS:
            return written
        return {-1: self._range(self._storages.dtype(tracker), 0, length, storage.device)}

    def _written_whole(self, tracker: Tracker, coverage: Coverage) -> bool:
        """Whether all that was written of a partly written storage are a few views, and each of them is written."""
        written, params = tracker.entry.written(), self._metas.params
        return len(written) <= _VIEWS and all(coverage.covers(params[m].region(o)) for _, m, o in written)

    def written_ranges(self, tracker: Tracker, storage: torch.UntypedStorage, of: int = -1) -> None:
        """Digest what was written of a partly written storage, range by range."""
        state = tracker.state
        if state is None or state.coverage is None:
            return
        ranges = state.coverage.ranges()
        dtype = self._storages.dtype(tracker)
        if not state.coverage.exact or len(ranges) > _RANGES:
            self._uncompared(tracker, storage, of)
        views = [self._range(dtype, begin, end, storage.device) for begin, end in ranges[:_RANGES]]
        self.record(tracker, storage, views, of)

    def _range(self, dtype: torch.dtype | None, begin: int, end: int, device: torch.device) -> tuple[int, int]:
        """Meta id and offset of the elements in a range of bytes; of bytes, if it cannot be seen as `dtype`."""
        if dtype is None or dtype in _NOT_AS_MEMORY or begin % dtype.itemsize or end % dtype.itemsize:
            dtype = torch.uint8
        return self._metas.row(dtype, (end - begin) // dtype.itemsize, device), begin // dtype.itemsize

    def _uncompared(self, tracker: Tracker, storage: torch.UntypedStorage, of: int) -> None:
        """Record that some of what was written of a storage is not compared."""
        self.left_out.add(tracker.id)
        meta, offset = self._range(self._storages.dtype(tracker), 0, storage.nbytes(), storage.device)
        tensor = self._storages.view(tracker, meta, offset, self._metas.params[meta].item)
        self._records.digest(tensor, of, -1, None)

    def record(
        self,
        tracker: Tracker,
        storage: torch.UntypedStorage,
        views: Collection[tuple[int, int]],
        of: int = -1,
        result: int = -1,
    ) -> None:
        """Record the digests of those views, by meta id and offset, that have bytes: as a result of the op `of`, or
        (-1, -1) as live tensors. None are recorded if others have written to the storage."""
        if of >= 0 and storage.device.type == "cpu":
            self._storages.settle()
        found = [(self.of_view(tracker, storage, *view), view) for view in views]
        if views and self._storages.written_outside(tracker):  # before, or while the digests were computed
            return
        for (tensor, digest), (meta, offset) in found:
            params = self._metas.params[meta]
            if digest is not None or (params.elements and not self._is_without_bytes(storage, params, offset)):
                self._records.digest(tensor, of, result, digest)

    def of_view(
        self, tracker: Tracker, storage: torch.UntypedStorage, meta: int, offset: int
    ) -> tuple[int, TensorDigest | None]:
        """(tensor id, digest) of a view; the digest is None if it has none (no bytes, bytes freed, packed dtype).

        If the view is expanded to far more than its storage, the tensor is the view that holds each element only once.
        For overlapping views, it is all memory from the first element to the last.
        """
        params = self._metas.params[meta]
        tensor = self._storages.view(tracker, meta, offset, params.item)
        largest = max(storage.nbytes(), _REPEATED_BYTES)
        if params.elements * params.item > largest:
            meta = self._metas.once(meta, storage.device)
            params = self._metas.params[meta]
            if params.elements * params.item > largest:
                region = params.region(offset)
                if tracker.state is not None and tracker.state.coverage is not None:
                    return tensor, None  # what lies between the elements may be unwritten
                meta, offset = self._range(params.dtype, region.start, region.end, storage.device)
                params = self._metas.params[meta]
            tensor = self._storages.view(tracker, meta, offset, params.item)
        if self._is_without_bytes(storage, params, offset):
            return tensor, None
        try:
            return tensor, digest_view(storage, params.dtype, params.sizes, params.strides, offset, params.flags)
        except TypeError:
            return tensor, None

    @staticmethod
    def _is_without_bytes(storage: torch.UntypedStorage, params: MetaParams, offset: int) -> bool:
        if storage.device.type == "meta" or (params.flags and TensorFlag.zero in params.flags):
            return True
        region = params.region(offset)
        return region.end > storage.nbytes() and not region.empty


# Host reads that give others a window on the memory, through which they may write later.
_SHARING = ("numpy", "__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__", "to_dlpack")


class Outside:
    """Reports these events to the storages of one capture. `digests` is None if none are recorded."""

    def __init__(self, records: Records, metas: TensorMetas, storages: Storages, digests: Digests | None) -> None:
        self._records = records
        self._metas = metas
        self._storages = storages
        self._digests = digests

    def written(self, tensor: torch.Tensor) -> bool:
        """Something unseen may have written to a tensor. Unknown storages are imported at their first use anyway.
        Returns whether another such write would change nothing until then."""
        stays = True
        for plain in plain_parts(tensor):
            tracker = self._storages.tracker_of(storage_of(plain))
            if tracker is not None:
                stays = stays and not tracker.alias
                self._storages.mark_written_outside(tracker)
            else:
                stays = False
        return stays

    def storage_written(self, storage: torch.UntypedStorage) -> None:
        """Something unseen wrote to a storage: its content is imported again at its next use."""
        tracker = self._storages.tracker_of(storage)
        if tracker is not None:
            self._storages.mark_written_outside(tracker)

    def about_to_be_written(self, storage: torch.UntypedStorage) -> None:
        """The next op that uses a storage writes all of its bytes, and reads none: what was written from outside does
        not have to enter."""
        tracker = self._storages.tracker_of(storage)
        if tracker is not None and tracker.state is not None and tracker.state.alias_of is None:
            tracker.state.outside = False

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was reallocated outside any op: only its length, and which bytes are written, is known."""
        tracker = self._storages.tracker_of(storage)
        if tracker is not None and tracker.size != storage.nbytes():
            if not tracker.alias:
                self._storages.measure(tracker, storage, sample(storage))
            self._storages.use(tracker, storage, False, "resize_")

    def filled(self, result: Any) -> None:
        """A composite of PyTorch's own returned, whose C++ code may have filled results through addresses."""
        for plain in (part for tensor in tensors_in(result) for part in plain_parts(tensor)):
            storage = storage_of(plain)
            tracker = self._storages.tracker_of(storage)
            if tracker is not None:
                self._storages.filled(tracker, storage)

    def shared(self, storage: torch.UntypedStorage, windowed: bool = True) -> None:
        """Others may write to a storage from now on. An unknown storage is watched from its import on. `windowed`: the
        program has a window on it."""
        tracker = self._storages.tracker_of(storage)
        if tracker is None:
            setattr(storage, EXPORTED, True)
            return
        if tracker.state is not None and tracker.state.alias_of is not None:
            tracker = tracker.state.alias_of
        self._storages.share(tracker, storage, windowed)

    def used_on(self, tensor: torch.Tensor, device: torch.device, stream: int) -> None:
        """A stream uses a tensor's memory. Nothing is recorded for storages that no captured op has touched."""
        for plain in plain_parts(tensor):
            tracker = self._storages.tracker_of(storage_of(plain))
            if tracker is not None and not is_zerotensor(plain):
                meta = self._metas.of(plain)
                number = self._storages.view(tracker, meta, int(offset_of(plain)), self._metas.params[meta].item)
                self._records.on_device(RecordKind.stream_use, device, number, stream)

    def host_read(self, method: str, tensor: torch.Tensor) -> None:
        """A value left the device for the host. Nothing is recorded for storages that no captured op has touched."""
        for plain in plain_parts(tensor):
            storage = storage_of(plain)
            tracker = self._storages.tracker_of(storage)
            if tracker is None and method in _SHARING:
                setattr(storage, EXPORTED, True)
            if tracker is None or is_zerotensor(plain):
                continue
            meta, offset = self._metas.of(plain), int(offset_of(plain))
            params = self._metas.params[meta]
            region = params.region(offset)
            if tracker.size != storage.nbytes():
                reads = method not in _SHARING
                tracker = self._storages.use(tracker, storage, reads, method, region=region)
                self._storages.unexplained.report(tracker, method)
            if self._digests is not None and tracker.reproducible(region):
                number, digest = self._digests.of_view(tracker, storage, meta, offset)
                if tracker.state is not None and self._storages.written_outside(owner_of(tracker)):
                    digest = None  # by another thread, meanwhile
            else:
                number, digest = self._storages.view(tracker, meta, offset, params.item), None
            self._records.host_read(method, number, digest)
            if method in _SHARING:
                self._storages.share(tracker, storage)
