"""Running prepared windows: fresh state, the clock, the variables between windows, and failures that name their op.

`ScopeTimes` adds up how long a replay spends in each scope.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from replayfmt.collector import collector_paused
from replayfmt.errors import OpReplayError, ReplayFailed, first_line
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import CaptureReader
from replayfmt.pytorch.accelerators import undrawn
from replayfmt.pytorch.environment import apply_settings, preserved_settings
from replayfmt.pytorch.tensors.memory import undispatched

from ..codegen.windows import FILENAME, StagedStorage, Window
from ..planning.kernels import KernelStandIn
from ..planning.records import describe
from ..results import UnexpectedBehaviour
from ..verification import CompareLocation, Judge, StopReplay
from .checkpoints import Checkpoints
from .content import Content, PreparedWindow

OnScope = Callable[[str, str, str, int], None]


@runtime_checkable
class Timer(Protocol):
    """A stopwatch of the caller that runs while ops do: started before the first one, stopped after the last."""

    def start(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None: ...


class RunClock:
    """Adds up the time ops take on the host, including waiting for devices. Pauses nest; the clock begins paused."""

    def __init__(self) -> None:
        self.elapsed_ns = 0
        self._devices: list[torch.device] = []
        self._timer: Timer | None = None
        self._started = False
        self._pauses = 1
        self._since = 0

    def reset(self, devices: Iterable[torch.device], timer: Timer | None) -> None:
        """Ready for a run: paused, at zero."""
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._timer = timer
        self._started = False
        self.elapsed_ns, self._pauses = 0, 1

    def resume(self) -> None:
        """Work of the capture follows."""
        self._pauses -= 1
        if self._pauses:
            return
        self._synchronize()
        if self._timer is not None:
            if self._started:
                self._timer.resume()
            else:
                self._timer.start()
        self._started = True
        self._since = time.perf_counter_ns()

    def pause(self) -> None:
        """The following is not work of the capture."""
        self._pauses += 1
        if self._pauses == 1:
            self._halt(self._timer.pause if self._timer is not None else None)

    def halt(self) -> None:
        """Pause, even if a failure has left the clock paused."""
        if not self._pauses:
            self.pause()
        self._pauses = 1

    def stop(self) -> None:
        """The run is over, however it ended."""
        stop = self._timer.stop if self._timer is not None and self._started else None
        if not self._pauses:
            self._halt(stop)
        elif stop is not None:
            stop()
        self._started = False
        self._pauses = 1

    def _halt(self, timer: Callable[[], None] | None) -> None:
        # A timer with events on the devices has to record them before anybody waits; on the host it is the outer one.
        if not self._devices:
            self.elapsed_ns += time.perf_counter_ns() - self._since
        if timer is not None:
            timer()
        if self._devices:
            self._synchronize()
            self.elapsed_ns += time.perf_counter_ns() - self._since

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def now(self) -> int:
        """Nanoseconds of work so far, without waiting for devices."""
        return self.elapsed_ns + (0 if self._pauses else time.perf_counter_ns() - self._since)


# Called with the capture's path and each window before it runs, to find out where a process died.
before_window: Callable[[str, Window], None] | None = None


class Machine:
    """Runs windows one after the other. `values` are the live variables between them, by key."""

    def __init__(
        self,
        reader: CaptureReader,
        content: Content,
        clock: RunClock,
        judge: Judge,
        stand_in: KernelStandIn | None = None,
        stage: Callable[[StagedStorage], torch.UntypedStorage] | None = None,
    ) -> None:
        """`stage` gives the storages that enter, instead of `content`."""
        self.values: dict[int, Any] = {}
        self._stage = stage or content.stage
        self._stand_in = stand_in
        self.reader = reader
        self.content = content
        self.clock = clock
        self.judge = judge

    def run(
        self,
        windows: Iterable[Window],
        on_scope: OnScope | None,
        on_progress: Callable[[int], None] | None,
        *,
        prepared: bool,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Run all windows, or those that `checkpoints` leave to run. Only the ops are timed, not what is done between
        windows: staging content, and preparing the next window where that was not done before (`prepared` False).

        Raises ReplayFailed if an op fails, StopReplay if the judge found the first divergence.
        """
        self.values.clear()
        first = 0 if checkpoints is None else checkpoints.resume(self.values)
        between = not prepared or on_progress is not None
        keep = prepared and self._stand_in is None
        running = False
        try:
            for window in windows:
                if window.first_ordinal < first:
                    continue
                ready = self.content.ready(window) if keep else None
                enters = ready or window
                if running and (enters.staged or enters.hoisted):
                    self.clock.pause()
                    running = False
                self.prepare(window, ready, keep=keep)
                inputs = self.take(window)
                if not running:
                    self.clock.resume()
                    running = True
                outputs = self.call(window, inputs, on_scope)
                if between:
                    self.clock.pause()
                    running = False
                self.values.update(zip(window.outputs, outputs, strict=True))
                del outputs
                if checkpoints is not None:
                    checkpoints.keep(window.last_ordinal + 1, self.values, self.content.unwritten())
                if on_progress is not None:
                    on_progress(window.last_ordinal + 1)
        finally:
            self.clock.stop()
            self.values.clear()

    def issue(self, windows: Iterable[Window]) -> None:
        """Run all windows without a clock. Raises as `run` does."""
        for window in windows:
            self.prepare(window)
            self.values.update(zip(window.outputs, self.call(window, self.take(window), None), strict=True))

    @collector_paused()
    def prepare(
        self,
        window: Window,
        ready: PreparedWindow | None = None,
        *,
        keep: bool = False,
        unavailable: dict[int, str] | None = None,
    ) -> None:
        """What a window needs before its first op: content, and views on it, `ready` those that are there already; with
        `keep` they are kept for the next run. Storages that cannot be put in place get their reason in `unavailable`;
        without it, the first raises ReplayFailed."""
        values = self.values
        enters: PreparedWindow | Window = window
        if ready is not None:
            values.update(ready.values)
            enters = ready
        failed: dict[int, BaseException] = {}
        for staged in enters.staged:
            try:
                values[-staged.storage] = self._stage(staged)
            except (RuntimeError, MemoryError) as why:
                failed[staged.storage] = why
        for key, base, view in enters.hoisted:
            try:
                if -base not in failed and (unavailable is None or base in values):
                    values[key] = view(values[base])
            except (RuntimeError, MemoryError) as why:
                failed[-base] = why
        for storage, error in failed.items():
            reason = f"storage {storage} cannot be put in place: {first_line(error)}"
            if unavailable is None:
                raise ReplayFailed(
                    f"{self.reader.path}: what ordinals {window.first_ordinal} to {window.last_ordinal} need: {reason}"
                ) from error
            unavailable[storage] = reason
        if keep and ready is None:
            self.content.keep_ready(window, values)
        for key in enters.dropped:
            values.pop(key, None)

    def take(self, window: Window) -> list[Any]:
        """A window's inputs; those not needed afterwards are removed. KeyError: one is missing."""
        values = self.values
        return [
            values.pop(key) if consumed else values[key]
            for key, consumed in zip(window.inputs, window.consumed, strict=True)
        ]

    def call(self, window: Window, inputs: list[Any], on_scope: OnScope | None) -> list[Any]:
        """Run a window's ops; failures become ReplayFailed, behaviour that differs from the capture a divergence."""
        if before_window is not None:
            before_window(self.reader.path, window)
        try:
            return window.function(inputs, on_scope)
        except (StopReplay, OpReplayError):
            raise
        except (Exception, SystemExit, GeneratorExit) as error:  # an op that ends the process has not been replayed
            ordinal = _failing_ordinal(window, error)
            if self.reader.record(ordinal).kind in (RecordKind.scope_begin, RecordKind.scope_end):
                raise  # the caller's callback
            if isinstance(error, UnexpectedBehaviour):
                self.judge.diverged(
                    CompareLocation(ordinal, None, ordinal), "what it did when it was captured", str(error)
                )
                raise StopReplay from None
            failed = None if self._stand_in is None else self._stand_in.failure(ordinal, error)
            if failed is not None:
                raise failed from error
            what, scope = describe(self.reader, ordinal)
            inside = f", scope {scope}" if scope else ""
            raise ReplayFailed(
                f"{self.reader.path}: ordinal {ordinal} ({what}{inside}) failed: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error


def _failing_ordinal(window: Window, error: BaseException) -> int:
    """Which record a window was at when it raised."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == FILENAME:
            return window.ordinal_of_line(traceback.tb_lineno)
        traceback = traceback.tb_next
    return window.first_ordinal


@contextmanager
def surroundings(settings: dict[str, Any], generators: Sequence[torch.Generator | None]) -> Iterator[None]:
    """The state a capture's ops run in: below autograd, under its settings; all restored afterwards."""
    collects = gc.isenabled()
    with (
        preserved_settings() as before,
        undispatched(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
        undrawn(generators),
    ):
        try:
            gc.disable()
            apply_settings(settings, before)
            yield
        finally:
            if collects:
                gc.enable()


class ScopeTimes:
    """A scope callback that adds up time by scope path, and calls the caller's own if there is one.

    Time is the host's, from begin to end, of the outermost pass where a scope is entered again inside itself. What
    stops the replay's clock is not counted.
    """

    def __init__(self, clock: RunClock, then: OnScope | None) -> None:
        self._clock = clock
        self._then = then
        self._open: dict[str, list[int]] = {}
        self._totals: dict[str, int] = {}

    def __call__(self, event: str, name: str, path: str, ordinal: int) -> None:
        now = self._clock.now()
        if event == "begin":
            self._open.setdefault(path, []).append(now)
        elif self._open.get(path):
            began = self._open[path].pop()
            if not self._open[path]:
                self._totals[path] = self._totals.get(path, 0) + now - began
        if self._then is not None:
            self._then(event, name, path, ordinal)

    def totals(self) -> dict[str, int]:
        """Nanoseconds by scope path."""
        return dict(self._totals)
