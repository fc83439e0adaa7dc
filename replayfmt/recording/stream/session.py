"""What one capture knows of the program: rows on their way to the writer, storages and their views, metadata.

`Session` keeps it in Python. Where the native recorder records, `Session` of native/session.h takes its place, with the
same methods: calls that hold nothing new then add to it without Python. Which of the two it is is decided once, when a
capture starts, and nobody asks later. What is there for such calls alone does nothing here.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from struct import Struct
from typing import Any

import numpy as np
import torch
import xxhash

from replayfmt.pytorch.tensors.memory import memory_at

HEAD_WORDS = 4  # signature, context, start, duration
FLAG_BITS = 48  # where the flags of metadata are in its kind: native/looks.h

_pack_storage = Struct("<5q").pack  # storage id, bytes, device id, origin, payload id
pack_definition = Struct("<4q").pack  # tensor id, storage id, offset, meta id
_pack_head = Struct(f"<{HEAD_WORDS}q").pack


# What a program puts in the place of time.perf_counter_ns may stand still.
now_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)


class RowList(list[bytes]):
    """Rows of one kind, waiting to be written. `dropped`: how many have been."""

    dropped = 0

    def part(self, begin: int, count: int) -> tuple[bytes, bytes]:
        """The words of `count` rows from `begin` on, and where each row ends in them: 64-bit integers."""
        rows = self[begin : begin + count]
        ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)) >> 3)
        return b"".join(rows), ends.tobytes()

    def drop(self, count: int) -> None:
        del self[:count]
        self.dropped += count


class Flushing:
    """When the recorder's own thread is to write what waits."""

    def __init__(self) -> None:
        # Putting anything here wakes it. Not an Event: a signal handler that raises inside `set`, which is Python code,
        # leaves its lock held forever.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._late_ns = 0

    def expect(self, due_ns: int, late_ns: int) -> None:
        """Rows are to be written once more: at `due_ns` by a thread that records, or else at `late_ns` by the
        recorder's own."""
        self._late_ns = late_ns

    def wake(self) -> None:
        """It is to write now."""
        if self._wake.empty():
            self._wake.put(None)

    def wait(self) -> None:
        """In that thread: wait until it is to write."""
        with suppress(Empty):
            self._wake.get(timeout=max(0.001, (self._late_ns - now_ns()) / 1e9))


class Entry:
    """What the capture knows of one storage: the tensors that its views are, and which of them recorded ops wrote."""

    __slots__ = ("_session", "_storage", "_views", "_written", "content")

    def __init__(self, session: Session, storage: int) -> None:
        self._session, self._storage = session, storage
        self._views: dict[tuple[int, int], int] = {}  # tensor id of each (meta id, offset), the first one used first
        self._written: set[int] = set()
        # If it is watched: a number of 64 bits that identifies its content as of the last captured write or import.
        self.content: int | None = None

    def find(self, meta: int, offset: int) -> int:
        """The tensor id of a view; 0 if it has none yet."""
        return self._views.get((meta, offset), 0)

    def view(self, meta: int, offset: int) -> int:
        """The tensor id of a view; a new one, which is defined, if it has none yet."""
        number = self._views.get((meta, offset))
        if number is None:
            number = self._views[meta, offset] = self._session.define_tensor(self._storage, offset, meta)
        return number

    def views(self) -> list[tuple[int, int, int]]:
        """Meta id, offset and tensor id of each view, the first one used first."""
        return [(*place, tensor) for place, tensor in self._views.items()]

    def written(self) -> list[tuple[int, int, int]]:
        """Tensor id, meta id and offset of each view that recorded ops wrote in place since `clear_written`, by tensor
        id."""
        if not self._written:
            return []
        return sorted((tensor, *place) for place, tensor in self._views.items() if tensor in self._written)

    def clear_written(self) -> None:
        self._written.clear()

    def note_written(self, tensor: int) -> None:
        self._written.add(tensor)

    def offer(self, length: int, new_views: bool) -> None:
        """The hot path may take it, as long as it has `length` bytes; `new_views`: by other views than so far."""

    def withdraw(self) -> None:
        """The hot path leaves each use to the complete path."""

    def watch(self) -> None:
        """The hot path may take it, and compares it at each use with what it holds now."""

    def forget(self) -> None:
        """Nothing of it is known any more."""

    def unmark(self) -> None:
        """It was imported again: what was written unseen until then does not matter any more."""


class CompletePath:
    """In place of a native `GeneratedKernel`: all calls of the kernel take the complete path."""

    def caller(self, kernel: Any, original: Any, complete: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in for a function of generated code. `kernel`: as the complete path knows it."""
        return complete

    def learn(self, args: tuple[Any, ...], signature: int) -> None:
        """A call on the complete path has a record with this signature."""


class Session:
    """Of one capture. Callers hold the recorder's lock."""

    hot = False  # whether calls may be recorded without Python, where that is possible
    release_head = 0  # the first word of rows that tell the death of storages
    watches = False  # whether it compares the content of watched storages itself
    drains = False  # whether it is time to look for dead storages that were created on the hot path
    grad_mode = True  # the one that the stream states

    def __init__(self) -> None:
        self.rows, self.new_storages, self.definitions = RowList(), RowList(), RowList()
        self.new_metas = RowList()  # in order of their ids: codes of dtype and device, kind, sizes, strides
        self._next_tensor = itertools.count(1)
        self.flushing = Flushing()
        self._metas: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []  # by id, from 1 on
        self._meta_ids: dict[tuple[int, ...], int] = {}

    # -------------------------------------------------------------------------------------------------------- storages

    def add_storage(self, length: int, device_id: int, origin: int, payload: int) -> int:
        """A new storage's id. Ids are those of the rows, in turn: no exception comes between them."""
        number = self.new_storages.dropped + len(self.new_storages) + 1
        self.new_storages.append(_pack_storage(number, length, device_id, origin, payload))
        return number

    def define_tensor(self, storage: int, offset: int, meta: int) -> int:
        """A new tensor's id."""
        number = next(self._next_tensor)
        self.definitions.append(pack_definition(number, storage, offset, meta))
        return number

    def track(self, address: int, number: int, length: int) -> Entry:
        """A storage that a tracker knows from now on: its address (`_cdata`), id and bytes. Uses take the complete path
        until it is offered."""
        return Entry(self, number)

    def adopt(self, address: int) -> tuple[Entry, int, int, bytes | None, bool] | None:
        """A storage that was created on the hot path and has no tracker yet: its entry, id and bytes, a sample of its
        memory as it was then if nothing was written to it since, and whether generated code allocated it. None for any
        other."""
        return None

    def unadopted(self) -> list[torch.UntypedStorage]:
        """Those that are alive."""
        return []

    def overlapping(self, begin: int, end: int) -> list[torch.UntypedStorage]:
        """Those of them that hold any of these bytes of host memory."""
        return []

    def dead(self) -> list[int]:
        """The ids of those that died since the last time."""
        return []

    def being_written(self) -> list[int]:
        """The addresses of storages that ops on the hot path are writing now."""
        return []

    @staticmethod
    def content_hash(address: int, length: int) -> int:
        """A number that identifies the content of host memory."""
        return xxhash.xxh3_64_intdigest(memory_at(address, length))

    @staticmethod
    def allocated(address: int) -> bool:
        """Whether PyTorch's own allocator is known to have given a storage its memory, on the host."""
        return False

    def clear(self) -> None:
        """The capture has ended."""

    def forked(self) -> None:
        """In a forked child: other threads, which it does not have, may have been in the middle of something."""

    # -------------------------------------------------------------------------------------------------------- metadata

    def define_meta(
        self,
        dtype: torch.dtype,
        device: torch.device,
        flags: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        dtype_code: int,
        device_id: int,
    ) -> int:
        """The id of metadata. `dtype_code`, `device_id`: the file's for its dtype and device."""
        words = (dtype_code, device_id, flags << FLAG_BITS, *sizes, *strides)
        number = self._meta_ids.setdefault(words, len(self._metas) + 1)
        if number > len(self._metas):
            self._metas.append((dtype, tuple(sizes), tuple(strides), flags))
            self.new_metas.append(Struct(f"<{len(words)}q").pack(*words))
        return number

    def meta_of(self, tensor: torch.Tensor) -> int:
        """The id of a plain tensor's metadata; 0 if that is not looked up here."""
        return 0

    def meta(self, number: int) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
        """Dtype, sizes, strides and flags of metadata."""
        return self._metas[number - 1]

    # ----------------------------------------------------------------------------------------- rows, and what they need

    def append_op(self, row: bytes) -> int:
        """Add the row of an op that ran in the calling thread. Returns how many rows that took."""
        self.rows.append(row)
        return 1

    def state_grad_mode(self, signatures: Sequence[int], context: int, now: int) -> int:
        """State the calling thread's. `signatures`: of the records that state each. Returns how many rows that took."""
        self.grad_mode = torch.is_grad_enabled()
        self.rows.append(_pack_head(signatures[self.grad_mode], context, now, 0))
        return 1

    def settle(self) -> None:
        """The stream states the settings as they are."""

    def unsettle(self) -> None:
        """It is about to state others."""

    def note_drawn(self, as_replayed: bool) -> None:
        """Whether the default generator of the CPU is where a replay's will be."""

    def drawn_state(self) -> torch.Tensor | None:
        """The state in which a replay's will be, if ops on the hot path draw from it."""
        return None

    def set_context(self, ident: int, context: int) -> None:
        """The context id of a thread; -1: it has none."""

    def watch_streams(self, device: torch.device) -> None:
        """Work on other streams of a device than its default one takes the complete path."""

    def cover(self, enter: int, leave: int) -> None:
        """The addresses of what to call around work that is recorded as a whole."""

    # -------------------------------------------------------------------------------------------------- generated code

    def noted_region(
        self, signature: int, writes: Sequence[int] | None, mark: Callable[[Any], bool]
    ) -> Callable[..., Any] | None:
        """Runs a compiled region and records its call, or returns NotImplemented; None: the complete path alone does.
        `signature`: of its record. `writes`: the arguments that it may write (None: any); `mark` is told of each."""
        return None

    def generated_kernel(self, schema: str, writes: Sequence[int], watches: Sequence[int]) -> CompletePath:
        """A kernel of generated code: its schema, what it writes, the settings that it depends on."""
        return CompletePath()

    def allocator(
        self, kernel: Any, original: Any, complete: Callable[..., Any], device: str, pinned: bool
    ) -> Callable[..., Any] | None:
        """What stands in for a function by which generated code allocates; None: `complete` does."""
        return None
