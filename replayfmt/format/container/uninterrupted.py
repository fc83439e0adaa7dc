"""Keeping signal handlers out of a write.

Python runs signal handlers between any two steps of the main thread, and the usual ones raise: KeyboardInterrupt for
Ctrl-C, SystemExit for SIGTERM. One that arrived in the middle of a frame would leave the writer's books and the file
apart. Inside `uninterrupted()` handlers are put off; they run, and raise, when it is left.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD")
    if hasattr(signal, name)
)
# The same functions in C. Those of `signal` look every handler up among the members of an enumeration, which takes
# ten times as long as all else here.
_handlers: Any = sys.modules.get("_signal", signal)


_put_off = False  # whether the main thread is inside one


class Uninterrupted:
    """A context manager; see the module. Only the main thread ever runs handlers, so elsewhere it does nothing, nor
    does it inside another one."""

    def __init__(self) -> None:
        self._saved: list[tuple[signal.Signals, Callable[[int, FrameType | None], Any]]] = []
        self._arrived: list[tuple[int, FrameType | None]] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def __enter__(self) -> None:
        global _put_off
        if _put_off or threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _SIGNALS:
                handler = _handlers.getsignal(number)
                if callable(handler):
                    self._saved.append((number, handler))
                    _handlers.signal(number, self._note)
        except BaseException:  # a handler that was not put off yet raised
            self._restore()
            raise
        _put_off = True

    def _restore(self) -> None:
        global _put_off
        _put_off = False
        for number, handler in self._saved:
            _handlers.signal(number, handler)

    def __exit__(self, *_exception: object) -> None:
        if not self._saved:
            return
        self._restore()
        handlers = dict(self._saved)
        for number, frame in self._arrived:
            handlers[signal.Signals(number)](number, frame)
