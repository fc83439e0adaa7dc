"""Where storages lie in host memory, to find those on the same bytes without checking them all.

Only memory that torch did not allocate (NumPy's, another library's, another process's) can belong to several storages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import torch

from .trackers import Tracker

_FEWEST = 1024  # storages that may wait for a look, dead or alive
_REGION_BITS = 16  # bytes of a region, in whose list of ranges another one is put in its place


class AddressRanges:
    """Ranges of addresses, from the first byte to the one after the last, by storage id. None is empty.

    Ranges may overlap. They are kept sorted, by the region in which they begin and grouped by similar length: a range
    that reaches an address begins at most twice that length before it.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        # (first byte, id), by the length's number of bits and by region
        self._begins: dict[int, dict[int, list[tuple[int, int]]]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._ranges

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __getitem__(self, number: int) -> tuple[int, int]:
        return self._ranges[number]

    def add(self, number: int, begin: int, end: int) -> None:
        """Set a storage's range. Replaces an earlier one."""
        self.discard(number)
        self._ranges[number] = begin, end
        regions = self._begins.setdefault((end - begin).bit_length(), {})
        insort(regions.setdefault(begin >> _REGION_BITS, []), (begin, number))

    def discard(self, number: int) -> None:
        """Forget a storage, if it is known."""
        found = self._ranges.pop(number, None)
        if found is not None:
            begin, end = found
            regions = self._begins[(end - begin).bit_length()]
            begins = regions[begin >> _REGION_BITS]
            del begins[bisect_left(begins, (begin, number))]
            if not begins:
                del regions[begin >> _REGION_BITS]
            if not regions:
                del self._begins[(end - begin).bit_length()]

    def containing(self, begin: int, end: int) -> list[int]:
        """The storages that hold all of a range."""
        least = (end - begin).bit_length()
        found = [number for bits in self._begins if bits >= least for number in self._within(bits, begin, begin + 1)]
        return [number for number in found if self._ranges[number][1] >= end]

    def overlapping(self, begin: int, end: int) -> list[int]:
        """The storages that hold any byte of a range."""
        return [number for bits in self._begins for number in self._within(bits, begin, end)]

    def _within(self, bits: int, begin: int, end: int) -> list[int]:
        """Those in one length group that begin before `end` and end after `begin`."""
        regions, low = self._begins[bits], begin - (1 << bits)
        reached = range(low >> _REGION_BITS, (end >> _REGION_BITS) + 1)
        found = []
        for region in reached if len(reached) < len(regions) else [each for each in regions if each in reached]:
            begins = regions.get(region)
            if begins:
                first, last = bisect_right(begins, (low, -1)), bisect_left(begins, (end, -1))
                found += [number for _begin, number in begins[first:last] if self._ranges[number][1] > begin]
        return found


class HostMemory:
    """Where the live storages of a capture are. Callers hold the recorder's lock."""

    def __init__(self, live: dict[int, Tracker]) -> None:
        """`live` are the recorder's storages by id, from oldest to newest."""
        self._live = live
        self._external = AddressRanges()  # memory that torch did not allocate
        self._own = AddressRanges()  # torch's own memory, as of the last look
        self._new: list[Tracker] = []  # since then

    @property
    def shared(self) -> bool:
        """Whether there is any memory that several storages may be on."""
        return bool(self._external)

    def add(self, tracker: Tracker) -> None:
        """Add a storage, which the next look finds if it is still alive then."""
        self._new.append(tracker)
        if len(self._new) > max(_FEWEST, 2 * len(self._live)):
            self._new = [each for each in self._new if each() is not None]

    def add_external(self, number: int, storage: torch.UntypedStorage) -> None:
        """Add a storage whose memory torch did not allocate."""
        begin = storage.data_ptr()
        self._external.add(number, begin, begin + storage.nbytes())

    def forget(self, number: int) -> None:
        """A storage died."""
        self._external.discard(number)
        self._own.discard(number)

    def containing(self, begin: int, end: int) -> Iterator[tuple[Tracker, int]]:
        """The storages that hold all bytes from `begin` to `end`, each with the address of its first byte."""
        self._look()
        for ranges in (self._external, self._own):
            for number in ranges.containing(begin, end):
                tracker = self._there(ranges, number)
                if tracker is not None and ranges[number][0] <= begin and end <= ranges[number][1]:
                    yield tracker, ranges[number][0]

    def overlapping(self, begin: int, end: int) -> list[Tracker]:
        """The storages that hold any of these bytes."""
        self._look()
        found = []
        for ranges in (self._external, self._own):
            for number in ranges.overlapping(begin, end):
                tracker = self._there(ranges, number)
                if tracker is not None and ranges[number][0] < end and begin < ranges[number][1]:
                    found.append(tracker)
        return found

    def _look(self) -> None:
        """Note the addresses of the storages that are new since the last look."""
        new, self._new = self._new, []
        for tracker in new:
            number, storage = tracker.id, tracker()
            known = number in self._external or self._live.get(number) is not tracker
            if storage is not None and not known and storage.device.type == "cpu" and storage.nbytes():
                begin = storage.data_ptr()
                self._own.add(number, begin, begin + storage.nbytes())

    def _there(self, ranges: AddressRanges, number: int) -> Tracker | None:
        """The tracker of a storage, after updating its range; None if it died. A death that was not drained yet leaves
        an outdated range, and so does a resize."""
        tracker = self._live.get(number)
        storage = None if tracker is None else tracker()
        if storage is None or not storage.nbytes():
            ranges.discard(number)
            return None
        begin = storage.data_ptr()
        if ranges[number] != (begin, begin + storage.nbytes()):
            ranges.add(number, begin, begin + storage.nbytes())
        return tracker
