"""Exceptions raised inside the recorder by the program: by its signal handlers, or by one thread in another.

Python runs handlers between any two steps of the main thread. One that raises (a timeout with SIGALRM, say) may run
inside the recorder, and its exception belongs to the program. So does one that is raised in a thread from outside
(PyThreadState_SetAsyncExc, with which libraries end calls that take too long).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import CO_VARARGS
from types import FrameType
from typing import Any

from .frames import is_recorders

# Packages whose exceptions a failure of the recorder may raise.
_OURS = {*sys.stdlib_module_names, "flatbuffers", "numpy", "replayfmt", "torch", "zstandard"}


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception came from a signal handler or from another thread, or is of a kind that no bug raises
    (KeyboardInterrupt, SystemExit). Call it where the exception is caught."""
    if error is None or not isinstance(error, Exception):
        return error is not None
    frames = list(_frames(error))
    if any(not is_recorders(each.f_code) and any(map(_is_frame, _arguments(each))) for each in frames[1:]):
        return True
    # Python makes one that another thread asks for of its class alone, in whatever runs then.
    return (
        not error.args
        and not _is_ours(type(error).__module__)
        and any(is_recorders(each.f_code) for each in frames)
        and all(_is_ours(each.f_globals.get("__name__")) for each in frames[1:])  # else the program's code raised it
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Those that an exception has passed, from the one that catches it inwards."""
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _OURS


def _arguments(frame: FrameType) -> list[Any]:
    """The current values of a function's parameters; those of *args are one tuple."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    values = frame.f_locals
    return [values[name] for name in code.co_varnames[:count] if name in values]


def _is_frame(value: Any) -> bool:
    """Only signal handlers and tracers are called with the frame that they interrupt."""
    return type(value) is FrameType or (type(value) is tuple and any(type(item) is FrameType for item in value))
