"""How the recorder is present in a thread: as a dispatch mode on its mode stack, or as a key of the dispatcher."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch
from torch._C import _pop_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode

from replayfmt.native.hook import DispatchHook, loaded_hook
from replayfmt.native.watching import settle

from ..core import Core
from ..dispatch.mode import RecordingMode
from ..dispatch.mode_stack import mode_stack, remove_finished_modes, remove_mode, remove_mode_at, set_modes
from ..dispatch.native_mode import NativeMode
from ..hooks.patches import Patch, PatchSet
from .observers import DOORS, guards_exist

_KEYS_PUT_BACK = (
    "something put the dispatch keys of the thread that ends the capture back to what they were before it began: the "
    "work since then is not recorded. Begin the capture outside of what did that"
)
_CLOSED_LATE = (
    "the recorder ended with the interpreter, before the capture was closed: what atexit functions computed since then "
    "is not recorded. Close the capture before the program's end, or record with opreplay-capture"
)


class Presence(Protocol):
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


class ModePresence:
    """By a dispatch mode."""

    opened: Callable[[], None]

    def __init__(self, core: Core, mode: RecordingMode) -> None:
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

    def lost(self) -> str:
        return "" if torch._C._dispatch_tls_local_include_set().has(torch._C.DispatchKey.Python) else _KEYS_PUT_BACK

    def join(self) -> None:
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
            # A signal handler may raise in the middle; then try again.
            try:
                core.attempt(set_modes, stack)
            except BaseException:
                core.attempt(set_modes, stack)
                raise

    def hidden(self) -> AbstractContextManager[None]:
        return _without_modes(self._core)


class HookPresence:
    """By the hook below autograd. (Inside an observed operator, by the mode that observes it.)"""

    opened: Callable[[], None]

    def __init__(self, core: Core, hook: DispatchHook) -> None:
        self._core = core
        self._hook = hook
        self._native = NativeMode(core, hook)
        self.mode: RecordingMode = self._native
        self._patches = PatchSet(
            [
                Patch("torch._ops", "_compute_keyset", self._without_key),
                Patch("torch._C", "_ForceDispatchKeyGuard", self._with_own_key),
                Patch("torch._dynamo.guards", "CheckFunctionManager.__init__", self._looked_through),
                # Of code compiled ahead of time, which looks through them by itself.
                Patch("torch._dynamo.guards", "GuardManagerWrapper.check", self._away),
                Patch("torch._dynamo.guards", "GuardManagerWrapper.check_verbose", self._away),
                *[Patch(module, name, self._loud) for module, names in DOORS.items() for name in names],
            ]
        )

    def may_be_quiet(self) -> bool:
        return not guards_exist()

    def begin(self) -> None:
        self._patches.install()
        self._hook.begin(self._native.functions(), self._core.native, self._core.thread_watch.shared())
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
        if self._core.native is not None:
            self._core.native.forked()
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

    def _without_key(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Higher-order operators, which are dispatched in Python, find the same kernel as without the recorder."""

        @functools.wraps(original)
        def compute(args: Any, kwargs: Any, keys: Any) -> Any:
            return original(args, kwargs, self._hook.without_key(keys))

        return compute

    def _with_own_key(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Who gives a thread other sets of keys (those of a forward pass, for its backward) leaves the recorder in."""
        return self._hook.key_guard(original)

    def _away(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Guards of compiled code are created and looked through without the key (by Dynamo: thread_watch.cpp)."""

        @functools.wraps(original)
        def without(*args: Any, **kwargs: Any) -> Any:
            included = self._hook.include(False)
            try:
                with self._core.thread_watch.covered():
                    return original(*args, **kwargs)
            finally:
                self._hook.include(included)

        return without

    def _looked_through(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Guards are created, which Dynamo looks through from now on: thread_watch.cpp is to be called then."""
        return self._loud(self._away(original))

    def _loud(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Who registers a RecordFunction callback here finds RecordFunction as it is without a capture."""

        @functools.wraps(original)
        def opened(*args: Any, **kwargs: Any) -> Any:
            self._core.attempt(self.opened)
            return original(*args, **kwargs)

        return opened


@contextmanager
def _without_modes(core: Core) -> Iterator[None]:
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
            # A signal handler may raise in the middle; then try again.
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
        self._core: Core | None = None  # of the last capture
        self._patches = PatchSet(
            [
                Patch("torch._C", "_InferenceMode.__enter__", self._entering),
                Patch("torch._C", "_InferenceMode.__exit__", self._leaving),
            ]
        )

    def begin(self, core: Core) -> None:
        """A capture begins."""
        if not self._inside:
            self._patches.install()
        self._core, self._in_use = core, True

    def end(self) -> None:
        """It ends. Threads that are inside may take longer."""
        self._in_use = False
        self._remove_unused()

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(*args: Any, **kwargs: Any) -> Any:
            self._inside[get_ident()] += 1
            return original(*args, **kwargs)

        return enter

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if get_ident() in self._inside and self._core is not None:
                    self._core.attempt(self._left)

        return leave

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


def _told(core: Core) -> RecordingMode | None:
    """The mode on the thread's stack that records, if one does."""
    for mode in core.attempt(mode_stack) or ():
        if isinstance(mode, RecordingMode) and mode.core is core:
            return mode if mode.told else None
    return None
