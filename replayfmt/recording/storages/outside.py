"""Memory events outside recorded operators, as reported by hooks: memory was written unseen, is shared with others, or
a value in it was read by the host.
"""

from __future__ import annotations

from typing import Any

import torch

from replayfmt.pytorch.tensors.looks import is_zerotensor, offset_of, storage_of

from ..dispatch.kernels import tensors_in
from ..dispatch.wrappers import plain_parts
from ..stream.digesting import Digests
from ..stream.records import Records
from ..stream.tensor_metas import TensorMetas
from .identity import Storages
from .trackers import EXPORTED

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
        if tracker.state is None or not tracker.state.watched or windowed:
            self._storages.watch(tracker, windowed=windowed)
            self._storages.synchronize(tracker, storage)

    def used_on(self, tensor: torch.Tensor, device: torch.device, stream: int) -> None:
        """A stream uses a tensor's memory. Nothing is recorded for storages that no captured op has touched."""
        for plain in plain_parts(tensor):
            tracker = self._storages.tracker_of(storage_of(plain))
            if tracker is not None and not is_zerotensor(plain):
                meta = self._metas.of(plain)
                number = self._storages.view(tracker, meta, int(offset_of(plain)), self._metas.params[meta].item)
                self._records.stream_use(number, device, stream)

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
            if tracker.size != storage.nbytes():
                reads = method not in _SHARING
                tracker = self._storages.use(tracker, storage, reads, method, region=params.region(offset))
                self._storages.unexplained.report(tracker, method)
            number, digest = self._storages.view(tracker, meta, offset, params.item), None
            if self._digests is not None and tracker.reproducible(params.region(offset)):
                number, digest = self._digests.of_view(tracker, storage, meta, offset)
            self._records.host_read(method, number, digest)
            if method in _SHARING:
                self._storages.watch(tracker, windowed=True)
                self._storages.synchronize(tracker, storage)
