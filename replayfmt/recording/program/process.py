"""What happens to the process under capture: torch is imported, `exec` replaces it, `os._exit` or SIGTERM ends it.

`TorchFirst` makes sure that torch is imported before the modules of this package that need it: importing torch starts
the recorder, so these must not be half imported at that moment. `ProgramReplacement` closes the capture at `os.execv`
and its family, and at `os._exit`: nothing of the program runs afterwards. `Termination` closes it on SIGTERM, outside
of any recorder code: if the signal finds the main thread inside the recorder, the handler waits for the program's own
next step, and a compiler that builds part of the recorder is ended instead. Then the process exits with 143. Where the
main thread is in a call of C code that does not end, a thread of the recorder does so (`end_if_stuck`). A handler that
the program sets replaces ours, and the previous handler is called after the capture is closed. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from replayfmt.format.output import in_main_thread
from replayfmt.native.watching import ThreadWatch

from ..frames import in_recorders_work, outwards
from ..patches import Patch, Patched, PatchSet, around

_PACKAGE = __package__.partition(".")[0]
_NEED_TORCH = frozenset(f"{_PACKAGE}.{name}" for name in ("pytorch", "recording.recorder", "replay", "benchmark"))


class TorchFirst(MetaPathFinder):
    """Finds nothing itself. Installed until torch has been imported."""

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NEED_TORCH or "torch" in sys.modules:
            return None
        importlib.import_module("torch")
        # That may have imported this very module; importing it once more would make a second one.
        module = sys.modules.get(fullname)
        if module is None:
            return None
        spec = ModuleSpec(fullname, _Existing(module))
        module.__spec__ = spec  # the import system takes the spec of a module that turned up while it searched
        return spec


class _Existing(Loader):
    """ "Loads" a module that was imported in the meantime, by leaving it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_NAMES = ("execv", "execve", "_exit")  # os.execl, os.execvp and the others call the first two
_ENDS = "os._exit"


class ProgramReplacement(Patched):
    """Calls `finish` before this process is replaced by another program, with the name of the function that does it, or
    before it ends at once (None)."""

    def __init__(self, finish: Callable[[str | None], None]) -> None:
        self._finish = finish
        self._patches = PatchSet(
            Patch(module, name, around(functools.partial(self._finishing, f"os.{name}")))
            for module in ("os", "posix")
            for name in _NAMES
        )

    def _finishing(self, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name != _ENDS:
            self._finish(name)
        elif not in_recorders_work():  # a signal handler there would find the file half written
            self._finish(None)
        return original(*args, **kwargs)


TERMINATED = 128 + signal.SIGTERM

_OURS = __package__.partition(".")[0] + "."
# Frames of this package that surround the program's own code, or in which nothing can be left half done.
_HARMLESS = {
    f"{_OURS}recording.{name}"
    for name in (
        "hooks.host_access",
        "undispatched",
        "patches",
        "program.children",
        "program.marks",
        "program.module_scopes",
        "program.running",
        "supervisor",
        "program.threads",
    )
}


class BuildEnded(BaseException):
    """SIGTERM came while a compiler built part of the recorder. The compiler has been ended."""


class Termination:
    """The SIGTERM handler of one capture. `ends_build`: whoever starts the recorder expects BuildEnded, and calls
    `leave` then."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._previous: Any = None
        self._installed = False
        self.came = False
        self.ends_build = False

    def install(self, only_default: bool = False) -> None:
        """Set the handler. Call it in the main thread. It is not set if SIGTERM is ignored, as for some background
        jobs, or, with `only_default`, if the program has a handler of its own."""
        if not in_main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        self.came = False
        if previous is signal.SIG_DFL or (callable(previous) and not only_default):
            self._previous = previous
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Restore the previous handler, unless the program has set its own. Idempotent. Outside the main thread nothing
        can be restored: SIGTERM then still exits with 143, with nothing left to close."""
        if self._installed and in_main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.ends_build and _compiles(frame):
            self.ends_build = False
            raise BuildEnded
        inside = _outermost_of_ours(frame)
        if inside is None or inside.f_back is None:
            self.leave(number, frame)
            return
        # Trace the frame that called into the recorder: its next step is outside the recorder.
        caller = inside.f_back
        caller.f_trace_opcodes = True
        caller.f_trace = lambda frame, _event, _argument: self.leave(number, frame)
        sys.settrace(lambda _frame, _event, _argument: None)

    def leave(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Close the capture and end the process."""
        sys.settrace(None)
        self._finish()
        if callable(self._previous):
            self._previous(number, frame)
        # Like the signal's default action: no `finally`, no atexit, nothing flushed.
        os._exit(TERMINATED)


_PATIENCE_NS = 1_000_000_000  # how long the main thread has to come to the handler


def end_if_stuck(watch: ThreadWatch) -> None:
    """In a thread of the recorder, now and then: end the process if SIGTERM came a while ago and the main thread, which
    is in a call of C code, has not come to the handler. The signal's default action would have ended it there."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if not isinstance(handler, Termination):
        return
    if watch.terminated_ns() > _PATIENCE_NS and not handler.came:
        os._exit(TERMINATED)  # ProgramReplacement closes the capture before
    watch.note_termination()  # again: setting any handler from Python undoes it


def _compiles(frame: FrameType | None) -> bool:
    """Whether a compiler is running for the recorder."""
    home = f"{_OURS}native.building"
    return any(each.f_code.co_name == "_run" and each.f_globals.get("__name__") == home for each in outwards(frame))


def _outermost_of_ours(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of recorder code on the stack, or None if no recorder code is running."""
    found = None
    for each in outwards(frame):
        name = each.f_globals.get("__name__", "")
        if name.startswith(_OURS) and name not in _HARMLESS:
            found = each
    return found
