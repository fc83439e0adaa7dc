"""Which bytes of an uninitialized storage captured ops have written.

Digests must never cover bytes that were never written: they differ between identical runs. Views are noted as they are
written, and evaluated on demand. Nothing but its length in bytes is known about a storage here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

_MAP_LIMIT = 1 << 27  # most cells in the exact map, and places of a view in it; anything beyond counts as unwritten
_WAITING = 64  # views with holes that are kept until somebody asks


@dataclass(frozen=True)
class ByteRegion:
    """A view in bytes: its offset, and the size and stride of each dimension. Each place has `item` bytes."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item: int

    @property
    def empty(self) -> bool:
        return 0 in self.sizes

    @property
    def places(self) -> int:
        """How many places the view has, with repetitions."""
        return prod(self.sizes)

    @functools.cached_property
    def end(self) -> int:
        """The byte after the last one; the first one if it is empty."""
        last = sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))
        return self.start if self.empty else self.start + last + self.item

    def once(self) -> ByteRegion:
        """The same bytes without expansion: repeated dimensions have size 1."""
        sizes = tuple(size if stride else min(size, 1) for size, stride in zip(self.sizes, self.strides, strict=True))
        return self if sizes == self.sizes else replace(self, sizes=sizes)

    def dense(self) -> tuple[int, int] | None:
        """(first byte, byte after the last) if the view covers that range without holes, else None."""
        expected = self.item
        for stride, size in sorted((s, n) for n, s in zip(self.sizes, self.strides, strict=True) if n != 1):
            if stride != expected:
                return None
            expected *= size
        return self.start, self.start + expected


class Coverage:
    """Which bytes of one storage were written. A fully written storage needs no Coverage.

    Ranges without holes are kept in a list, which is all that a buffer needs that is filled piece by piece. Anything
    else goes into a map of cells, as large as the elements written.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.touched = False  # some captured op wrote something, perhaps data-dependently
        self.exact = True  # what was written is known to the byte
        self._dense: list[tuple[int, int]] = []
        self._strided: set[ByteRegion] = set()  # not in the map yet
        self._map: np.ndarray | None = None  # by cell, whether it was written; then `_dense` is not kept any more
        self._cell = 0  # bytes
        self._hole = 0  # no unwritten cell lies before this one

    def write(self, region: ByteRegion) -> None:
        self.touched = True
        region = region.once()
        if region.empty:
            return
        dense = region.dense()
        if dense is not None and self._map is None:
            self._add(*dense)
        else:
            self._strided.add(region)
            if len(self._strided) > _WAITING:
                self._settle()

    def write_places(self, region: ByteRegion, places: np.ndarray | Sequence[ByteRegion]) -> None:
        """Parts of a view were written: by element, those where `places` is true; or these parts."""
        self.touched = True
        if isinstance(places, np.ndarray):
            cells = self._cells(region)
            if cells is None:
                self.exact = False
            else:
                cells[places] = True
        else:
            for part in places:
                self.write(part)

    def assign(self, region: ByteRegion, written: np.ndarray) -> None:
        """The elements of a view were written where `written`, which broadcasts to its sizes, says so; the others hold
        what nothing wrote."""
        cells = self._cells(region)
        if cells is None:
            self.exact = False
        else:
            cells[...] = written[..., None]
            self._hole = 0

    def written(self, region: ByteRegion) -> np.ndarray | None:
        """By element of a view, whether it was written; None if there are too many to tell."""
        cells = self._cells(region)
        return None if cells is None else np.all(cells, axis=-1)

    def ranges(self) -> list[tuple[int, int]]:
        """The written ranges, in order: (first byte, byte after the last)."""
        self._settle()
        if self._map is None:
            return self._dense
        edges = np.flatnonzero(np.diff(self._map, prepend=False, append=False)) * self._cell
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

    def holds_any(self, begin: int, end: int) -> bool:
        """Whether any byte of a range was written."""
        self._settle()
        if self._map is None:
            return any(low < end and begin < high for low, high in self._dense)
        return bool(self._map[begin // self._cell : -(-end // self._cell)].any())

    def copy(self) -> Coverage:
        made = Coverage(self.length)
        made.touched, made.exact, made._cell, made._hole = self.touched, self.exact, self._cell, self._hole
        made._dense, made._strided = list(self._dense), set(self._strided)
        made._map = None if self._map is None else self._map.copy()
        return made

    def _add(self, begin: int, end: int) -> None:
        kept = []
        for low, high in self._dense:
            if high < begin or low > end:
                kept.append((low, high))
            else:
                begin, end = min(begin, low), max(end, high)
        kept.append((begin, end))
        self._dense = sorted(kept)

    @property
    def complete(self) -> bool:
        """Whether every byte was written, as far as that is known without a map."""
        if self._map is None:
            return self._dense == [(0, self.length)] or self.length == 0
        self._settle()
        self._hole += int(np.argmin(self._map[self._hole :]))
        return bool(self._map[self._hole])

    def covers(self, region: ByteRegion) -> bool:
        """Whether every element of the view was written."""
        if region.empty:
            return True
        region = region.once()
        dense = region.dense()
        if self._map is None and dense is not None and any(a <= dense[0] and dense[1] <= b for a, b in self._dense):
            return True
        if region in self._strided:
            return True
        if self._map is None and not self._strided and len(self._dense) <= 1 and not self._touches(region):
            return False
        cells = self._cells(region)
        return cells is not None and bool(cells.all())

    def _touches(self, region: ByteRegion) -> bool:
        return any(low <= region.start and region.end <= high for low, high in self._dense)

    def _settle(self) -> None:
        """Put the views that wait into the map."""
        waiting, self._strided = self._strided, set()
        for region in waiting:
            cells = self._cells(region)
            if cells is None:  # overlapping windows, or too large: what was written there counts as unwritten
                self.exact = False
            else:
                cells[...] = True

    def _cells(self, region: ByteRegion) -> np.ndarray | None:
        """The part of the map that a view is on: its sizes, and the cells of an element. None if it is too large."""
        if self._strided:
            self._settle()
        known = [self._cell] if self._map is not None else [number for each in self._dense for number in each]
        cell = gcd(self.length, region.start, region.item, *region.strides, *known)
        if self.length // cell > _MAP_LIMIT or region.places > _MAP_LIMIT or region.end > self.length:
            return None
        if self._map is None:
            self._map = np.zeros(self.length // cell, bool)
            for low, high in self._dense:
                self._map[low // cell : high // cell] = True
        elif cell != self._cell:
            self._map, self._hole = np.repeat(self._map, self._cell // cell), 0
        self._cell = cell
        return np.lib.stride_tricks.as_strided(
            self._map[region.start // cell :],
            (*region.sizes, region.item // cell),
            (*(stride // cell for stride in region.strides), 1),
        )
