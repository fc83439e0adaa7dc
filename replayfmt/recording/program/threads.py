"""The threads of the program under capture: every thread participates, whenever and however it was started.

A dispatch mode sees the operators of one thread. Threads that Python code starts carry it from their first step.
Threads that existed before the capture get it at their next step (thread_attachment.py), and so do threads that C code
creates, once they enter Python: if one of these turns out to run operators, an unsupported record says that it may have
run others before. The work of a thread that never enters Python is not seen here. When the capture ends, every thread
drops the mode at its next step.

The worker threads of autograd need not join: PyTorch gives each the dispatch state of the thread whose backward pass it
runs. (A worker is in a pass at nearly every step, and would be asked at each.)
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import _engine_run_backward as _run_backward

from replayfmt.collector import collector_paused

from ..content.first_content import DIGESTING
from ..frames import is_interrupt, leave_no_frames
from ..patches import Patch, PatchSet, around
from .thread_attachment import NextStep, ThreadAttachment, how_it_ran, leave_finished, own_id, thread_states

if TYPE_CHECKING:
    from ..capture_session import CaptureSession

# Every Python function that starts a thread, under each name by which modules call it.
_STARTERS = (
    ("_thread", "start_new_thread"),
    ("_thread", "start_new"),
    ("_thread", "start_joinable_thread"),  # Python 3.13 and later
    ("threading", "_start_new_thread"),
    ("threading", "_start_joinable_thread"),
)
_WAITING_S = 0.05  # a thread that has not run for so long waits for something, and joins when it goes on
_LONGEST_JOINING_S = 3.0
_PATIENCE = 10_000  # steps allowed to a thread that is to leave while something has set the mode aside


class HiddenThread:
    """A thread of the recorder's own. The `threading` module does not know it: a program may wait for every thread that
    is listed there."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._over = _thread.allocate_lock()
        self._ident = 0

    def start(self) -> None:
        self._over.acquire()
        self._ident = _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._over.release()

    def join(self, timeout_s: float) -> None:
        """Wait until it is over; not from within, nor for one that was not started."""
        if self._ident not in (0, get_ident()) and self._over.acquire(timeout=timeout_s):
            self._over.release()


class Threads:
    """The threads of one capture. Made, installed and removed by the recorder."""

    def __init__(self, presence: ThreadAttachment, core: CaptureSession) -> None:
        self._presence = presence
        self.core = core
        self._handled: set[int] = set()  # by state id: threads that carry the mode, were asked to, or must not
        self._carrying: set[int] = set()
        self._late: set[int] = set()  # state ids of threads that began unseen
        self._late_idents: set[int] = set()
        self._own: set[int] = set()  # state ids of the recorder's own threads
        self._installed = False
        self._at_start: list[str] = []  # sentences to tell once recording is on
        presence.opened = self._settle
        core.ask_to_leave = lambda: _ask_to_leave({own_id()})
        self._patches = PatchSet(
            [
                *[
                    Patch(module, name, around(self._starting))
                    for module, name in _STARTERS
                    if hasattr(sys.modules[module], name)
                ],
                Patch("torch._C", "_InferenceMode.__exit__", around(self._staying)),
            ]
        )
        core.scopes.first_record = self._first_record

    # --------------------------------------------------------------------------------------------------- start and stop

    def install(self) -> None:
        """Start with the calling thread and all others. Operators that threads call until this returns are not
        recorded: recording begins for all threads at once, at `started`."""
        global _current
        self._installed = True  # from the first step on there is something to remove
        self._patches.install()
        # First the hook: what a thread joins before, its next operator would make it leave again.
        self._presence.begin()
        _current = self
        inside = _in_backward_pass()
        self.core.thread_watch.begin(self._presence.mode, not inside and self._presence.may_be_quiet())
        if inside:  # it joins when the pass is over, as other threads do
            self._at_start.append("the capture began inside a backward pass: what is left of the pass is not recorded")
        else:
            self._handled.add(own_id())
            self._carrying.add(own_id())
            self._presence.show()
        if not _next_step().available and threading.active_count() > 1:
            self._at_start.append(
                "this Python interpreter gives no access to threads that ran before the capture began: their "
                "work is not recorded"
            )
        self.core.attempt(self._join_unknown, False)
        self.core.attempt(self._wait_until_joined)
        self.core.attempt(self._tell_of_backward_passes)

    def _wait_until_joined(self) -> None:
        """Wait for the threads that were asked to join, each at the end of the operator, or the backward pass, in which
        it is. Nothing that was counted until then is missing from the capture."""
        begun = time.monotonic()
        ran: dict[int, tuple[str | None, float]] = {}  # by state id: how the thread ran, and since when that is so
        while absent := self._absent():
            now = time.monotonic()
            for number, native_id in absent.items():
                how = how_it_ran(native_id) if native_id else ""
                if number not in ran or how is None or how != ran[number][0]:
                    ran[number] = how, now
            waits = now - max(ran[number][1] for number in absent) > _WAITING_S
            late = now - begun > _LONGEST_JOINING_S
            if late and self.core.thread_watch.running():
                self._at_start.append(
                    "an operator that began before the capture was not over "
                    f"{_LONGEST_JOINING_S:.0f} seconds later: what it does is not recorded"
                )
                break
            if late or (waits and not self.core.thread_watch.running()):
                break
            time.sleep(0.001)
        self.core.thread_watch.collect()

    def _absent(self) -> dict[int, int | None]:
        """The threads that were asked and have not joined: the system's ids, where they are known, by state id."""
        known: dict[int, threading.Thread] = getattr(threading, "_active", {})
        return {
            state.id: getattr(known.get(_next_step().ident(state) or 0), "native_id", None)
            for state in thread_states()
            if state.id in self._handled and state.id not in self._carrying
        }

    def started(self) -> None:
        """Recording is on, or begins with the next op."""
        sentences, self._at_start = self._at_start, []
        for sentence in sentences:
            self._tell(sentence)
        self._join_unknown(late=False)

    def look(self) -> None:
        """Find the threads that began unseen. Costs a few microseconds per thread."""
        self._join_unknown(late=True)
        self.core.thread_watch.look()

    def remove(self) -> None:
        """The calling thread no longer carries the mode; the others do until their next step, or until the backward
        pass is over in which they are. Idempotent."""
        global _current
        if not self._installed:
            return
        self._installed = False
        self.core.thread_watch.end()
        if _current is self:
            _current = None
        self._presence.end()
        self._patches.remove()
        if not _in_backward_pass():
            self._carrying.discard(own_id())
        _ask_to_leave(self._carrying)
        for state in thread_states():
            if state.id in self._handled and state.id not in self._carrying:
                _next_step().clear(state)

    def forked(self) -> None:
        """In a forked child, whose only thread this is."""
        global _current
        _current = None
        _leaving.clear()
        self.core.thread_watch.forked()
        self._patches.remove()
        self._presence.forked()

    # ------------------------------------------------------------------------------------------------------ new threads

    def _starting(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """The replacement of a function that starts threads, whose first argument is the thread's function."""
        if self.core.finished or not callable(function):
            return original(function, *args, **kwargs)
        return original(_Carrying(self, function), *args, **kwargs)

    def in_any_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which C++ code may call in a thread of its own. The thread participates for so long."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.core.finished or self._presence.joined() or _in_backward_pass():
                return function(*args, **kwargs)
            return _Carrying(self, function)(*args, **kwargs)

        return call

    def begun(self, function: Any) -> None:
        number, ident = own_id(), get_ident()
        self._handled.add(number)
        self._late.discard(number)
        self._late_idents.discard(ident)
        owner = getattr(function, "__self__", None)
        name = vars(owner).get("_name", "") if issubclass(type(owner), threading.Thread) else ""
        if type(owner) is HiddenThread or name.startswith(DIGESTING):
            self._own.add(number)
            self._presence.leave()  # it may have been found before it got here
            self._carrying.discard(number)
            self.core.thread_watch.take_part(True)
            return
        self.join()  # without the lock: the starter of this thread waits for it, and may hold the lock

    def ended(self) -> None:
        self._presence.leave()
        self.core.thread_watch.take_part(False)
        if own_id() in self._carrying:  # not the recorder's own: whoever waits for them may hold the lock
            self._carrying.discard(own_id())
            self.core.thread_ended()

    # ---------------------------------------------------------------------------------------------------- other threads

    def _join_unknown(self, late: bool) -> None:
        """Make unknown threads join at their next step. `late`: they began while all thread starts were being
        watched."""
        for state in thread_states():
            if state.id in self._handled:
                continue
            if late:
                self._late.add(state.id)
            if _next_step().set(state):
                self._handled.add(state.id)
            elif self.core.on and _next_step().is_blocked(state):
                self._handled.add(state.id)
                self._tell(
                    "a thread has functions of the program's own wherever it could be asked to take part "
                    "(sys.setprofile, sys.settrace): what it does is not recorded"
                )

    def join(self) -> bool:
        """The calling thread participates from now on, with the mode as its outermost one. Returns whether it could, or
        need not. Takes no lock: the thread may be anywhere."""
        number, ident = own_id(), get_ident()
        if self.core.finished or number in self._own:
            return True
        if _in_backward_pass():
            return _is_autograd_worker()
        joined = self._presence.joined()  # it may have kept the key of an earlier capture
        if joined and number in self._carrying:
            return True
        if not joined:
            if number in self._late:
                if _is_autograd_worker():
                    return True
                self._late_idents.add(ident)
            self.core.scopes.contexts.pop(ident, None)  # of a thread that had this ident before
            self._presence.join()
        if number not in self._carrying:
            self._carrying.add(number)
            self.core.several = True
            if not joined:
                self._settle()
            if self.core.closed:  # it ended meanwhile
                _ask_to_leave({number})
        self._presence.show()
        return True

    def _staying(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The replacement of the end of inference mode, which puts a thread's dispatch keys back to what they were when
        it began: the thread may not have participated then."""
        try:
            return original(*args, **kwargs)
        finally:
            if not self.core.finished and own_id() in self._carrying:
                self.core.attempt(self._presence.renew)

    def has_joined(self) -> bool:
        """Whether the calling thread participates. Takes no lock."""
        return own_id() in self._carrying

    def check(self) -> None:
        """Report where the calling thread should participate and does not."""
        lost = self._presence.lost() if self._installed and own_id() in self._carrying else ""
        if lost:
            self._tell(lost)

    def _settle(self) -> None:
        """The calling thread may start an observer of all threads (a profiler's): they have RecordFunction on then. One
        in a backward pass has it as it was when the pass began, until its next step after the pass."""
        if self.core.thread_watch.loud():
            for state in thread_states():
                if state.id in self._carrying and (state.id != own_id() or _in_backward_pass()):
                    _next_step().set(state)

    # ----------------------------------------------------------------------------------------------------- what to tell

    def _tell(self, sentence: str) -> None:
        """Report that threads did, or may have done, work that is not recorded."""
        with self.core.lock:
            if self.core.on:
                self.core.records.unsupported("unseen_thread", "", sentence)

    def _tell_of_backward_passes(self) -> None:
        """Report backward passes that go on in other threads: the rest of them runs without a Python step."""
        with collector_paused():  # the interpreter holds a lock of its own meanwhile
            frames = sys._current_frames()
        joined = {_next_step().ident(state) for state in thread_states() if state.id in self._carrying}
        for ident, frame in frames.items():
            codes = {inner.f_code for inner, _line in traceback.walk_stack(frame)}
            if ident != get_ident() and ident not in joined and _run_backward.__code__ in codes:
                self._at_start.append(
                    "a backward pass began in another thread before the capture: its remaining work is not recorded"
                )

    def _first_record(self, ident: int) -> None:
        """A thread is about to make its first record."""
        if ident in self._late_idents:
            self._late_idents.discard(ident)
            self._tell(
                "a thread was created by C code, or without the threading module: its work before it was first "
                "seen is not recorded"
            )


class _Carrying:
    """A thread's function, called with the mode in place. Has the function's repr, which the interpreter shows."""

    def __init__(self, threads: Threads, function: Callable[..., Any]) -> None:
        self._threads = threads
        self._function = function

    def __repr__(self) -> str:
        return repr(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        threads = self._threads
        threads.core.attempt(threads.begun, self._function)
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            leave_no_frames(error)
            raise
        finally:
            for capture in {threads, _current or threads}:  # it may have continued from one capture into the next
                capture.core.attempt(capture.ended)


_current: Threads | None = None
_leaving: dict[int, int] = {}  # by state id: steps left of threads that carry the mode of a capture that is over


def _ask_to_leave(numbers: set[int]) -> None:
    """Make threads, by state id, drop the modes of captures that are over, at their next step. A thread that ends with
    a mode needs the interpreter's lock to drop it, and aborts the process if the interpreter is at its end."""
    for state in thread_states():
        if state.id in numbers:
            _leaving[state.id] = _PATIENCE
            _next_step().set(state)


def _step() -> bool:
    """A step of a thread that was asked. Returns whether it is done. Raises only what a signal handler of the program
    raises meanwhile."""
    capture = _current
    if capture is not None:
        return capture.core.attempt(_take_part, capture) is not False
    try:
        return _leave()
    except BaseException as error:
        if is_interrupt(error):
            raise
        return True  # the capture is over, and a leftover mode of it does nothing


def _take_part(capture: Threads) -> bool:
    """The calling thread joins a capture. Returns whether it could, or need not."""
    leave_finished()
    _leaving.pop(own_id(), 0)
    return capture.join()


def _leave() -> bool:
    """The calling thread drops the modes of captures that are over. Returns whether that is done."""
    gone = leave_finished()
    if _in_backward_pass():
        return False
    number = own_id()
    patience = _leaving.pop(number, 0)
    if patience > 1 and not gone:
        _leaving[number] = patience - 1  # something has set the mode aside, and puts it back
        return False
    return True


def _in_backward_pass() -> bool:
    """Whether the calling thread is in one. What it carried when the pass began is put back when the pass ends."""
    return torch._C._current_graph_task_id() != -1


def _is_autograd_worker() -> bool:
    """Whether autograd started the calling thread, for a device or for nested passes. PyTorch names it, on Linux."""
    try:
        with open("/proc/thread-self/comm", "rb") as file:
            return file.read().startswith(b"pt_autograd_")
    except OSError:
        return False


@functools.cache
def _next_step() -> NextStep:
    return NextStep(_step)
