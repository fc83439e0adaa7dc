"""Watches the threads that do not participate in the recording: the Python side of thread_watch.cpp.

PyTorch calls the library before each operator of every thread. Threads that participate say so here, or have the
dispatch mode on their stack; nothing is done for them. In other threads the operators are counted, and the recorder
reports them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .building import NotAvailable, library, say

_AT_ONCE = 64  # threads returned by one call


class _Counted(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_uint64),
        ("id", ctypes.c_int64),
        ("takes_part", ctypes.c_int64),
        ("name", ctypes.c_char * 64),
        ("first", ctypes.c_char * 192),
    ]


@dataclass(frozen=True)
class Unseen:
    """The operators that one thread ran. `operators`: how many, without those called inside others; `first`: the name
    of the first. `takes_part`: others of it are recorded."""

    thread: str
    operators: int
    first: str
    takes_part: bool = False

    @property
    def reason(self) -> str:
        """Of its unsupported record."""
        return "unseen_work" if self.takes_part else "unseen_thread"

    def sentence(self) -> str:
        """What happened, and what to do about it."""
        ran = f"{self.operators:,} operators" if self.operators != 1 else "an operator"
        if self.takes_part:
            return (
                f"the thread {self.thread} ran {ran} or more with dispatch keys that leave the recorder out, under a "
                f"guard of C++ code: {self.first} was found first. Nothing of this is recorded"
            )
        return (
            f"the thread {self.thread} ran {ran} in C++ code, where the recorder does not take part: {self.first}"
            f"{' first' if self.operators != 1 else ''}. Nothing of this is recorded: have a thread that Python "
            "started make these calls"
        )


class ThreadWatch:
    """The watch of one capture. `state` is recorded in its session: `native`, `off`, or `none` and the reason. Without
    the library nothing here has any effect; `problem` says why it is not available."""

    def __init__(self, found: ctypes.PyDLL | None, state: str, problem: NotAvailable | None = None) -> None:
        self.state = state
        self.problem = problem
        self._library = found
        self._watching = False

    def begin(self, mode: Any, may_be_quiet: bool = False) -> None:
        """Start counting. `mode`: the capture's dispatch mode. `may_be_quiet`: the calling thread participates by the
        hook, and nobody else needs RecordFunction callbacks in it now: if there are none, PyTorch's RecordFunction is
        turned off in it until `loud`, because calling ours there would be for nothing."""
        if self._library is not None:
            _children.share(self._library)
            self._library.opreplay_watch_begin(ctypes.c_void_p(id(mode)), int(may_be_quiet))
            self._watching = True

    def ran_in_child(self, pid: int) -> bool | None:
        """Whether a forked child has run an operator; None if that is not known."""
        return None if self._library is None else _children.ran(pid)

    def loud(self) -> bool:
        """Turn RecordFunction on again, in the calling thread at once, and in others at their next `settle` or
        operator. Returns whether it was off."""
        return self._library is not None and bool(self._library.opreplay_watch_loud())

    def look(self) -> None:
        """Notice callbacks that were registered from C++ code alone while RecordFunction was off, and turn it on for
        them. What others' callbacks did not see is told on stderr."""
        if self._library is None or not self._watching:
            return
        if self._library.opreplay_watch_overlooked():
            self.loud()
            say(
                "C++ code registered a RecordFunction callback during the capture: the callback sees the program's "
                "operators from now on, and those since it was registered only in part (the capture is complete; "
                "--recorder=python turns RecordFunction off nowhere)"
            )
        missed = self._library.opreplay_watch_missed()
        if missed:
            say(
                "an observer of PyTorch's (a RecordFunction callback) that was started during a backward pass did not "
                f"see {missed:,} of that pass's operators, nor the nodes that they begin (the capture is complete; "
                "start it outside of the pass, or record with --recorder=python)"
            )

    def shared(self) -> int:
        """The address of what the library shares with the hook; 0 without the library."""
        return 0 if self._library is None else int(self._library.opreplay_watch_shared())

    def end(self) -> None:
        """Idempotent."""
        if self._library is not None and self._watching:
            self.look()
            self._watching = False
            self._library.opreplay_watch_end()

    def forked(self) -> None:
        """In a forked child. Takes no lock."""
        if self._library is not None and self._watching:
            self._watching = False
            self._library.opreplay_watch_forked()

    def note_termination(self) -> None:
        """Have it noted when SIGTERM comes, until another handler is set for it."""
        if self._library is not None:
            self._library.opreplay_watch_termination()

    def terminated_ns(self) -> int:
        """How long ago SIGTERM came; 0: it did not, or that is not known."""
        return 0 if self._library is None else int(self._library.opreplay_watch_terminated())

    def take_part(self, takes: bool) -> None:
        """Set whether the operators of the calling thread are recorded by a mode, or are the recorder's own. (That they
        are recorded by the hook is seen.)"""
        if self._library is not None and self._watching:
            self._library.opreplay_watch_take_part(int(takes))

    def also(self, mode: Any) -> Any:
        """Threads with this dispatch mode participate, too, in place of those with another one that was given here
        (None: of no other). Returns what was before, for here."""
        if self._library is None or not self._watching:
            return None
        address = mode if mode is None or isinstance(mode, int) else id(mode)
        return self._library.opreplay_watch_also(ctypes.c_void_p(address))

    @contextmanager
    def covered(self) -> Iterator[None]:
        """The operators that the calling thread runs inside belong to something that is recorded as a whole."""
        if self._library is None:
            yield
            return
        self._library.opreplay_watch_enter()
        try:
            yield
        finally:
            self._library.opreplay_watch_leave()

    def tell_how_to_cover(self, session: Any) -> None:
        """Have a `Session` of session.h do around work what `covered` does."""
        if self._library is not None:
            functions = (self._library.opreplay_watch_enter, self._library.opreplay_watch_leave)
            session.cover(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))

    def has_counted(self) -> bool:
        """Whether there is anything to collect."""
        return self._library is not None and self._watching and self._library.opreplay_watch_collect(None, 0) > 0

    def running(self) -> bool:
        """Whether a thread that does not take part is inside an operator that began while the watch was on."""
        return self._library is not None and self._watching and bool(self._library.opreplay_watch_running())

    def collect(self) -> list[Unseen]:
        """What was counted since the last call, by thread."""
        if self._library is None or not self._watching:
            return []
        found: list[Unseen] = []
        counted = (_Counted * _AT_ONCE)()
        number = _AT_ONCE + 1
        while number > _AT_ONCE:
            number = self._library.opreplay_watch_collect(counted, _AT_ONCE)
            found += [
                Unseen(_name(entry), entry.count, entry.first.decode(errors="replace"), bool(entry.takes_part))
                for entry in counted[: min(number, _AT_ONCE)]
            ]
        return found


class _Children:
    """Memory that this process shares with the children that it forks: see `opreplay_watch_children`."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 * mmap.PAGESIZE)
        self._words = (ctypes.c_int64 * (len(self._memory) // 8)).from_buffer(self._memory)

    def share(self, library: ctypes.PyDLL) -> None:
        library.opreplay_watch_children(self._words, ctypes.c_uint64(len(self._words)))

    def ran(self, pid: int) -> bool | None:
        for place in range(1, min(2 * self._words[0], len(self._words) - 2), 2):
            if self._words[place] == pid:
                return bool(self._words[place + 1])
        return None


_children = _Children()


def thread_watch(choice: str) -> ThreadWatch:
    """The watch for a capture. `choice`: `auto` builds the library if the cache has none, `off` does without it."""
    if choice == "off":
        return ThreadWatch(None, "off")
    found = _found()
    if isinstance(found, NotAvailable):
        return ThreadWatch(None, f"none: {found.reason}", found)
    return ThreadWatch(found, "native")


def settle() -> None:
    """Turn RecordFunction on in the calling thread, where a capture turned it off and `loud` was called since then."""
    if _loaded is not None:
        _loaded.opreplay_watch_settle()


_loaded: ctypes.PyDLL | None = None


@functools.cache
def _found() -> ctypes.PyDLL | NotAvailable:
    """Looked for once."""
    global _loaded
    try:
        _loaded = library("thread_watch.cpp")
        _loaded.opreplay_watch_shared.restype = ctypes.c_void_p
        _loaded.opreplay_watch_terminated.restype = ctypes.c_int64
        _loaded.opreplay_watch_also.restype = ctypes.c_void_p
        return _loaded
    except NotAvailable as problem:
        return problem


def _name(counted: _Counted) -> str:
    """A thread's name: Python's if it knows the thread, else the system's."""
    # `threading.enumerate` takes a lock, which may be held by a thread that waits for this one.
    known = getattr(threading, "_active", {})
    names = [thread.name for thread in known.copy().values() if thread.native_id == counted.id]
    name = names[0] if names else counted.name.decode(errors="replace")
    return f"{name} (id {counted.id})"
