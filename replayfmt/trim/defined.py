"""Which bytes of the result's storages are known to be the same in every replay.

Imported content is known, and so are an op's results, unless the op leaves memory unwritten (the empty family): then
only the parts that ops have written since. Digests must not cover anything else. The recorder tracks the same for the
program.
"""

from __future__ import annotations

import torch

from replayfmt.recording.storages.coverage import ByteRegion, Coverage


def region_of(tensor: torch.Tensor) -> ByteRegion:
    """A strided tensor as bytes of its storage."""
    item = tensor.element_size()
    return ByteRegion(
        int(tensor.storage_offset()) * item,
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
        item,
    )


class Defined:
    """Tracks the known bytes, by storage id. Storages it does not know are fully defined."""

    def __init__(self) -> None:
        self._unwritten: dict[int, Coverage] = {}
        self._opaque: set[int] = set()
        self._length: dict[int, int] = {}

    def entered(self, storage: int, length: int) -> None:
        """The whole content was imported."""
        self._unwritten.pop(storage, None)
        self._opaque.discard(storage)
        self._length[storage] = length

    def born(self, storage: int, length: int, *, written: bool, opaque: bool) -> None:
        """An op returned a new storage. `opaque`: it holds bytes that no replay reproduces."""
        self._length[storage] = length
        if opaque:
            self._opaque.add(storage)
        if not written and length:
            self._unwritten[storage] = Coverage(length)

    def wrote(self, storage: int, tensor: torch.Tensor, *, everything: bool) -> None:
        """An op wrote to a view: to every element (`everything`) or to some."""
        coverage = self._unwritten.get(storage)
        if coverage is None:
            return
        if everything:
            coverage.write(region_of(tensor))
            if coverage.complete:
                del self._unwritten[storage]
        else:
            coverage.touched = True

    def measure(self, storage: int, length: int) -> None:
        """A storage has a new length; added bytes are unwritten."""
        before = self._length.get(storage, length)
        self._length[storage] = length
        if length <= before:
            return
        coverage, known = Coverage(length), self._unwritten.get(storage)
        if before and known is None:
            coverage.write(ByteRegion(0, (before,), (1,), 1))
        self._unwritten[storage] = coverage

    def covers(self, storage: int, tensor: torch.Tensor) -> bool:
        """Whether every element of a view on a storage is known."""
        if storage in self._opaque:
            return False
        coverage = self._unwritten.get(storage)
        return coverage is None or coverage.covers(region_of(tensor))
