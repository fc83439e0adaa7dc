"""A `.dmat` file: how often each page of memory was accessed at each clock.

The number P of pages and C of clocks as 64-bit values, P page addresses, then C times: the clock, a count n, and n
pairs of a page and how often it was accessed (64 and 32 bits). Pages are those of 64 KiB; clocks come in any order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .files import damaged, mapped, new_file

PAGE_BYTES = 1 << 16
_HEAD = struct.Struct("<QQ")
_PAIR_BYTES = 12
_PAIRS_AT_ONCE = 1 << 18

ACCESSES = np.dtype([("clock", "<u8"), ("page", "<u8"), ("count", "<u8")])
Accesses = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True)
class AccessMap:
    """A mapped `.dmat` file. `pages`: the addresses it lists, ascending."""

    path: str
    pages: np.ndarray[Any, np.dtype[np.uint64]]
    clocks: int
    _content: memoryview

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> AccessMap:
        """Map a file. Raises CaptureNotFound, InvalidRecording; what follows the pages is checked as it is read."""
        content = mapped(path, _HEAD.size, "an access map")
        pages, clocks = _HEAD.unpack_from(content)
        room = len(content) - _HEAD.size
        if not 0 < pages <= room // 8:
            raise damaged(path, 0, f"from 1 to {room // 8} pages in {len(content)} bytes", f"{pages}")
        if not 0 < clocks <= (room - 8 * pages) // 16:
            raise damaged(path, 8, f"from 1 to {(room - 8 * pages) // 16} clocks after {pages} pages", f"{clocks}")
        listed = np.sort(np.ndarray(pages, "<u8", content, _HEAD.size))
        if (twice := np.flatnonzero(listed[1:] == listed[:-1])).size:
            raise damaged(path, _HEAD.size, "different pages", f"{int(listed[twice[0]]):#x} twice")
        return cls(os.fspath(path), listed, clocks, content)

    @property
    def nbytes(self) -> int:
        """The length of the file."""
        return len(self._content)

    def accesses(self, progress: Callable[[int], None] = lambda _done: None) -> Iterator[Accesses]:
        """Everything in it, a part at a time, as rows of ACCESSES. `progress` is told the bytes read so far."""
        content = self._content
        words = np.ndarray(len(content) // 4, "<u4", content)  # every field begins at a multiple of four bytes
        spans: list[tuple[int, int, int]] = []
        pairs = 0
        for span in self._spans():
            spans.append(span)
            pairs += span[2]
            if pairs >= _PAIRS_AT_ONCE or len(spans) >= _PAIRS_AT_ONCE:
                yield self._gathered(words, spans)
                progress(span[1])
                spans, pairs = [], 0
        yield self._gathered(words, spans)
        progress(len(content))

    def _spans(self) -> Iterator[tuple[int, int, int]]:
        """Where the pairs are: the byte at which their clock is, that of the first pair, and how many pairs, at most
        _PAIRS_AT_ONCE."""
        content, size = self._content, len(self._content)
        place = _HEAD.size + 8 * len(self.pages)
        for number in range(self.clocks):
            if place + _HEAD.size > size:
                raise damaged(self.path, place, f"clock {number} of {self.clocks}", "the end of the file")
            clock, count = _HEAD.unpack_from(content, place)
            most = (size - place - _HEAD.size) // _PAIR_BYTES
            if count > most:
                raise damaged(self.path, place + 8, f"at most {most} pages at clock {clock}", f"{count}")
            at = place + _HEAD.size
            for first in range(0, count, _PAIRS_AT_ONCE):
                yield place, at + _PAIR_BYTES * first, min(_PAIRS_AT_ONCE, count - first)
            place = at + _PAIR_BYTES * count
        if place != size:
            raise damaged(self.path, place, f"the end of the file after {self.clocks} clocks", f"{size - place} bytes")

    def _gathered(self, words: np.ndarray, spans: list[tuple[int, int, int]]) -> Accesses:
        places, pairs, counts = np.array(spans, np.int64).reshape(-1, 3).T
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        at = np.repeat(pairs // 4, counts) + 3 * within
        clock_at = np.repeat(places // 4, counts)
        found = np.empty(len(at), ACCESSES)
        found["clock"] = words[clock_at] | words[clock_at + 1].astype(np.uint64) << np.uint64(32)
        found["page"] = words[at] | words[at + 1].astype(np.uint64) << np.uint64(32)
        found["count"] = words[at + 2]
        known = self.pages[np.minimum(np.searchsorted(self.pages, found["page"]), len(self.pages) - 1)]
        if (other := np.flatnonzero(known != found["page"])).size:
            raise damaged(
                self.path, 4 * int(at[other[0]]), "a page of the file's list", f"{int(found['page'][other[0]]):#x}"
            )
        return found


def write_access_map(
    path: str | os.PathLike[str], clocks: Sequence[tuple[int, Sequence[tuple[int, int]]]], *, force: bool = False
) -> None:
    """Write a `.dmat` file. `clocks`: each clock with pairs of a page's address and its count. Raises OutputExists,
    CaptureFailed."""
    pages = sorted({page for _clock, pairs in clocks for page, _count in pairs})
    with new_file(path, force) as file:
        file.write(_HEAD.pack(len(pages), len(clocks)) + np.array(pages, "<u8").tobytes())
        for clock, pairs in clocks:
            file.write(_HEAD.pack(clock, len(pairs)))
            file.write(b"".join(struct.pack("<QI", page, count) for page, count in pairs))
