"""Buffered records: packed rows appended by any thread, turned into columns and passed to the writer.

Waiting records are written by threads that record, each time a small part, so that no step of the program waits for a
whole frame; or, where none records any more, by the recorder's own thread.
"""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

from replayfmt.format.codes import UNKNOWN_NS, Layout
from replayfmt.format.output import Uninterrupted
from replayfmt.format.record_columns import RecordColumns
from replayfmt.format.record_frames import spans
from replayfmt.format.writer import CaptureWriter

from .session import FLAG_BITS, HEAD_WORDS, RowList, Session, now_ns

RELEASES = 1 << 33
_META_HEAD = 3  # words before the sizes in a row of metadata
_FRAME_WORDS = 1 << 20  # a frame is also ended when this many words are waiting
_PART_ROWS = 2048  # that are split into columns at once
_DONE = object()


@functools.cache
def _packer(words: int, floats: int) -> Callable[..., bytes]:
    """Packs a row's head with `words` integers and `floats` doubles after it."""
    return Struct(f"<{HEAD_WORDS + words}q{floats}d").pack


class Contexts(dict[int, int]):
    """Context id of each thread, by its ident: a new thread is registered at its first lookup. `moved` is called after
    each change, with an ident and its context, or -1."""

    moved: Callable[[int, int], None] | None = None

    def __init__(self, register: Callable[[int], int]) -> None:
        super().__init__()
        self._register = register

    def __missing__(self, ident: int) -> int:
        return self._register(ident)

    def __setitem__(self, ident: int, context: int) -> None:
        super().__setitem__(ident, context)
        if self.moved is not None:
            self.moved(ident, context)

    def pop(self, ident: int, *default: Any) -> Any:
        popped = super().pop(ident, *default)
        if self.moved is not None:
            self.moved(ident, -1)
        return popped

    def follow(self, moved: Callable[[int, int], None]) -> None:
        """Have `moved` called from now on, and for what there is."""
        self.moved = moved
        for ident, context in self.items():
            moved(ident, context)


class RecordBuffer:
    """Records on their way to the writer. `lock` guards the writer; whoever calls the writer holds it. `contexts` are
    told by scopes.py."""

    contexts: Contexts

    def __init__(
        self, writer: CaptureWriter, chunk_records: int, lock: threading.RLock, session: Session, started: int
    ) -> None:
        """`started`: perf_counter_ns of the session's start."""
        self._session = session
        self.writer = writer
        self.lock = lock
        self.chunk_records = chunk_records
        self.started = started
        self.placement: Callable[[], int] | None = None  # the calling thread's current streams
        self._placed: dict[tuple[int, int], int] = {}
        self.rows = session.rows
        self.appended = 0  # records of the complete path: all records, if there is no other path
        self._taken = 0  # rows that are written, or in the frame that is being written
        self._frame: Iterator[None] | None = None  # that one, up to the next part
        self._first_storage = 1
        self._slots = tuple(array("q", [0]) for _ in range(3))  # by signature id: tensors, ints, floats
        self._contexts = array("q")  # by context id: thread, scope, placement
        self._live_definitions = np.zeros((0, 4), np.int64)  # tensor definitions, by tensor id

    def note_signature(self, number: int, *slots: int) -> None:
        """How many slots records of a new signature have for tensors, ints and floats."""
        with Uninterrupted():  # all columns, or none
            for column, count in zip(self._slots, slots, strict=True):
                column.extend([0] * (number + 1 - len(column)))
                column[number] = count

    def context(self, thread: int, scope: int, placement: int = 0) -> int:
        """A context id for a thread, the scope it is in, and its current streams."""
        with self.lock:
            self._contexts.extend((thread, scope, placement))  # a single step, which no signal handler interrupts
            return len(self._contexts) // 3 - 1

    def current(self) -> int:
        """The context id of the calling thread."""
        context = self.contexts[get_ident()]
        placement = self.placement() if self.placement is not None else 0
        if not placement:
            return context
        known = self._placed.get((context, placement))
        if known is None:
            with self.lock:
                thread, scope = self._contexts[3 * context : 3 * context + 2]
                known = self._placed[context, placement] = self.context(thread, scope, placement)
        return known

    def now(self) -> int:
        return time.perf_counter_ns() - self.started

    def append_op(
        self, signature: int, words: Sequence[int], floats: Sequence[float], started: int, ended: int
    ) -> None:
        """Add the record of an op that ran in the calling thread. The caller holds the lock."""
        pack = _packer(len(words), len(floats))
        row = pack(signature, self.current(), started - self.started, ended - started, *words, *floats)
        self.appended += self._session.append_op(row)

    def append(self, signature: int, words: Sequence[int] = (), floats: Sequence[float] = (), records: int = 1) -> None:
        """Add a row of other records, which begin now. The caller holds the lock."""
        pack = _packer(len(words), len(floats))
        self.rows.append(pack(signature, self.current(), self.now(), 0, *words, *floats))
        self.appended += records

    # ----------------------------------------------------------------------------------------------------------- flush

    def flush(self) -> None:
        """Write what is buffered, in frames of about `chunk_records`. Raises what the writer raises."""
        # An interrupt must not come between taking rows out of the buffer and writing them.
        with Uninterrupted(), self.lock:
            end = self._taken + len(self.rows)
            while self.writing or self._taken < end:
                self.write_part()

    @property
    def writing(self) -> bool:
        """Whether a frame is partly written."""
        return self._frame is not None

    def write_part(self) -> None:
        """Go on with the frame that is being written, or begin one. Raises what the writer raises."""
        with Uninterrupted(), self.lock:
            if self._frame is None and self.rows:
                self._frame = self._write_frame()
            if self._frame is not None and next(self._frame, _DONE) is _DONE:
                self._frame = None

    def _write_frame(self) -> Iterator[None]:
        """Write one frame, and yield between parts of the work."""
        split: list[RowColumns] = []
        count, words, most = 0, 0, min(len(self.rows), self.chunk_records)
        while count < most and words < _FRAME_WORDS:
            rows = self.rows.part(count, min(_PART_ROWS, most - count))
            part = split_rows(rows, self._slots, _FRAME_WORDS - words)
            split.append(part)
            count, words = count + part.rows, words + part.words
            yield
        self.rows.drop(count)
        self._taken += count
        yield
        self._define()
        self._define_metas()
        storages = _take(self._session.new_storages, 5)  # all that the rows and definitions refer to are among them
        yield
        batch = joined(split)
        yield
        definitions = self._live_definitions
        if len(batch.released):
            self._live_definitions = definitions[~np.isin(definitions[:, 1], batch.released)]
        first = self._first_storage
        self._first_storage += len(storages)
        # Nothing may look at the contexts across a yield: an array cannot grow then.
        threads, scopes, placements = (
            column.take(batch.context) for column in np.frombuffer(self._contexts, np.int64).reshape(-1, 3).T
        )
        yield
        yield from self.writer.records_in_parts(
            RecordColumns(
                signature=batch.signature,
                scope=scopes,
                thread=threads,
                # A program may put another clock in the place of Python's (freezegun), which stands or goes back.
                start_ns=np.maximum(batch.start_ns, 0),
                duration_ns=np.where(batch.duration_ns < 0, UNKNOWN_NS, batch.duration_ns),
                tensors=batch.tensors,
                ints=batch.ints,
                floats=batch.floats,
                tensor_definitions=definitions,
                first_storage=first,
                storage_bytes=storages[:, 1],
                storage_device=storages[:, 2],
                storage_origin=storages[:, 3],
                storage_payload=storages[:, 4],
                placement=placements if placements.any() else None,
            )
        )

    def _define_metas(self) -> None:
        """Define the metadata that was numbered since the last time."""
        metas = self._session.new_metas
        words, ends = (np.frombuffer(part, np.int64) for part in metas.part(0, len(metas)))
        if len(ends):
            begins = np.concatenate(([0], ends[:-1]))
            rank = (ends - begins - _META_HEAD) // 2
            shape = begins + _META_HEAD
            self.writer.new_metas(
                meta_dtype=words[begins],
                meta_layout=np.full(len(ends), Layout.strided),
                meta_device=words[begins + 1],
                meta_flags=words[begins + 2] >> FLAG_BITS,
                meta_rank=rank,
                meta_sizes=words[spans(shape, rank)],
                meta_strides=words[spans(shape + rank, rank)],
            )
            metas.drop(len(ends))

    def _define(self) -> None:
        """Add the new definitions to the known ones, in order of tensor ids."""
        definitions = np.concatenate((self._live_definitions, _take(self._session.definitions, 4)))
        definitions = definitions[np.argsort(definitions[:, 0], kind="stable")]
        if len(definitions) > 1:
            definitions = definitions[np.concatenate((definitions[1:, 0] != definitions[:-1, 0], [True]))]
        self._live_definitions = definitions


class RowColumns(NamedTuple):
    """Rows split into the columns of a frame. `rows` and `words`: how many they were."""

    rows: int
    words: int
    signature: np.ndarray
    context: np.ndarray
    start_ns: np.ndarray
    duration_ns: np.ndarray
    tensors: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    released: np.ndarray  # storages


def split_rows(packed: tuple[bytes, bytes], slots: tuple[array[int], ...], most_words: int) -> RowColumns:
    """The columns of some rows (see `RowList.part`): of the first of them, as far as they have `most_words`, but of one
    at least."""
    words, ends = (np.frombuffer(part, np.int64) for part in packed)
    if ends[-1] > most_words:
        ends = ends[: max(1, int(np.searchsorted(ends, most_words, "right")))]
        words = words[: ends[-1]]
    begins = np.concatenate(([0], ends[:-1]))
    lengths = ends - begins
    head = words[begins]
    released = head >= RELEASES
    signature = np.where(released, head - RELEASES, head)
    slots_begin = begins + HEAD_WORDS
    kind = np.where(released, 0, signature)
    tensor_count, int_count, float_count = (_column(column)[kind] for column in slots)
    tensors = words[spans(slots_begin, tensor_count)]
    int_count = np.where(released, lengths - HEAD_WORDS, int_count)
    ints_begin = slots_begin + tensor_count
    records = np.where(released, lengths - HEAD_WORDS, 1)
    return RowColumns(
        len(ends),
        len(words),
        np.repeat(signature, records),
        np.repeat(words[begins + 1], records),
        np.repeat(words[begins + 2], records),
        np.repeat(words[begins + 3], records),
        tensors,
        words[spans(ints_begin, int_count)],
        words.view(np.float64)[spans(ints_begin + int_count, float_count)],
        words[spans(slots_begin[released], records[released])],
    )


def joined(parts: Sequence[RowColumns]) -> RowColumns:
    """The columns of all rows, in this order."""
    rows, words, *columns = zip(*parts, strict=True)
    return RowColumns._make([sum(rows), sum(words), *map(np.concatenate, columns)])


def _column(values: array[int]) -> np.ndarray:
    """A view of an array; it must not outlive the lock, because a viewed array cannot grow."""
    return np.frombuffer(values, np.int64) if values else np.zeros(0, np.int64)


def _take(rows: RowList, words: int) -> np.ndarray:
    """Empty a list of rows of equal length."""
    count = len(rows)
    taken = np.frombuffer(rows.part(0, count)[0], np.int64).reshape(-1, words)
    rows.drop(count)
    return taken


PERIOD_NS = 100_000_000  # the recorder's thread writes if nobody has for so long: what a killed process loses
_DUE_NS = 80_000_000  # a thread that records does
_SHARE = 20  # writing takes at most one part in so many of the time: with many live tensors it is done less often
_GAP = 8  # a thread that records goes on with a frame after so many times what its last part took


class FlushTimes:
    """Those of one capture."""

    def __init__(self, session: Session) -> None:
        self._flushing = session.flushing
        self._work_ns = 0  # of the processor, for the frame that is being written
        self.begin()

    def _expect(self, due_ns: int, late_ns: int) -> None:
        """The next turn is so much later: of a thread that records, or else of the recorder's."""
        now = now_ns()
        self._due_ns = now + due_ns
        self._flushing.expect(self._due_ns, now + late_ns)

    def begin(self) -> None:
        """It is somebody's turn."""
        self._expect(_DUE_NS, PERIOD_NS)

    def end(self, took_ns: int, more: bool) -> None:
        """It was, with so much work of the processor. `more`: of the frame that is being written."""
        self._work_ns += took_ns
        if more:
            self._expect(_GAP * took_ns, max(_GAP * took_ns, PERIOD_NS - _DUE_NS))
        else:
            share = _SHARE * self._work_ns
            self._expect(max(_DUE_NS, share), max(PERIOD_NS, share))
            self._work_ns = 0

    def overdue(self) -> bool:
        """Whether a thread that records is to write what waits."""
        return now_ns() >= self._due_ns

    def wake(self) -> None:
        """The recorder's thread is to write what waits."""
        self._flushing.wake()

    def wait(self) -> None:
        """In the recorder's thread: wait until it is to write."""
        self._flushing.wait()
