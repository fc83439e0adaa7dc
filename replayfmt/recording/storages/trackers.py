"""What the capture keeps about one storage of the program.

A storage is known by a `Tracker`, a weak reference kept in the storage's own `__dict__`: it lives exactly as long as
the storage does, even if only C++ holds that, keeps nothing alive, and its callback reports the release. Most storages
need no more; a `State` holds what is special about a storage.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from .coverage import ByteRegion, Coverage
from .file_mappings import MappedRange
from .storage_content import content_number, sample, sampled_places

ATTRIBUTE = "_opreplay"
GENERATED = "_opreplay_generated"  # an attribute of storages that generated code allocated
EXPORTED = "_opreplay_exported"  # an attribute of unknown storages that others may write


class Origin(NamedTuple):
    """The origin of values that were never written: the operator that read them first, and the text of a report about
    it."""

    op: str
    detail: str


class State:
    """What is special about a storage."""

    __slots__ = (
        "alias_of",
        "arbitrary",
        "content",
        "coverage",
        "delta",
        "length",
        "mapped",
        "opaque",
        "outside",
        "private",
        "sampled",
        "synthesized",
        "unexplained",
        "unreadable",
        "watched",
        "windowed",
    )

    def __init__(self, length: int) -> None:
        self.length = length  # bytes
        self.coverage: Coverage | None = None  # not None: at least partly uninitialized
        self.sampled = b""  # some of its bytes, as they were when nothing had written it; none: not known
        self.watched = False  # compared with `content` at each use
        self.windowed = False  # the program has a window on it (an array, a capsule), through which it may write
        self.content: int | None = None  # what to compare with, as of the last captured write or import
        self.mapped: MappedRange | None = None  # mapped from a file: unchanged pages are not read to compare
        self.arbitrary = False  # its content entered as what nothing had written: in it an address has no meaning
        self.synthesized = False  # a recipe replaces its content
        self.outside: str | None = None  # written from outside: import at the next use, for this reason
        self.unexplained: Origin | None = None  # neither it nor its inputs were ever written
        self.unreadable = False  # a ZeroTensor's: it has no memory
        self.opaque = False  # holds what no replay reproduces: never compared
        self.alias_of: Tracker | None = None  # memory shared with another storage, `delta` bytes into it
        self.delta = 0
        self.private = False  # its memory is this process's alone, and of no file: it can be read whenever it lives

    @property
    def needs_care(self) -> bool:
        """Whether there is something to do before each use, apart from what being watched asks for."""
        return (
            self.coverage is not None
            or self.outside is not None
            or self.alias_of is not None
            or self.unreadable
            or self.unexplained is not None
        )

    @property
    def only_watched(self) -> bool:
        """Whether all that its uses need is a comparison with its known content."""
        return self.watched and self.content is not None and self.mapped is None and not self.needs_care

    def begin_coverage(self, length: int, sampled: bytes) -> None:
        """Nothing has been written to it, or to what was added to it. `sampled`: as it was then."""
        self.coverage, self.sampled = Coverage(length), sampled

    def was_left_alone(self, storage: torch.UntypedStorage) -> bool | None:
        """Whether what no captured op wrote is as it was when the storage was handed out: then nothing unseen wrote it
        either, as far as the sample tells. None if nobody can know."""
        if not self.sampled or self.coverage is None or storage.nbytes() != self.coverage.length:
            return None
        now, before = sample(storage), self.sampled
        if now == before or not self.coverage.touched:
            return now == before
        if not self.coverage.exact:
            return None
        return all(
            now[at : at + size] == before[at : at + size] or self.coverage.holds_any(begin, begin + size)
            for at, begin, size in sampled_places(self.coverage.length)
        )


Written = dict[int, tuple[int, int]]  # by tensor id: meta id and offset


class Tracker(weakref.ref):
    """One storage of the program. Calling it returns the storage, or None once it has died."""

    __slots__ = ("id", "imports", "size", "state", "views", "written")

    id: int  # storage id
    size: int  # bytes; -1: look at `state` before each use
    views: dict[tuple[int, int], int]  # tensor id of each (meta id, offset), the first one used first
    state: State | None
    imports: int  # how often its content was imported
    written: Written | None  # the views written in place since the last digest

    def note_written(self, tensor: int, meta: int, offset: int) -> None:
        """A captured op wrote to a view."""
        if self.written is None:
            self.written = {}
        self.written[tensor] = meta, offset

    def publish(self, meta: int, offset: int, tensor: int) -> None:
        """A view of it was used. (For NativeTracker.)"""

    def settle(self) -> None:
        """Make uses cheap again if there is nothing left to check."""
        state = self.state
        if state is not None:
            self.size = -1 if state.watched or state.needs_care else state.length

    def content_now(self, storage: torch.UntypedStorage) -> int:
        """A number that identifies its content."""
        return content_number(storage, None if self.state is None else self.state.mapped)

    def known_content(self) -> int | None:
        """That number, as of the last captured write or import, if it is watched."""
        return None if self.state is None else self.state.content

    def know_content(self, content: int | None) -> None:
        """A captured write, or an import, has left it with this content."""
        if self.state is not None:
            self.state.content = content

    @property
    def alias(self) -> bool:
        """Whether it shares the memory of another storage, and is recorded as that one."""
        return self.state is not None and self.state.alias_of is not None

    @property
    def written_outside(self) -> bool:
        """Whether it is watched and its content differs from what the stream says."""
        state, storage = self.state, self()
        if state is None or storage is None or not state.watched or not storage.nbytes():
            return False
        known = self.known_content()
        return known is not None and self.content_now(storage) != known

    def reproducible(self, region: ByteRegion) -> bool:
        """Whether a replay can have the same bytes in a region: they were written, and are not opaque."""
        state = self.state
        if state is None:
            return True
        if state.alias_of is not None and state.alias_of.state is not None and state.alias_of.state.opaque:
            return False
        return not state.opaque and (state.coverage is None or state.coverage.covers(region))


def has_bytes(storage: torch.UntypedStorage, length: int, device: torch.device) -> bool:
    """Whether a storage has memory: meta tensors and ZeroTensors have none."""
    if length == 0 or device.type == "meta":
        return length == 0
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # torch refuses the address of a ZeroTensor's storage
        return False
