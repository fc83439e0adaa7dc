"""Finds storages by the address ranges they occupy.

Two storages may share bytes (for example those of two tensors made from the same numpy array), so neither their
identity nor their first address is enough. Registered storages are kept alive, so their memory is not reused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

import torch

_MOST_KEPT = 16
_MOST_KEPT_BYTES = 256 << 20


class MemoryLabels:
    """Labelled storages, found by any storage that shares bytes with them."""

    def __init__(self, known: Iterable[tuple[torch.UntypedStorage, str]] = ()) -> None:
        self._by_identity: dict[int, tuple[torch.UntypedStorage, str]] = {}
        self._sorted: dict[torch.device, list[tuple[int, int, str]]] = {}
        self._longest = 0
        for storage, label in known:
            self.add(storage, label)

    def add(self, storage: torch.UntypedStorage, label: str) -> None:
        """Register a storage under a label."""
        self._by_identity[storage._cdata] = storage, label
        if storage.nbytes():
            first = storage.data_ptr()
            insort(self._sorted.setdefault(storage.device, []), (first, first + storage.nbytes(), label))
            self._longest = max(self._longest, storage.nbytes())

    def find(self, storage: torch.UntypedStorage) -> str | None:
        """The label of the registered storage that shares memory with this one; None if there is none."""
        known = self._by_identity.get(storage._cdata)
        if known is not None:
            return known[1]
        places = self._sorted.get(storage.device)
        if not places or not storage.nbytes():
            return None
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for index in range(bisect_left(places, (end,)) - 1, -1, -1):
            start, stop, label = places[index]
            if first < stop:
                return label
            if start + self._longest <= first:  # no earlier one reaches that far either
                break
        return None


class Returned:
    """What replacements returned in one pass, to detect a second call that returns the same memory.

    A storage is marked, and recognized for as long as it lives. Other storages on its memory are recognized by the
    memory of the last calls, which is kept alive for this.
    """

    def __init__(self) -> None:
        self._pass = object()
        self._kept: deque[tuple[MemoryLabels, int]] = deque()
        self._bytes = 0

    def again(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether an earlier call returned any of these storages, all returned by one call; remembers them."""
        found = any(
            getattr(each, "_opreplay_returned", None) is self._pass
            or any(ranges.find(each) is not None for ranges, _size in self._kept)
            for each in storages
        )
        for each in storages:
            each._opreplay_returned = self._pass  # type: ignore[attr-defined]
        size = sum(each.nbytes() for each in storages)
        self._kept.append((MemoryLabels((each, "") for each in storages), size))
        self._bytes += size
        while len(self._kept) > _MOST_KEPT or (self._bytes > _MOST_KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft()[1]
        return found
