"""Exceptions raised inside the recorder by the program's signal handlers.

Python runs handlers between any two steps of the main thread. One that raises (a timeout with SIGALRM, say) may run
inside the recorder, and its exception belongs to the program.
"""

from __future__ import annotations

from inspect import CO_VARARGS
from types import FrameType
from typing import Any

from .frames import is_recorders


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception came from a signal handler, or is of a kind that no bug raises (KeyboardInterrupt,
    SystemExit). Call it where the exception is caught."""
    if error is None or not isinstance(error, Exception):
        return error is not None
    entry = error.__traceback__ and error.__traceback__.tb_next  # the first entry is the catching frame
    while entry is not None:
        frame = entry.tb_frame
        if not is_recorders(frame.f_code) and any(map(_is_frame, _arguments(frame))):
            return True
        entry = entry.tb_next
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """The current values of a function's parameters; those of *args are one tuple."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    values = frame.f_locals
    return [values[name] for name in code.co_varnames[:count] if name in values]


def _is_frame(value: Any) -> bool:
    """Only signal handlers and tracers are called with the frame that they interrupt."""
    return type(value) is FrameType or (type(value) is tuple and any(type(item) is FrameType for item in value))
