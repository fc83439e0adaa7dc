"""Which storages lie where in the host's memory, so that two on the same bytes are found without checking them all.

Only memory that torch did not allocate (NumPy's, another library's, another process's) can belong to several storages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import takewhile

import torch

from .trackers import Tracker

_IN_FLIGHT = 64  # storages that threads may be giving ids to at the same time


class AddressRanges:
    """Ranges of addresses, from the first byte to the one after the last, by storage id. None is empty.

    Ranges may overlap. They are kept sorted, those of about the same length together: what reaches a place begins at
    most twice that length before it.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._begins: dict[int, list[tuple[int, int]]] = {}  # (first byte, id), by the length's number of bits

    def __contains__(self, number: int) -> bool:
        return number in self._ranges

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __getitem__(self, number: int) -> tuple[int, int]:
        return self._ranges[number]

    def add(self, number: int, begin: int, end: int) -> None:
        """A storage's range. One that it had before is forgotten."""
        self.discard(number)
        self._ranges[number] = begin, end
        insort(self._begins.setdefault((end - begin).bit_length(), []), (begin, number))

    def discard(self, number: int) -> None:
        """Forget a storage, if it is known."""
        found = self._ranges.pop(number, None)
        if found is not None:
            begin, end = found
            begins = self._begins[(end - begin).bit_length()]
            del begins[bisect_left(begins, (begin, number))]
            if not begins:
                del self._begins[(end - begin).bit_length()]

    def containing(self, begin: int, end: int) -> list[int]:
        """The storages that hold all of a range."""
        least = (end - begin).bit_length()
        found = [number for bits in self._begins if bits >= least for number in self._within(bits, begin, begin + 1)]
        return [number for number in found if self._ranges[number][1] >= end]

    def overlapping(self, begin: int, end: int) -> list[int]:
        """The storages that hold a byte of a range."""
        return [number for bits in self._begins for number in self._within(bits, begin, end)]

    def _within(self, bits: int, begin: int, end: int) -> list[int]:
        """Those of one kind of length that begin before `end` and end after `begin`."""
        begins = self._begins[bits]
        first, last = bisect_right(begins, (begin - (1 << bits), -1)), bisect_left(begins, (end, -1))
        return [number for _begin, number in begins[first:last] if self._ranges[number][1] > begin]


class HostMemory:
    """Where the live storages of a capture are. Callers hold the recorder's lock."""

    def __init__(self, live: dict[int, Tracker]) -> None:
        """`live` are the storages by id, as the recorder keeps them: newer ones behind older ones."""
        self._live = live
        self._external = AddressRanges()  # memory that torch did not allocate
        self._own = AddressRanges()  # torch's own, when it was looked at
        self._looked_at = 0  # ids up to here, if they were not in flight then, are in one or the other

    @property
    def shared(self) -> bool:
        """Whether there is any memory that several storages may be on."""
        return bool(self._external)

    def add_external(self, number: int, storage: torch.UntypedStorage) -> None:
        """A storage whose memory torch did not allocate."""
        begin = storage.data_ptr()
        self._external.add(number, begin, begin + storage.nbytes())

    def forget(self, number: int) -> None:
        """A storage died."""
        self._external.discard(number)
        self._own.discard(number)

    def containing(self, begin: int, end: int) -> Iterator[tuple[Tracker, int]]:
        """The storages that hold all bytes from `begin` to `end`, with the address of their own first one."""
        self._look()
        for ranges in (self._external, self._own):
            for number in ranges.containing(begin, end):
                tracker = self._there(ranges, number)
                if tracker is not None and ranges[number][0] <= begin and end <= ranges[number][1]:
                    yield tracker, ranges[number][0]

    def overlapping(self, begin: int, end: int) -> list[Tracker]:
        """The storages that hold one of these bytes."""
        self._look()
        found = []
        for ranges in (self._external, self._own):
            for number in ranges.overlapping(begin, end):
                tracker = self._there(ranges, number)
                if tracker is not None and ranges[number][0] < end and begin < ranges[number][1]:
                    found.append(tracker)
        return found

    def _look(self) -> None:
        """Note where the storages are that came since the last time."""
        newest = self._looked_at
        for number in self._ids_from(newest - _IN_FLIGHT):
            newest = max(newest, number)
            tracker = self._live.get(number)
            storage = None if tracker is None else tracker()
            known = number in self._external or number in self._own
            if storage is not None and not known and storage.device.type == "cpu" and storage.nbytes():
                begin = storage.data_ptr()
                self._own.add(number, begin, begin + storage.nbytes())
        self._looked_at = newest

    def _ids_from(self, first: int) -> list[int]:
        while True:
            try:
                return list(takewhile(lambda number: number >= first, reversed(self._live)))
            except RuntimeError:  # another thread gave an id meanwhile
                continue

    def _there(self, ranges: AddressRanges, number: int) -> Tracker | None:
        """The tracker of a storage, with its range as it is now; None if it died. A death that was not drained yet
        leaves its range behind, and so does a resize."""
        tracker = self._live.get(number)
        storage = None if tracker is None else tracker()
        if storage is None or not storage.nbytes():
            ranges.discard(number)
            return None
        begin = storage.data_ptr()
        if ranges[number] != (begin, begin + storage.nbytes()):
            ranges.add(number, begin, begin + storage.nbytes())
        return tracker
