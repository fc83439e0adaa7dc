"""Other threads' states in CPython: makes each thread call one of our functions at its next step in Python.

A thread that waits in a queue cannot be given work. But CPython keeps a profile and a trace function in the state of
each thread, and calls them before the next call, return or line, whatever the thread was doing. Debuggers set them on
all threads in the same way. Python 3.13 does not allow setting another thread's trace function: there, a thread
responds at its next call or return, not at its next line. Functions that others have set are left alone. Imports no
torch.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, takewhile, tee
from operator import truth
from typing import Any

_python = ctypes.pythonapi
_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_WORDS = 32  # words of a thread's state to read: the profile and trace functions are among them
_TracerType = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_start_new_thread = _thread.start_new_thread


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of CPython's API; None if this interpreter does not export it."""
    function = getattr(_python, name, None)
    if function is not None:
        function.restype, function.argtypes = result, arguments
    return function


_current = _function("PyThreadState_Get", ctypes.c_void_p)
_interpreter = _function("PyInterpreterState_Get", ctypes.c_void_p)
_newest = _function("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)
_next = _function("PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p)
_id_of = _function("PyThreadState_GetID", ctypes.c_uint64, ctypes.c_void_p)
_copy = _function("PyBytes_FromStringAndSize", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
_SETTER = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_setters = [_function(name, *_SETTER) for name in ("_PyEval_SetProfile", "_PyEval_SetTrace")]
_has_lists = None not in (_current, _interpreter, _newest, _next, _id_of)


def own_id() -> int:
    """The id of the calling thread's state. It is never reused, unlike its address or the thread's ident."""
    return int(_id_of(_current())) if _has_lists else 0


@dataclass(frozen=True)
class ThreadState:
    """A snapshot of one thread's state. `words`: its first words, as integers."""

    address: int
    id: int
    words: memoryview


def thread_states() -> list[ThreadState]:
    """All threads that Python knows now. Empty if this interpreter does not expose them."""
    if not _has_lists:
        return []
    with undisturbed():
        addresses, same, again = tee(_addresses(), 3)
        found = list(zip(addresses, map(_id_of, same), map(_copy, again, repeat(_WORDS * _WORD_BYTES)), strict=True))
    # C threads create their states without the GIL, under a lock that this call takes: from here on, the states found
    # are complete.
    sys._current_frames()
    return [ThreadState(address, number, memoryview(words).cast("P")) for address, number, words in found]


def _addresses() -> Iterator[int]:
    """The addresses of all threads' states. A state may be freed whenever another thread runs, which can happen between
    any two Python steps. This iterator, and everything built on it, takes no Python step: it is C code throughout."""
    steps = chain(map(_newest, (_interpreter(),)), repeat(None))
    return takewhile(truth, accumulate(steps, _next))


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside, because it runs code of the program."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Slot:
    """Where a thread's state keeps a function: its setter, and the words that hold it and its argument."""

    setter: Any
    function: int
    argument: int

    def held(self, words: Any) -> int | None:
        """The address of the function that is set."""
        return words[self.function] or words[self.argument] or None


class NextStep:
    """Calls `function` in other threads, each at its next step. One per process: threads may keep it for a long time.

    `function` returns whether it is done; if not, it is called again at the following step. Its exceptions are raised
    in the thread at its next step.
    """

    def __init__(self, function: Callable[[], bool]) -> None:
        self._function = function
        self._tracer = _TracerType(self._step)
        self._address = ctypes.cast(self._tracer, ctypes.c_void_p).value
        self._argument = object()
        self._calibrating = True
        self._slots: list[_Slot] = []
        self._ident_word: int | None = None
        if _has_lists:
            self._calibrate()
        self._calibrating = False

    @property
    def available(self) -> bool:
        """Whether this interpreter allows setting functions on other threads."""
        return bool(self._slots)

    def set(self, state: ThreadState) -> bool:
        """Set the function on a thread. False: the thread is gone, or functions set by others are in the way."""
        done = False
        for slot in self._slots:
            held = slot.held(state.words)
            done = (held is None and _give(slot, state, self._address, id(self._argument))) or done
            done = done or held == self._address
        return done

    def ident(self, state: ThreadState) -> int | None:
        """The thread's ident; None if it is not known where this interpreter keeps it."""
        return None if self._ident_word is None else state.words[self._ident_word]

    def is_blocked(self, state: ThreadState) -> bool:
        """Whether functions set by others are in the way in all places."""
        return all(slot.held(state.words) not in (None, self._address) for slot in self._slots)

    def clear(self, state: ThreadState) -> None:
        """Remove the function from a thread."""
        for slot in self._slots:
            if slot.held(state.words) == self._address:
                _give(slot, state, None, None)

    def _step(self, _argument: Any, _frame: Any, _event: int, _value: Any) -> int:
        # No exception may leave this function: the interpreter's behaviour would be undefined, and ends the process.
        if self._calibrating:
            return 0
        later: BaseException | None = None
        try:
            # First, because another thread may set them again while the function runs, for the next step.
            self._replace(self._address, None, None)
        except Exception:
            return 0  # it is tried again at the thread's next step
        except BaseException as error:
            later = error
        try:
            if not self._function():
                self._replace(None, self._address, id(self._argument))
        except BaseException as error:
            later = error
        if later is not None:
            _raise_at_next_step(later)
        return 0

    def _replace(self, held: int | None, function: int | None, argument: int | None) -> None:
        """Put another function in the place of the one that the calling thread has."""
        state = _current()
        for slot in self._slots:
            if slot.held(_words(state)) == held:
                slot.setter(state, function, argument)

    def _calibrate(self) -> None:
        """Find the words, in a separate thread: the program may have set functions for this one."""
        done = _thread.allocate_lock()
        done.acquire()
        _start_new_thread(self._find_slots, (done,))
        done.acquire()

    def _find_slots(self, done: Any) -> None:
        try:
            state, mine = _current(), {self._address, id(self._argument)}
            words = list(_words(state))
            self._ident_word = words.index(_thread.get_ident()) if _thread.get_ident() in words else None
            for setter in filter(None, _setters):
                setter(state, self._address, id(self._argument))
                words = list(_words(state))
                setter(state, None, None)
                if mine <= set(words):
                    self._slots.append(_Slot(setter, words.index(self._address), words.index(id(self._argument))))
        finally:
            done.release()


def how_it_ran(native_id: int) -> str | None:
    """Text that changes whenever a thread runs; None while it runs or could, or if the system does not tell. A thread
    that waits for the interpreter's lock wakes every few milliseconds."""
    try:
        with open(f"/proc/self/task/{native_id}/status", encoding="utf-8", errors="replace") as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        switches = lines["voluntary_ctxt_switches"] + lines["nonvoluntary_ctxt_switches"]
    except (OSError, KeyError):
        return None
    return None if lines["State"][0] == "R" else switches


def _raise_at_next_step(error: BaseException) -> None:
    """Make the calling thread raise an exception: what a Python tracer raises is raised in the traced code."""

    def tracer(_frame: Any, _event: str, _value: Any) -> None:
        raise error

    if sys.getprofile() is None:
        sys.setprofile(tracer)
    else:
        sys.settrace(tracer)


def _give(slot: _Slot, state: ThreadState, function: int | None, argument: int | None) -> bool:
    """Set a function on a thread that may have ended. Returns whether it was still there."""
    matches = filter(state.address.__eq__, _addresses())
    given: deque[int] = deque(maxlen=1)
    with undisturbed():
        given.extend(map(slot.setter, matches, repeat(function), repeat(argument)))
    return bool(given)


def _words(state: int) -> Any:
    """The words of the calling thread's own state."""
    return (ctypes.c_void_p * _WORDS).from_address(state)
