"""Buffered records: packed rows that any thread appends, turned into columns and handed to the writer.

A record is one `bytes` object, appended in one step that the interpreter does not interrupt, so ops of several threads
never mix and an op needs no lock to be recorded. Rows are int64 words:

    signature, context, start_ns, duration_ns, tensor slots..., int slots..., float slots (as doubles)...

where a context stands for a thread and the scope it is in. Births (storages) and definitions (tensors) are rows of
their own lists, appended before the first record that needs them. A flush takes a snapshot of the records first and of
the other lists after, so whatever a record needs is there.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct

import numpy as np

from replayfmt.format.columns import RecordColumns
from replayfmt.format.uninterrupted import Uninterrupted
from replayfmt.format.writer import CaptureWriter

HEAD_WORDS = 4  # signature, context, start, duration
_SLOT_LIMIT = 1 << 20  # a frame is also cut when that many words wait

pack_birth = Struct("<5q").pack          # storage id, bytes, device id, origin, payload id
pack_definition = Struct("<4q").pack     # tensor id, storage id, offset, meta id

_packs: dict[tuple[int, int], Callable[..., bytes]] = {}


def packer(words: int, floats: int) -> Callable[..., bytes]:
    """Packs a row's head with `words` tensor and int slots and `floats` float slots after it."""
    pack = _packs.get((words, floats))
    if pack is None:
        pack = _packs[words, floats] = Struct(f"<{HEAD_WORDS + words}q{floats}d").pack
    return pack


class RecordBuffer:
    """Records on their way to the writer. `lock` guards the writer; whoever calls the writer holds it."""

    def __init__(self, writer: CaptureWriter, chunk_records: int, lock: threading.RLock) -> None:
        self.writer = writer
        self.lock = lock
        self.chunk_records = chunk_records
        self.rows: list[bytes] = []
        self.births: list[bytes] = []
        self.definitions: list[bytes] = []
        self.next_storage: Iterator[int] = itertools.count(1)
        self.next_tensor: Iterator[int] = itertools.count(1)
        self.flushed = 0                        # records that left for the writer
        self.flushed_at = time.monotonic()
        self._first_storage = 1
        self._slots = tuple(array("q", [0]) for _ in range(3))    # by signature id: tensors, ints, floats
        self._threads, self._scopes = array("q"), array("q")      # by context id
        self._known = np.zeros((0, 4), np.int64)                  # definitions of live tensors, by id
        self._released: list[int] = []

    def note_signature(self, number: int, tensors: int, ints: int, floats: int) -> None:
        """How many slots records of a new signature have."""
        for column, count in zip(self._slots, (tensors, ints, floats), strict=True):
            while len(column) <= number:
                column.append(0)
            column[number] = count

    def context(self, thread: int, scope: int) -> int:
        """A context id for a thread and the scope it is in."""
        with self.lock:
            self._threads.append(thread)
            self._scopes.append(scope)
            return len(self._threads) - 1

    def released(self, storages: Sequence[int]) -> None:
        """These storages died: their tensors are not needed after the next flush."""
        self._released.extend(storages)

    def due(self) -> bool:
        return len(self.rows) >= self.chunk_records

    def flush(self) -> None:
        """Write what is buffered, in frames of at most `chunk_records`. Raises what the writer raises."""
        # An interrupt must not come between taking rows out of the buffer and writing them.
        with Uninterrupted(), self.lock:
            waiting = len(self.rows)
            while waiting > 0:
                waiting -= self._flush_frame()
            self.flushed_at = time.monotonic()

    def _flush_frame(self) -> int:
        """Write one frame; how many records it took."""
        forgettable = len(self._released)  # of storages whose last record is among the rows of now, or was written
        waiting = len(self.rows)
        count = min(waiting, self.chunk_records)
        rows = self.rows[:count]
        lengths = np.fromiter(map(len, rows), np.int64, count) >> 3
        ends = np.cumsum(lengths)
        if ends[-1] > _SLOT_LIMIT and count > 1:
            count = max(1, int(np.searchsorted(ends, _SLOT_LIMIT)))
            rows, lengths, ends = rows[:count], lengths[:count], ends[:count]
        del self.rows[:count]
        self.flushed += count
        words = np.frombuffer(b"".join(rows), np.int64)
        begins = ends - lengths
        signature, context = words[begins], words[begins + 1]
        tensor_count, int_count, float_count = (np.frombuffer(column, np.int64)[signature] for column in self._slots)
        begins = begins + HEAD_WORDS
        tensors = words[_spans(begins, tensor_count)]
        ints = words[_spans(begins + tensor_count, int_count)]
        floats = words.view(np.float64)[_spans(begins + tensor_count + int_count, float_count)]
        first = self._first_storage
        births = self._take_births()
        self.writer.records(RecordColumns(
            signature=signature,
            scope=np.frombuffer(self._scopes, np.int64)[context],
            thread=np.frombuffer(self._threads, np.int64)[context],
            start_ns=words[begins - 2],
            duration_ns=words[begins - 1],
            tensors=tensors,
            ints=ints,
            floats=floats,
            tensor_definitions=self._take_definitions(tensors, forgettable if count == waiting else 0),
            first_storage=first,
            storage_bytes=births[:, 1],
            storage_device=births[:, 2],
            storage_origin=births[:, 3],
            storage_payload=births[:, 4],
        ))
        return count

    def _take_births(self) -> np.ndarray:
        """The storages born since the last frame, in order of their ids, which have no gaps."""
        deadline = time.monotonic() + 1.0
        while True:
            count = len(self.births)
            births = np.frombuffer(b"".join(self.births[:count]), np.int64).reshape(-1, 5)
            births = births[np.argsort(births[:, 0], kind="stable")]
            expected = np.arange(self._first_storage, self._first_storage + len(births))
            if np.array_equal(births[:, 0], expected):
                break
            # A thread took an id and was suspended before it appended the birth. An exception from a signal handler
            # may have ended it there for good: then nothing refers to the id, and an empty storage stands for it.
            if time.monotonic() > deadline:
                births = _fill_gaps(births, self._first_storage)
                break
            time.sleep(0.0005)
        del self.births[:count]
        self._first_storage += len(births)
        return births

    def _take_definitions(self, tensors: np.ndarray, forgettable: int) -> Mapping[int, tuple[int, int, int]]:
        """The definitions of these tensors. Those of the first `forgettable` released storages are dropped after it."""
        count = len(self.definitions)
        fresh = np.frombuffer(b"".join(self.definitions[:count]), np.int64).reshape(-1, 4)
        del self.definitions[:count]
        known = np.concatenate((self._known, fresh))
        known = known[np.argsort(known[:, 0], kind="stable")]
        used = np.unique(tensors)
        rows = known[np.searchsorted(known[:, 0], used)] if used.size else known[:0]
        if forgettable:
            dead = np.array(self._released[:forgettable], np.int64)
            del self._released[:forgettable]
            known = known[~np.isin(known[:, 1], dead)]
        self._known = known
        return dict(zip(used.tolist(), map(tuple, rows[:, 1:].tolist()), strict=True))


def _spans(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """All of first[i], first[i] + 1, ..., first[i] + count[i] - 1, for each i in turn."""
    total = int(count.sum())
    ends = np.cumsum(count)
    return np.repeat(first - (ends - count), count) + np.arange(total)


def _fill_gaps(births: np.ndarray, first: int) -> np.ndarray:
    filled = np.zeros((int(births[-1, 0]) - first + 1, 5), np.int64)
    filled[:] = births[0]
    filled[:, 1] = 0
    filled[:, 0] = np.arange(first, first + len(filled))
    filled[births[:, 0] - first] = births
    return filled
