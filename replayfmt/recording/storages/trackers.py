"""What the capture keeps about one storage of the program, and what it concludes from that.

`Tracker` is a weak reference to a storage. Its views, and which of them were written, are the session's
(stream/session.py). `HostMemory` finds storages on the same bytes of host memory without checking them all.

`Unexplained` reports values from memory that was never written, as far as the capture knows. If memory from
`torch.empty` is read before a captured op wrote it, then either something unseen wrote it, or its content is
meaningless. A sample of its bytes, taken when it was handed out, tells which (identity.py). Without a sample nobody
knows. Some programs compute with such memory only for the shape of the result. So an elementwise operator may read it
as it is: its content is imported, and the operator's result is unexplained as well. If any other operator reads such
values, or they still exist at the end, they count as an unseen write. Where the user expects such reads, in the scopes
of `reads_unwritten`, the content is imported and that is all.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple

import torch

from replayfmt.pytorch.tensors.memory import address_of

from ..content.coverage import ByteRegion, Coverage
from ..content.file_mappings import MappedRange
from ..content.storage_content import sample, sampled_places
from ..kernels import CapturedKernel
from ..stream.records import Records
from ..stream.session import Entry

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

    coverage: Coverage | None = None  # not None: at least partly uninitialized
    sampled = b""  # some of its bytes, as they were when nothing had written it; none: not known
    watched = False  # compared with its entry's content at each use
    windowed = False  # the program has a window on it (an array, a capsule), through which it may write
    mapped: MappedRange | None = None  # mapped from a file: unchanged pages are not read to compare
    arbitrary = False  # its content entered as what nothing had written: in it an address has no meaning
    synthesized = False  # a recipe replaces its content
    outside = False  # written from outside: it is imported at its next use
    unexplained: Origin | None = None  # neither it nor its inputs were ever written
    unreadable = False  # a ZeroTensor's: it has no memory
    opaque = False  # holds what no replay reproduces: never compared
    alias_of: Tracker | None = None  # memory shared with another storage, `delta` bytes into it
    delta = 0
    in_flight = False  # a collective writes to it, or C++ code sends it
    private = False  # its memory is this process's alone, and of no file: it can be read whenever it lives

    def __init__(self, length: int) -> None:
        self.length = length  # bytes

    @property
    def needs_care(self) -> bool:
        """Whether there is something to do before each use, apart from what being watched asks for."""
        return (
            self.coverage is not None
            or self.outside
            or self.alias_of is not None
            or self.unreadable
            or self.unexplained is not None
            or self.in_flight
        )

    @property
    def only_watched(self) -> bool:
        """Whether all that its uses need is a comparison with its known content."""
        return self.watched and self.mapped is None and not self.needs_care

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


class Tracker(weakref.ref):
    """One storage of the program. Calling it returns the storage, or None once it has died."""

    __slots__ = ("entry", "id", "imports", "offered", "size", "state")

    id: int  # storage id
    entry: Entry  # what the session knows of it
    offered: bool  # whether the hot path may take it as it is now
    size: int  # bytes; -1: look at `state` before each use
    state: State | None
    imports: int  # how often its content was imported

    def need_care(self) -> None:
        """Look at `state` before each use. (The hot path leaves it alone until it is offered again.)"""
        self.size = -1
        self.offered = False
        self.entry.withdraw()

    def offer(self) -> None:
        """Let the hot path take it, unless it needs care there, too."""
        state, size = self.state, self.size
        if state is not None and state.private and state.only_watched and self.entry.content is not None:
            size = state.length
        if size >= 0 and (state is None or state.alias_of is None):
            self.entry.offer(size, state is None or not state.synthesized)
            self.offered = True

    def settle(self) -> None:
        """Make uses cheap again if there is nothing left to check."""
        self.offered = False
        state = self.state
        if state is None:
            return
        if state.watched or state.needs_care:
            self.need_care()
        else:
            self.size = state.length

    @property
    def alias(self) -> bool:
        """Whether it shares the memory of another storage, and is recorded as that one."""
        return self.state is not None and self.state.alias_of is not None

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
        return address_of(storage) != 0
    except RuntimeError:  # torch refuses the address of a ZeroTensor's storage
        return False


_FEWEST = 1024  # storages that may wait for a look, dead or alive
_REGION_BITS = 16  # bytes of a region, in whose list of ranges another one is put in its place
_GROUP_BITS = 3  # the longest length of a group is so many bits longer than the shortest


class Beside(NamedTuple):
    """What lies in a watched storage beside the regions that an op is about to write; no number if nothing does."""

    tracker: Tracker
    regions: list[ByteRegion]
    number: int | None


def _group(length: int) -> int:
    """The number of bits of the longest length in its group."""
    return -(-length.bit_length() // _GROUP_BITS) * _GROUP_BITS


class AddressRanges:
    """Ranges of addresses, from the first byte to the one after the last, by storage id. None is empty.

    Ranges may overlap. They are kept sorted, by the region in which they begin and grouped by similar length: a range
    that reaches an address begins at most the group's longest before it. Few groups, because each look asks all.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        # (first byte, id), by group (the longest length's number of bits) and by region
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
        regions = self._begins.setdefault(_group(end - begin), {})
        insort(regions.setdefault(begin >> _REGION_BITS, []), (begin, number))

    def discard(self, number: int) -> None:
        """Forget a storage, if it is known."""
        found = self._ranges.pop(number, None)
        if found is not None:
            begin, end = found
            group = _group(end - begin)
            regions = self._begins[group]
            begins = regions[begin >> _REGION_BITS]
            del begins[bisect_left(begins, (begin, number))]
            if not begins:
                del regions[begin >> _REGION_BITS]
            if not regions:
                del self._begins[group]

    def containing(self, begin: int, end: int) -> list[int]:
        """The storages that hold all of a range."""
        least = _group(end - begin)
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
        begin = address_of(storage)
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
                begin = address_of(storage)
                self._own.add(number, begin, begin + storage.nbytes())

    def _there(self, ranges: AddressRanges, number: int) -> Tracker | None:
        """The tracker of a storage, after updating its range; None if it died. A death that was not drained yet leaves
        an outdated range, and so does a resize."""
        tracker = self._live.get(number)
        storage = None if tracker is None else tracker()
        if storage is None or not storage.nbytes():
            ranges.discard(number)
            return None
        begin = address_of(storage)
        if ranges[number] != (begin, begin + storage.nbytes()):
            ranges.add(number, begin, begin + storage.nbytes())
        return tracker


_REASON = "unseen_write"
_CHANGED = "; since it was handed out, something that the capture does not see has written it"
_UNKNOWN = (
    "whether something unseen wrote it cannot be known for this memory. If the program reads what nobody wrote, as "
    "warm-ups do, name the scope in which it does: --reads-unwritten=SCOPE"
)


class Unwritten(Enum):
    """How to treat a use of memory that was never written."""

    unseen = auto()  # an unseen write, or no write at all
    as_is = auto()  # no reason to refuse: the op declares that it writes it, say
    explained = auto()  # a PyTorch composite wrote it, with the arguments of another op; or the user expects it
    passed_on = auto()  # not yet: the op's result is unexplained as well
    copied = auto()  # none: the op copies bytes, and its copy is as unwritten as they are


class Unexplained:
    """The unexplained values of one capture. Callers hold the recorder's lock."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.expected: Callable[[], bool] | None = None  # whether the program may read unwritten memory at this point

    def way(self, given: Unwritten) -> Unwritten:
        """How to treat a use, given how its op alone would be treated."""
        counts = given in (Unwritten.unseen, Unwritten.passed_on, Unwritten.copied)
        return Unwritten.explained if counts and self.expected is not None and self.expected() else given

    def unwritten(self, tracker: Tracker, length: int, op: str, *, changed: bool) -> None:
        """`op` reads `length` bytes that were never written. `changed`: they are not as they were handed out."""
        if changed:
            self._records.unsupported(_REASON, op, f"{_read(tracker, length)}{_CHANGED}")
        else:
            self._unknown(op, _read(tracker, length))

    def note_unwritten(self, tracker: Tracker, length: int, op: str) -> None:
        """`op`, which is elementwise, reads them: this storage is unexplained from now on."""
        self._note(tracker, Origin(op, _read(tracker, length)))

    @staticmethod
    def _note(tracker: Tracker, origin: Origin) -> None:
        owner = owner_of(tracker)
        if owner.state is None:
            owner.state = State(owner.size)
        owner.state.unexplained = origin
        owner.need_care()
        tracker.need_care()

    def pass_on(
        self, kernel: CapturedKernel, given: Iterable[tuple[int, Tracker]], results: Iterable[tuple[int, Tracker]]
    ) -> None:
        """After a call that computes element by element, or copies, with its tensors by argument and by result: mark
        what it made."""
        copies = kernel.operator.copies
        given = list(given)
        for index, tracker in given:
            state = owner_of(tracker).state
            if state is not None and state.unexplained is not None and (kernel.elementwise or index == copies):
                written = [each for argument, each in given if argument in kernel.writes]
                for each in written if kernel.writes else [result for _, result in results]:
                    self._note(each, state.unexplained)

    def report(self, tracker: Tracker, op: str) -> None:
        """`op` uses what a storage holds ("": it is kept)."""
        state = owner_of(tracker).state
        if state is not None and state.unexplained is not None:
            origin, state.unexplained = state.unexplained, None
            used = f"used by {op}" if op else "kept"
            self._unknown(origin.op, f"{origin.detail}, and what comes of it is {used}")

    def _unknown(self, op: str, what: str) -> None:
        self._records.notes[f"memory is read before any captured op wrote it; {_UNKNOWN}"] = None
        self._records.unsupported(_REASON, op, f"{what}; {_UNKNOWN}")

    @staticmethod
    def wrote(tracker: Tracker, region: ByteRegion) -> None:
        """Every element of a region was written, which may be all of an unexplained storage or part of it."""
        if tracker.state is not None and region.once().dense() == (0, tracker.state.length):
            tracker.state.unexplained = None
            tracker.settle()

    def report_kept(self, live: Iterable[Tracker]) -> None:
        """At the end of the recording: report the storages that are still alive."""
        for tracker in live:
            if tracker() is not None:
                self.report(tracker, "")


def _read(tracker: Tracker, length: int) -> str:
    return f"storage {tracker.id} ({length} bytes) is read before any captured op wrote all of what is read"


def owner_of(tracker: Tracker) -> Tracker:
    """The storage that owns the memory."""
    alias_of = tracker.state.alias_of if tracker.state is not None else None
    return tracker if alias_of is None else alias_of
