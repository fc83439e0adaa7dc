"""The recorder's own frames: kept out of the tracebacks of the program's exceptions, and told from the program's.

`leave_no_frames` keeps tracebacks as they would be without the recorder. `is_interrupt` recognizes exceptions that the
program raised inside the recorder: from its signal handlers, or from one thread in another. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from inspect import CO_VARARGS
from itertools import dropwhile
from types import CodeType, FrameType, TracebackType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_AROUND = (_HERE + "program" + os.sep, _HERE + "supervisor.py")  # what starts the program, and waits for it
_OPERATORS = os.path.join("torch", "_ops.py")


def leave_no_frames(error: BaseException) -> None:
    """Take the recorder's frames out of an exception's traceback, and those of the calls that PyTorch makes on its
    behalf. Call it in the recorder's outermost frame, then `raise`, which adds none."""
    entry = _next_of_others(error.__traceback__)
    if entry is not error.__traceback__:
        error.__traceback__ = entry
    while entry is not None:
        following = _next_of_others(entry.tb_next)
        if following is not entry.tb_next:
            entry.tb_next = following
        entry = following


def leave_no_own_frame(error: BaseException) -> None:
    """The same, if the recorder wraps a PyTorch function that the program called: PyTorch's frames stay."""
    entry = error.__traceback__
    while entry is not None and is_recorders(entry.tb_frame.f_code):
        entry = entry.tb_next
    error.__traceback__ = entry


def _next_of_others(entry: TracebackType | None) -> TracebackType | None:
    while entry is not None and _is_ours(entry):
        entry = entry.tb_next
    return entry


def _is_ours(entry: TracebackType) -> bool:
    frame = entry.tb_frame
    if is_recorders(frame.f_code):
        return True
    caller = frame.f_back
    return frame.f_code.co_filename.endswith(_OPERATORS) and caller is not None and is_recorders(caller.f_code)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that it was called from."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def beyond_recorders(frame: FrameType) -> Iterator[FrameType]:
    """The same, from the first that is not the recorder's."""
    return dropwhile(lambda each: is_recorders(each.f_code), outwards(frame))


def in_recorders_work() -> bool:
    """Whether one of the calling thread's frames, apart from the innermost ones, is of the recorder's work around ops.
    What starts the program, and stands around all of it, is none."""
    names = (frame.f_code.co_filename for frame in beyond_recorders(sys._getframe(1)))
    return any(name.startswith(_HERE) and not name.startswith(_AROUND) for name in names)


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions and classes that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def is_recorders(code: CodeType) -> bool:
    """Whether code is the recorder's own."""
    return code.co_filename.startswith(_HERE)


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
        and not _is_own_module(type(error).__module__)
        and any(is_recorders(each.f_code) for each in frames)
        and all(
            _is_own_module(each.f_globals.get("__name__")) for each in frames[1:]
        )  # else the program's code raised it
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Those that an exception has passed, from the one that catches it inwards."""
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next


def _is_own_module(module: object) -> bool:
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
