"""Captures of a running process, on request: `replayfmt.request_capture`.

A dedicated thread waits for the signal, or looks for the file, and starts and ends captures. The signal handler does
not do that itself, because it may run in the middle of anything. Each event prints a line on stderr, and no failure of
a capture reaches the program.
"""

from __future__ import annotations

import atexit
import os
import signal as signals
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Unpack

from replayfmt.errors import CaptureFailed, NothingCaptured, OpReplayError, UsageError
from replayfmt.format.output import in_main_thread
from replayfmt.format.validation import check_function, count_of, counted, path_of, tell

from .options import CaptureKeywords, CaptureOptions
from .program.process import Termination
from .program.threads import HiddenThread
from .recorder import Recorder
from .supervisor import output_path

_LOOK_PERIOD_S = 0.2
_PATIENCE_S = 2.0


class CaptureRequests:
    """Starts and ends captures of this process. Made by `request_capture`.

    `path` may contain `{number}`, which counts the captures from 0, `{rank}` and `{pid}`. Close it to restore
    everything; a capture that is running then is ended, as it is when the process exits.
    """

    def __init__(
        self, path: str, options: CaptureOptions, signal: int | None, file: str | None, say: Callable[[str], None]
    ) -> None:
        self._template, self._options, self._signal, self._file, self._say = path, options, signal, file, say
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        self._path = ""
        self._count = 0
        self._in_flight = 0  # operators that the last capture is without, because they ran when it began
        self._pid = os.getpid()
        self._closed = False
        # Putting anything here wakes the thread. Not an Event: see FlushTimes.
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._previous: Any = None
        self._termination = Termination(self.close)
        self._thread = HiddenThread(self._serve)

    def install(self) -> None:
        """Start listening. Raises UsageError if the signal cannot be handled."""
        if self._signal is not None:
            try:
                self._previous = signals.signal(self._signal, self._handle)
            except (ValueError, OSError) as error:
                raise UsageError(
                    f"signal={self._signal}: cannot be handled: {error}; call request_capture in the main "
                    "thread, with a signal such as signal.SIGUSR1"
                ) from None
        self._termination.install(only_default=True)
        atexit.register(self.close)
        self._thread.start()

    # --------------------------------------------------------------------------------------------------- in the program

    @property
    def path(self) -> str | None:
        """The file that is being written; None if nothing is recorded."""
        with self._lock:
            return None if self._recorder is None else self._path

    def start(self) -> str:
        """Start a capture. Returns its path. Raises CaptureFailed if one is running or cannot be started, OutputExists,
        UsageError."""
        with self._lock:
            if self._recorder is not None:
                raise CaptureFailed(f"{self._path}: this capture is still running; end it first")
            if self._closed:
                raise CaptureFailed("these requests are closed; call request_capture again")
            path = output_path(self._template, dict(os.environ), self._pid).replace("{number}", str(self._count))
            recorder = Recorder(os.path.abspath(path), self._options)
            recorder.start()
            self._recorder, self._path, self._count = recorder, path, self._count + 1
            return path

    def stop(self) -> str:
        """End the capture that is running. Returns its path. Raises NothingCaptured if no op was recorded,
        CaptureFailed if none is running or the file could not be completed."""
        with self._lock:
            recorder, self._recorder = self._recorder, None
            if recorder is None:
                raise CaptureFailed("no capture is running; start one first")
            recorder.close()
            self._in_flight = recorder.in_flight
            return self._path

    def close(self) -> None:
        """Stop listening, and end a running capture. Idempotent; does nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            running = self._recorder is not None
        if running:
            self._attempt(self._stop_and_say)
        self._asked.put(False)
        # The interpreter's end aborts the process if it finds a thread in C++. `on_event` may be slow, or call this.
        self._thread.join(_PATIENCE_S)
        atexit.unregister(self.close)
        self._termination.remove()
        if in_main_thread() and self._signal is not None and signals.getsignal(self._signal) == self._handle:
            signals.signal(self._signal, self._previous)

    # ----------------------------------------------------------------------------------------------------- from outside

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked.put(True)

    def _serve(self) -> None:
        wanted = False
        while not self._closed:
            try:
                toggled = self._asked.get(timeout=_LOOK_PERIOD_S if self._file is not None else None)
            except Empty:
                toggled = False
            if self._closed:
                return
            if toggled:
                self._attempt(self._start_and_say if self.path is None else self._stop_and_say)
            if self._file is not None and os.path.exists(self._file) is not wanted:
                wanted = not wanted
                if wanted is (self.path is None):
                    self._attempt(self._start_and_say if wanted else self._stop_and_say)

    def _attempt(self, step: Callable[[], str]) -> None:
        """Do it, and report what came of it."""
        try:
            event = step()
        except NothingCaptured as error:
            event = str(error)
        except OpReplayError as error:
            event = f"{error.status}: {error}"
        except Exception as error:
            event = f"{CaptureFailed.status}: the capture failed: {error!r}"
        try:
            self._say(f"opreplay: {event}")
        except BaseException as error:  # the program's function raised; the next request is answered all the same
            tell(f"opreplay: on_event raised {error!r} when told: {event}")

    def _start_and_say(self) -> str:
        return f"capture to {self.start()} begins"

    def _stop_and_say(self) -> str:
        path = self.stop()
        running = f" (without {counted(self._in_flight, 'op')} that ran when it began)" if self._in_flight else ""
        return f"capture to {path} is complete{running}"


def request_capture(
    path: str | os.PathLike[str],
    *,
    signal: int | None = None,
    file: str | os.PathLike[str] | None = None,
    on_event: Callable[[str], None] | None = None,
    **options: Unpack[CaptureKeywords],
) -> CaptureRequests:
    """Allow captures of this process to be started and ended while it runs: a server, for instance.

    With `signal` (`signal.SIGUSR1`), each such signal starts a capture, or ends the one that is running; this must be
    called in the main thread then. With `file`, a capture runs while a file of that name exists, which is checked five
    times a second. Without either, use `start()` and `stop()` of the returned object. `path` may contain `{number}`,
    which counts the captures from 0, `{rank}` and `{pid}`; `options` are those of CaptureOptions. `on_event` is called,
    from another thread, with a line for each capture that begins, is complete, or fails; without it, the line is
    printed on stderr.

    Raises UsageError for options that do not exist or a signal that cannot be handled.
    """
    template = path_of("path", path)
    check_function("on_event", on_event)
    watched = None if file is None else path_of("file", file)
    if watched == "":
        raise UsageError("file='': expected the name of a file to look for")
    requests = CaptureRequests(
        template,
        CaptureOptions.of("request_capture", options),
        None if signal is None else count_of("signal", getattr(signal, "value", signal), 1, signals.NSIG - 1),
        None if watched is None else os.path.abspath(watched),
        on_event or tell,
    )
    output_path(template, dict(os.environ), os.getpid())  # raises now if it is invalid
    requests.install()
    return requests
