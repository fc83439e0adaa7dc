"""Which tensor ids of a capture one variable of the replay can stand for.

Ids distinguish tensors by storage, offset and metadata, and the metadata includes whether autograd tracked the tensor,
which means nothing below the dispatch level of a replay. So ids that differ only in that share one key here. Keys are
dense and count from 0 in order of first appearance; feeding the same frames in the same order gives the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from replayfmt.format.codes import TensorFlag
from replayfmt.format.model import TensorMeta
from replayfmt.format.reader import RecordFrame


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
