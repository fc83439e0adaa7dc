"""Rows that a thread is making without the lock right now.

While one thread records, its fast path takes no lock. Who needs its row to be there (because a second thread begins to
record, or the capture ends) looks where the thread is: in those lines of the fast path's code that take ids and append
the row, or elsewhere. For how long a thread is suspended there is up to the system: no time is enough to wait blindly.
"""

from __future__ import annotations

import sys
import time
from threading import get_ident
from types import CodeType, FrameType

# Lines of the fast path's functions that make a row without the lock, from asking whether there are other threads on.
sections: dict[CodeType, frozenset[int]] = {}

_wait = time.sleep
_LOOK_S = 0.0005
_LONGEST_S = 10.0  # a signal handler that runs in between may wait for the very thread that waits here


def making_rows() -> set[int]:
    """Idents of the threads that are making a row without the lock."""
    return {ident for ident, frame in sys._current_frames().items() if _in_section(frame)}


def _in_section(frame: FrameType | None) -> bool:
    while frame is not None:
        lines = sections.get(frame.f_code)
        if lines is not None and frame.f_lineno in lines:
            return True
        frame = frame.f_back
    return False


def wait_for_rows() -> None:
    """Wait until the rows that other threads are making without the lock are there."""
    others = making_rows() - {get_ident()}
    deadline = time.monotonic() + _LONGEST_S
    while others and time.monotonic() < deadline:
        _wait(_LOOK_S)
        others &= making_rows()
