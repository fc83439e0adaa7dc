"""Keeps the tracebacks of the program's exceptions as they would be without the recorder.

Imports no torch.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType, TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROGRAM = _HERE + "program" + os.sep
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


def in_recorders_work() -> bool:
    """Whether one of the calling thread's frames, apart from the innermost ones, is of the recorder's work around ops.
    What starts the program, and stands around all of it, is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_recorders(frame.f_code):
        frame = frame.f_back
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and not name.startswith(_PROGRAM):
            return True
        frame = frame.f_back
    return False


def is_recorders(code: CodeType) -> bool:
    """Whether code is the recorder's own."""
    return code.co_filename.startswith(_HERE)
