"""Values from memory that was never written, as far as the capture knows: reported where they matter.

If memory from `torch.empty` is read before a captured op wrote it, then either something unseen wrote it, or its
content is meaningless. A sample of its bytes, taken when it was handed out, tells which (identity.py). Without a sample
(memory of devices, storages resized unseen), nobody knows. Some programs compute with such memory only for the shape
of the result (`torch.ones_like(parameter * 2)`, before the parameter has values). So an elementwise operator may read
it as it is: its content is imported, and the operator's result is unexplained as well. If any other operator reads such
values, or they still exist at the end, they count as an unseen write. If they are released or overwritten before that,
they did no harm. Where the user expects such reads, in the scopes of `reads_unwritten`, the content is imported and
that is all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto

from ..dispatch.kernels import CapturedKernel
from ..stream.records import Records
from .coverage import ByteRegion
from .trackers import Origin, State, Tracker

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
        owner = _owner(tracker)
        if owner.state is None:
            owner.state = State(owner.size)
        owner.state.unexplained = origin
        owner.size = tracker.size = -1

    def pass_on(
        self, kernel: CapturedKernel, given: Iterable[tuple[int, Tracker]], results: Iterable[tuple[int, Tracker]]
    ) -> None:
        """After a call, with its tensors by argument and by result: mark what it computed element by element, or
        copied."""
        copies = kernel.operator.copies
        if not kernel.elementwise and copies < 0:
            return
        given = list(given)
        for index, tracker in given:
            state = _owner(tracker).state
            if state is not None and state.unexplained is not None and (kernel.elementwise or index == copies):
                written = [each for argument, each in given if argument in kernel.writes]
                for each in written if kernel.writes else [result for _, result in results]:
                    self._note(each, state.unexplained)

    def report(self, tracker: Tracker, op: str) -> None:
        """`op` uses what a storage holds ("": it is kept)."""
        state = _owner(tracker).state
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


def _owner(tracker: Tracker) -> Tracker:
    """The storage that owns the memory."""
    alias_of = tracker.state.alias_of if tracker.state is not None else None
    return tracker if alias_of is None else alias_of
