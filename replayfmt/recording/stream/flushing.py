"""When waiting records are written: by the recorder's own thread, or by one that records, where that one gets no turn.

A program may keep the recorder's thread from running: flushing.h says how.
"""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from replayfmt.native.hook import wait_to_flush

# What a program puts in the place of time.perf_counter_ns may stand still.
_now_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
PERIOD_NS = 100_000_000  # the recorder's thread writes if nobody has for so long: what a killed process loses
_DUE_NS = 80_000_000  # a thread that records does
_SHARE = 20  # writing takes at most one part in so many of the time: with many live tensors it is done less often


class FlushTimes:
    """Those of one capture. `native`: its Session, or None."""

    def __init__(self, native: Any) -> None:
        self._native = native
        # Putting anything here wakes the flusher. Not an Event: a signal handler that raises inside `set`, which is
        # Python code, leaves its lock held forever.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.begin()

    def begin(self, took_ns: int = 0) -> None:
        """What waits is being written, or was, with so much work of the processor; the time to the next turn begins."""
        now = _now_ns()
        self._due_ns = now + max(_DUE_NS, _SHARE * took_ns)
        self._late_ns = now + max(PERIOD_NS, _SHARE * took_ns)
        if self._native is not None:
            self._native.flushing.expect(self._due_ns, self._late_ns)

    def overdue(self) -> bool:
        """Whether a thread that records is to write what waits."""
        return _now_ns() >= self._due_ns

    def wake(self) -> None:
        """The recorder's thread is to write what waits."""
        if self._native is not None:
            self._native.flushing.wake()
        elif self._wake.empty():
            self._wake.put(None)

    def wait(self) -> None:
        """In the recorder's thread: wait until it is to write."""
        if self._native is not None:
            wait_to_flush(self._native)
        else:
            with suppress(Empty):
                self._wake.get(timeout=max(0.001, (self._late_ns - _now_ns()) / 1e9))
