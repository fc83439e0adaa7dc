"""Which bytes of an uninitialized storage captured ops have written.

Digests must never cover bytes that were never written: they differ between identical runs. Views are noted as they are
written, and evaluated on demand. Nothing but its length in bytes is known about a storage here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

import numpy as np

_MAP_LIMIT = 1 << 27  # most cells in the exact map, and places of a view in it; anything beyond counts as unwritten


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
    """Which bytes of one storage were written. A fully written storage needs no Coverage."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._dense: list[tuple[int, int]] = []
        self._strided: set[ByteRegion] = set()
        self.touched = False  # some captured op wrote something, perhaps data-dependently

    def write(self, region: ByteRegion) -> None:
        self.touched = True
        region = region.once()
        dense = region.dense()
        if dense is None:
            if region.places <= _MAP_LIMIT:  # else overlapping windows: what they wrote counts as unwritten
                self._strided.add(region)
        else:
            self._add(*dense)

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
        """Whether every byte was written, as far as known without the exact map."""
        return self._dense == [(0, self.length)] or self.length == 0

    def covers(self, region: ByteRegion) -> bool:
        """Whether every element of the view was written."""
        if region.empty:
            return True
        region = region.once()
        dense = region.dense()
        if dense is not None and any(low <= dense[0] and dense[1] <= high for low, high in self._dense):
            return True
        if region in self._strided:
            return True
        if not self._strided and len(self._dense) <= 1 and not self._touches(region):
            return False
        return self._exact(region)

    def _touches(self, region: ByteRegion) -> bool:
        end = region.start + sum((n - 1) * s for n, s in zip(region.sizes, region.strides, strict=True)) + region.item
        return any(low <= region.start and end <= high for low, high in self._dense)

    def _exact(self, region: ByteRegion) -> bool:
        regions = [region, *self._strided]
        cell = gcd(
            self.length,
            *(gcd(r.start, r.item, *r.strides) for r in regions),
            *(gcd(low, high) for low, high in self._dense),
        )
        if cell == 0 or self.length // cell > _MAP_LIMIT or region.places > _MAP_LIMIT:
            return False
        written = np.zeros(self.length // cell, bool)
        for low, high in self._dense:
            written[low // cell : high // cell] = True
        for part in self._strided:
            _cells(written, part, cell)[...] = True
        return bool(_cells(written, region, cell).all())


def _cells(cells: np.ndarray, region: ByteRegion, cell: int) -> np.ndarray:
    per_item = region.item // cell
    return np.lib.stride_tricks.as_strided(
        cells[region.start // cell :], (*region.sizes, per_item), (*(stride // cell for stride in region.strides), 1)
    )


def whole(sizes: tuple[int, ...], item: int, length: int) -> bool:
    """Whether a non-overlapping view of these sizes must cover a storage of `length` bytes."""
    return prod(sizes) * item == length
