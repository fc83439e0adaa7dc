"""How the recorder is attached to a thread: as a dispatch mode on its mode stack, or as a key of the dispatcher.

`NextStep` makes a thread that is already running call one of our functions at its next step in Python, by its state in
CPython. With the key, a capture may turn off PyTorch's RecordFunction callbacks in its thread; `DOORS` are the
functions that tell who else needs them.
"""

from __future__ import annotations

import _thread
import ctypes
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, takewhile, tee
from operator import truth
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch
from torch._C import _pop_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.collector import collector_paused
from replayfmt.native.hook import DispatchHook, loaded_hook
from replayfmt.native.watching import settle

from ..capture_session import CaptureSession
from ..dispatch.mode import RecordingMode, mode_stack, remove_finished_modes, remove_mode, remove_mode_at, set_modes
from ..dispatch.native_mode import NativeMode
from ..patches import Patch, PatchSet, around

_HANDLER = RecordingMode.__torch_dispatch__.__code__
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
    with collector_paused():  # it would run code of the program
        addresses, same, again = tee(_addresses(), 3)
        found = list(zip(addresses, map(_id_of, same), map(_copy, again, repeat(_WORDS * _WORD_BYTES)), strict=True))
        # C threads create their states without the GIL, under a lock that this call takes: from here on, the states
        # found are complete. (Older interpreters let the collector run under that lock.)
        sys._current_frames()
    return [ThreadState(address, number, memoryview(words).cast("P")) for address, number, words in found]


def _addresses() -> Iterator[int]:
    """The addresses of all threads' states. A state may be freed whenever another thread runs, which can happen between
    any two Python steps. This iterator, and everything built on it, takes no Python step: it is C code throughout."""
    steps = chain(map(_newest, (_interpreter(),)), repeat(None))
    return takewhile(truth, accumulate(steps, _next))


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
    with collector_paused():
        given.extend(map(slot.setter, matches, repeat(function), repeat(argument)))
    return bool(given)


def _words(state: int) -> Any:
    """The words of the calling thread's own state."""
    return (ctypes.c_void_p * _WORDS).from_address(state)


_OF_AUTOGRAD = (
    "_enable_profiler",
    "_enable_profiler_legacy",
    "_enable_record_function",
    "_prepare_profiler",
    "_set_empty_test_observer",
    "_toggle_collection_dynamic",
)
_OF_PROFILER = ("_add_execution_trace_observer", "_enable_execution_trace_observer")

# Every function of Python's that registers callbacks, or turns RecordFunction on or off, by module, under each name by
# which PyTorch's own modules call it.
DOORS: dict[str, tuple[str, ...]] = {
    "torch._C": ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy", "_xpu_recordMemoryHistory"),
    "torch._C._autograd": _OF_AUTOGRAD,
    "torch.autograd": _OF_AUTOGRAD,
    "torch.autograd.profiler": _OF_AUTOGRAD,
    "torch.autograd.profiler_legacy": _OF_AUTOGRAD,
    "torch._C._profiler": _OF_PROFILER,
    "torch.profiler.profiler": _OF_PROFILER,
}


def guards_exist() -> bool:
    """Whether compiled code may exist, whose guards are looked through inside a RecordFunction (thread_watch.cpp)."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    compiled = getattr(getattr(frames, "input_codes", None), "seen", True)
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None)
    return bool(compiled) or backends is None or any(map(callable, backends.values()))


_KEYS_PUT_BACK = (
    "something put the dispatch keys of the thread that ends the capture back to what they were before it began: the "
    "work since then is not recorded. Begin the capture outside of what did that"
)
_CLOSED_LATE = (
    "the recorder ended with the interpreter, before the capture was closed: what atexit functions computed since then "
    "is not recorded. Close the capture before the program's end, or record with opreplay-capture"
)


class ThreadAttachment(Protocol):
    """The recorder's presence in the threads of one capture. Methods are about the calling thread, unless they say
    otherwise."""

    mode: RecordingMode
    opened: Callable[[], None]  # set by its owner: called before the thread may start an observer of PyTorch's

    def may_be_quiet(self) -> bool:
        """Whether the thread needs no RecordFunction callback of the recorder's."""

    def begin(self) -> None:
        """The thread participates, as the first one."""

    def end(self) -> None:
        """The thread stops participating, and what `begin` did to the process is undone."""

    def joined(self) -> bool:
        """Whether the thread participates."""

    def lost(self) -> str:
        """Why the thread, which should participate, does not any more; "" if it does."""

    def join(self) -> None:
        """The thread participates from now on. Takes no lock: the thread may be anywhere."""

    def leave(self) -> None:
        """The thread stops participating."""

    def show(self) -> None:
        """The thread participates: tell the watch on threads, which cannot always see it."""

    def renew(self) -> None:
        """The thread participates, but its dispatch keys may be those of a moment when it did not."""

    def forked(self) -> None:
        """In a forked child: end, without taking a lock."""

    def mode_now(self) -> RecordingMode | None:
        """The mode that records the thread now, if any: None inside an op or while paused."""

    def sees_first(self) -> bool:
        """Whether only the recorder sees what the thread calls now: no mode of the program does, before or after it."""

    def paused(self) -> AbstractContextManager[None]:
        """The recorder does not see what the thread calls inside."""

    def hidden(self) -> AbstractContextManager[None]:
        """Likewise, and neither does an operator's observer."""


class ModeAttachment:
    """By a dispatch mode."""

    opened: Callable[[], None]

    def __init__(self, core: CaptureSession, mode: RecordingMode) -> None:
        self._core = core
        self.mode = mode
        self._entered = False

    def may_be_quiet(self) -> bool:
        return False

    def show(self) -> None:
        self._core.thread_watch.take_part(True)

    def renew(self) -> None:
        set_modes(mode_stack())

    def begin(self) -> None:
        _inference.begin(self._core)
        self.mode.__enter__()
        self._entered = True
        mode_stack()  # the first call takes a lock of the C library, which may stay locked forever in a forked child

    def end(self) -> None:
        if self._entered:
            stack = [mode for mode in mode_stack() if mode is not self.mode]
            set_modes([self.mode])
            self.mode.__exit__(None, None, None)  # also undoes the process-wide effects of entering it
            set_modes(stack)
        _inference.end()

    def joined(self) -> bool:
        return any(isinstance(mode, RecordingMode) and mode.core is self._core for mode in mode_stack())

    def _handles_an_op(self) -> bool:
        """Whether the thread is inside the mode, which PyTorch takes off the stack until it returns. A thread may be
        asked to join at any step, also there; with the mode twice it would take itself for one of the program's."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _HANDLER and frame.f_locals["self"].core is self._core:
                return True
            frame = frame.f_back
        return False

    def lost(self) -> str:
        return "" if torch._C._dispatch_tls_local_include_set().has(torch._C.DispatchKey.Python) else _KEYS_PUT_BACK

    def join(self) -> None:
        if not self._handles_an_op():
            set_modes([self.mode, *mode_stack()])  # as the outermost of the thread's modes

    def leave(self) -> None:
        remove_finished_modes()
        remove_mode(self.mode)

    def forked(self) -> None:
        leave_finished()
        _inference.end()

    def mode_now(self) -> RecordingMode | None:
        return _told(self._core)

    def sees_first(self) -> bool:
        stack = mode_stack()
        return len(stack) == 1 and isinstance(stack[0], RecordingMode) and stack[0].core is self._core

    @contextmanager
    def paused(self) -> Iterator[None]:
        core = self._core
        mode = self.mode_now()
        stack = core.attempt(mode_stack)
        if mode is None or stack is None:
            yield
            return
        try:
            core.attempt(remove_mode_at, stack.index(mode))
            with core.thread_watch.covered():
                yield
        finally:
            _put_back(core, stack)

    def hidden(self) -> AbstractContextManager[None]:
        return _without_modes(self._core)


class HookAttachment:
    """By the hook below autograd. (Inside an observed operator, by the mode that observes it.)"""

    opened: Callable[[], None]

    def __init__(self, core: CaptureSession, hook: DispatchHook) -> None:
        self._core = core
        self._hook = hook
        self._native = NativeMode(core, hook)
        self.mode: RecordingMode = self._native
        self._patches = PatchSet(
            [
                Patch("torch._ops", "_compute_keyset", around(self._without_key)),
                # Who gives a thread other sets of keys (those of a forward pass, for its backward) leaves the recorder
                # in.
                Patch("torch._C", "_ForceDispatchKeyGuard", self._hook.key_guard),
                Patch("torch._dynamo.guards", "CheckFunctionManager.__init__", around(self._looked_through)),
                # Of code compiled ahead of time, which looks through them by itself.
                Patch("torch._dynamo.guards", "GuardManagerWrapper.check", around(self._away)),
                Patch("torch._dynamo.guards", "GuardManagerWrapper.check_verbose", around(self._away)),
                *[Patch(module, name, around(self._loud)) for module, names in DOORS.items() for name in names],
            ]
        )

    def may_be_quiet(self) -> bool:
        return not guards_exist()

    def begin(self) -> None:
        self._patches.install()
        self._hook.begin(self._native.functions(), self._core.session, self._core.thread_watch.shared())
        self._hook.include(True)

    def end(self) -> None:
        self._hook.end()
        self._hook.include(False)
        self._patches.remove()

    def show(self) -> None:
        pass

    def renew(self) -> None:
        self._hook.include(True)

    def joined(self) -> bool:
        return self._hook.included()

    def lost(self) -> str:
        if self._hook.included():
            return ""
        return _KEYS_PUT_BACK if self._hook.active() else _CLOSED_LATE

    def join(self) -> None:
        self._hook.include(True)

    def leave(self) -> None:
        self._hook.include(False)

    def forked(self) -> None:
        self._core.session.forked()
        self.end()

    def mode_now(self) -> RecordingMode | None:
        return self._native if self._hook.sees() else _told(self._core)

    def sees_first(self) -> bool:
        return self._hook.sees() and not mode_stack()

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self.mode_now() is None:
            yield
            return
        with self.hidden():
            yield

    @contextmanager
    def hidden(self) -> Iterator[None]:
        with self._hook.hidden(), _without_modes(self._core):
            yield

    def _without_key(self, original: Callable[..., Any], args: Any, kwargs: Any, keys: Any) -> Any:
        """Higher-order operators, which are dispatched in Python, find the same kernel as without the recorder."""
        return original(args, kwargs, self._hook.without_key(keys))

    def _away(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Guards of compiled code are created and looked through without the key (by Dynamo: thread_watch.cpp)."""
        included = self._hook.include(False)
        try:
            with self._core.thread_watch.covered():
                return original(*args, **kwargs)
        finally:
            self._hook.include(included)

    def _looked_through(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Guards are created, which Dynamo looks through from now on: thread_watch.cpp is to be called then."""
        self._core.attempt(self.opened)
        return self._away(original, *args, **kwargs)

    def _loud(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Who registers a RecordFunction callback here finds RecordFunction as it is without a capture."""
        self._core.attempt(self.opened)
        return original(*args, **kwargs)


@contextmanager
def _without_modes(core: CaptureSession) -> Iterator[None]:
    """Inside, the calling thread has no mode of a capture."""
    stack = core.attempt(mode_stack) or []
    kept = [mode for mode in stack if not (isinstance(mode, RecordingMode) and mode.core is core)]
    if len(kept) == len(stack):
        with core.thread_watch.covered():
            yield
        return
    try:
        core.attempt(set_modes, kept)
        with core.thread_watch.covered():
            yield
    finally:
        if not core.closed:  # or the capture ended meanwhile, and has no modes any more
            _put_back(core, stack)


def _put_back(core: CaptureSession, stack: list[Any]) -> None:
    """A signal handler may raise in the middle; then try again."""
    try:
        core.attempt(set_modes, stack)
    except BaseException:
        core.attempt(set_modes, stack)
        raise


class _InferenceMode:
    """Threads inside `torch.inference_mode()` with a mode of a capture. At its end PyTorch puts the thread's dispatch
    keys back, those for modes included. If the mode is gone by then, every operator would fail from there on."""

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()  # how often, by the thread's ident
        self._in_use = False
        self._core: CaptureSession | None = None  # of the last capture
        self._patches = PatchSet(
            [
                Patch("torch._C", "_InferenceMode.__enter__", around(self._entering)),
                Patch("torch._C", "_InferenceMode.__exit__", around(self._leaving)),
            ]
        )

    def begin(self, core: CaptureSession) -> None:
        if not self._inside:
            self._patches.install()
        self._core, self._in_use = core, True

    def end(self) -> None:
        """It ends. Threads that are inside may take longer."""
        self._in_use = False
        self._remove_unused()

    def _entering(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._inside[get_ident()] += 1
        return original(*args, **kwargs)

    def _leaving(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if get_ident() in self._inside and self._core is not None:
                self._core.attempt(self._left)

    def _left(self) -> None:
        set_modes([*mode_stack(), TorchDispatchMode()])
        _pop_torch_dispatch_stack(None)
        self._inside[get_ident()] -= 1
        self._remove_unused()

    def _remove_unused(self) -> None:
        self._inside = +self._inside
        if not self._inside and not self._in_use:
            self._patches.remove()


_inference = _InferenceMode()


def leave_finished() -> bool:
    """The calling thread leaves captures that are over. Returns whether there were any."""
    settle()
    hook = loaded_hook()
    left = hook is not None and hook.leave_finished()
    return remove_finished_modes() or left


def _told(core: CaptureSession) -> RecordingMode | None:
    """The mode on the thread's stack that records, if one does."""
    for mode in core.attempt(mode_stack) or ():
        if isinstance(mode, RecordingMode) and mode.core is core:
            return mode if mode.told else None
    return None
