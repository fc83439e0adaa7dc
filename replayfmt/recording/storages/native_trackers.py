"""Trackers of storages that the native recorder's hot path also knows (native/session.h).

A storage returned by an op on the hot path has no tracker until Python meets and adopts it. From then on both know it:
the tracker asks for the views and writes that it has not seen, and takes the storage back when it begins to need care.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .trackers import Tracker, Written

_size: Any = Tracker.__dict__["size"]  # the descriptors of the slots
_written: Any = Tracker.__dict__["written"]


class NativeTracker(Tracker):
    """A tracker in a capture with a hot path. `address` is the storage's address there."""

    __slots__ = ("address",)

    session: ClassVar[Any]  # the capture's; each capture has its own subclass
    address: int

    @property
    def size(self) -> int:
        return int(_size.__get__(self))

    @size.setter
    def size(self, size: int) -> None:
        _size.__set__(self, size)
        if size < 0:
            self.take_back()

    @property
    def written(self) -> Written | None:
        self._take_over_written(self.session.take_written(self.address, self.id))
        written: Written | None = _written.__get__(self)
        return written

    @written.setter
    def written(self, written: Written | None) -> None:
        self.session.take_written(self.address, self.id)  # those before do not matter any more
        _written.__set__(self, written)

    def note_written(self, tensor: int, meta: int, offset: int) -> None:
        self._take_over_written([(tensor, meta, offset)])

    def take_back(self) -> None:
        """Make the hot path forget it until it is published again."""
        self.known_content()
        found = self.session.take(self.address, self.id, True)
        if found is not None:
            self.take_over(found[2], found[3])

    def take_over(self, views: list[tuple[int, int, int]], written: list[tuple[int, int, int]]) -> None:
        """Take over the views and writes that the hot path saw."""
        for meta, offset, tensor in views:
            self.views.setdefault((meta, offset), tensor)
        self._take_over_written(written)

    def _take_over_written(self, written: list[tuple[int, int, int]]) -> None:
        if written:
            known = _written.__get__(self)
            if known is None:
                _written.__set__(self, known := {})
            known.update((tensor, (meta, offset)) for tensor, meta, offset in written)

    def publish(self, meta: int, offset: int, tensor: int) -> None:
        """A view of it was used on the complete path: the hot path knows it from now on."""
        state, size, content = self.state, self.size, None
        storage = self()  # alive meanwhile
        if state is not None and state.private and state.only_watched:
            size, content = state.length, state.content
        if storage is not None and size >= 0 and (state is None or state.alias_of is None):
            new_views = state is None or not state.synthesized
            of = self.address, self.id, size, new_views, content
            if self.session.publish(*of, meta, offset, tensor):
                for (other_meta, other_offset), number in self.views.items():
                    self.session.publish(*of, other_meta, other_offset, number)

    def content_now(self, storage: torch.UntypedStorage) -> int:
        if self.state is None or not self.state.private:
            return super().content_now(storage)
        return int(self.session.content_hash(storage.data_ptr(), storage.nbytes()))

    def known_content(self) -> int | None:
        if self.state is not None and self.state.private:
            known = self.session.content(self.address, self.id)
            self.state.content = self.state.content if known is None else known
        return super().known_content()

    def know_content(self, content: int | None) -> None:
        super().know_content(content)
        if content is not None and self.state is not None and self.state.private:
            self.session.set_content(self.address, self.id, content)


def adopted(session: Any, storage: torch.UntypedStorage) -> tuple[int, int, Any, Any, bytes | None, bool] | None:
    """Id, bytes, views and writes of a storage that was created on the hot path, a sample of its memory as it was then
    if nothing was written to it since, and whether generated code allocated it; None for any other."""
    found: tuple[int, int, Any, Any, bytes | None, bool] | None = session.take(storage._cdata, 0, False)
    return found
