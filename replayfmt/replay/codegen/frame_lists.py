"""A frame's columns as Python lists, with the scan's findings on every slot: the input of lowering."""

from __future__ import annotations

import numpy as np

from replayfmt.format.reader import RecordFrame

from ..planning.identity import TensorKeys
from ..planning.scan import Scan


class FrameLists:
    """The first `count` records of a frame.

    Lists indexed by tensor slot: `keys`, `storages`, `metas`, `ends` and `storage_ends`.
    """

    def __init__(self, frame: RecordFrame, count: int, keys: TensorKeys, scan: Scan) -> None:
        self.frame = frame
        self.first_ordinal = frame.first_ordinal
        self.signatures: list[int] = frame.signature[:count].tolist()
        self.scopes: list[int] = frame.scope[:count].tolist()
        self.tensor_first: list[int] = frame.tensor_first[: count + 1].tolist()
        self.int_first: list[int] = frame.int_first[: count + 1].tolist()
        self.float_first: list[int] = frame.float_first[: count + 1].tolist()
        self.ints: list[int] = frame.ints.tolist()
        self.floats: list[float] = frame.floats.tolist()
        slots = frame.tensor_slots[: self.tensor_first[-1]]
        ordinals = np.repeat(np.arange(count), np.diff(frame.tensor_first[: count + 1])) + frame.first_ordinal
        slot_keys = keys.of_frame(frame)[slots]
        slot_storages = frame.tensor_storage[slots].astype(np.int64)
        self.slots: list[int] = slots.tolist()
        self.keys: list[int] = slot_keys.tolist()
        self.storages: list[int] = slot_storages.tolist()
        self.metas: list[int] = frame.tensor_meta[slots].tolist()
        # Whether this slot's record is the last to use the slot's tensor key, and its storage.
        self.ends: list[bool] = (scan.last_use[slot_keys] == ordinals).tolist()
        self.storage_ends: list[bool] = (scan.storage_last_uses(slot_storages) == ordinals).tolist()

    def placement(self, row: int) -> int:
        """The placement id of a record."""
        return 0 if self.frame.placement is None else int(self.frame.placement[row])

    def offset(self, slot: int) -> int:
        """The offset of a slot's tensor, in elements."""
        return int(self.frame.tensor_offset[self.slots[slot]])
