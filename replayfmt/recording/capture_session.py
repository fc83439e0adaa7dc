"""All state of one capture in progress, the one lock around it, and the steering of the hot path.

The hot path is a session (stream/session.py) in C++, which records calls without Python.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunction

from replayfmt.errors import CaptureFailed, OpReplayError
from replayfmt.format.model import CHILD_WORK, CaptureInfo
from replayfmt.format.redaction import KeptAttachments, Redaction
from replayfmt.format.validation import counted, tell
from replayfmt.format.writer import CaptureWriter
from replayfmt.native.building import NotAvailable, say_missing
from replayfmt.native.hook import DispatchHook, dispatch_hook
from replayfmt.native.watching import thread_watch
from replayfmt.pytorch.accelerators import followed_kind, synchronize
from replayfmt.pytorch.environment import read_settings, session_fields
from replayfmt.pytorch.operators import OpaqueResults
from replayfmt.pytorch.tensors.digests import use_native
from replayfmt.pytorch.tensors.memory import storage_of

from .arguments import OpCall
from .calls import CallRecorder, PassedThrough
from .collectives import InFlight, Launch
from .composite_operators import INEXACT, CompositePolicy, autocast_below_mode
from .content.first_content import FileBackedStorages, FirstContents
from .frames import is_interrupt
from .inductor import graph_policies
from .kernels import CapturedKernel, devices_of, tensors_in
from .options import CaptureOptions
from .special_values import LEAST_ADDRESS, Handles, plain_parts
from .storages.digesting import Digests, Outside
from .storages.identity import RELEASE_BATCH, Storages
from .stream.buffer import FlushTimes, RecordBuffer
from .stream.device_streams import IN_UNSEEN_CAPTURE, Streams, stream_policies
from .stream.program_state import Generators, NumericState
from .stream.records import Records, RedactedWriter, TensorMetas, Unrepresentable, user_names
from .stream.scopes import ImplicitScope, OpenScope, Scopes
from .stream.session import Session
from .undispatched import hook_policies


def allowed(options: CaptureOptions) -> bool:
    """Whether calls may be recorded there. (Otherwise there is something to do around each.)"""
    return not (options.audit or options.digests == "ops" or options.stop_op is not None)


@contextmanager
def pause_fast_path(session: Session, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Other threads append no record meanwhile: their calls take the complete path, which waits for the recorder's lock
    (the caller holds it). `goes_on`: whether recording does, afterwards."""
    if not session.hot:
        yield
        return
    try:
        session.hot = False
        yield
    finally:
        session.hot = goes_on()


_T = TypeVar("_T")
_Step = TypeVar("_Step", bound=Callable[..., Any])
_BEHIND = 4  # frames' worth of records that may wait


def _attempted(step: _Step) -> _Step:
    """Run a method of `CaptureSession` as an attempt (see `CaptureSession.attempt`)."""

    @functools.wraps(step)
    def attempted(core: CaptureSession, *args: Any) -> Any:
        return core.attempt(attempted.__wrapped__, core, *args)

    return attempted  # type: ignore[return-value]


def _hook(options: CaptureOptions) -> tuple[DispatchHook | NotAvailable | None, str]:
    """The hook to record with, or None to use a dispatch mode, and the session's text about it."""
    if options.recorder == "python":
        return None, "python"
    if options.native == "off":
        return None, "python: native code is off"
    found = dispatch_hook()
    return found, f"python: {found.reason}" if isinstance(found, NotAvailable) else "native"


class CaptureSession:
    """One capture in progress. `on`: whether recording is on now."""

    def __init__(self, path: str | os.PathLike[str], options: CaptureOptions) -> None:
        """Create the file. Raises CaptureFailed or OutputExists."""
        self.thread_watch = thread_watch(options.native or "auto")
        hook, recorder = _hook(options)
        self.hook = hook if isinstance(hook, DispatchHook) else None
        without = {
            "recording with the recorder that is written in Python": hook,
            "operators that run in threads of C++ code go unnoticed": self.thread_watch.problem,
        }
        say_missing({what: problem for what, problem in without.items() if isinstance(problem, NotAvailable)})
        if self.thread_watch.state == "native" and options.digests != "none":
            use_native()
        policies = {
            **options.policies(),
            **hook_policies(),
            **graph_policies(options.compiled),
            **stream_policies(),
            "thread-watch": self.thread_watch.state,
            "recorder": recorder,
        }
        if self.hook is None:
            policies["exactness"] = INEXACT
        session = CaptureInfo(**session_fields(), settings=read_settings(), policies=policies)
        redaction = Redaction(session, user_names()) if options.redact else None
        self.options = options
        self.lock = threading.RLock()
        if redaction is None:
            self.writer = CaptureWriter(path, session, force=options.force)
        else:
            self.writer = RedactedWriter(path, session, redaction, force=options.force)
        try:
            self._prepare(session, redaction)
        except BaseException:
            self.writer.discard()
            raise

    def _prepare(self, info: CaptureInfo, redaction: Redaction | None) -> None:
        """Make what records into the file."""
        options, hook = self.options, self.hook
        if redaction is not None or not options.sources:
            redaction_of_code = redaction or Redaction(info, user_names())
            self.writer.keeps = KeptAttachments(redaction_of_code, options.sources)
        self.started = time.perf_counter_ns()
        scalars = options.payload == "full"
        session = Session()
        if hook is not None:
            session = hook.session(self.started, options.chunk_records, scalars, LEAST_ADDRESS)
        self.session = session
        self.buffer = RecordBuffer(self.writer, options.chunk_records, self.lock, session, self.started)
        self.threads: list[int] = []  # idents of other threads that record; empty while there is one thread
        self.records = Records(self.buffer)
        self.scopes = Scopes(self.buffer, self.records, self.threads)
        followed = followed_kind()
        self.streams = Streams(self.buffer, self.records, followed, session) if followed else None
        self._in_unseen_capture: Callable[[], bool] = self.streams.in_unseen_capture if self.streams else bool
        if self.streams is not None:
            self.buffer.placement = self.streams.placement
        self.metas = TensorMetas(self.records, session)
        files = FileBackedStorages(self.writer, options, redaction) if options.file_policy is not None else None
        self.contents = FirstContents(self.writer, options, files)
        handles = Handles()
        self.storages = Storages(self.records, self.metas, self.contents, handles, session, audit=options.audit)
        if self.streams is not None:
            self.storages.settle = self.wait_for_devices
        self.storages.watches_natively = session.watches and self.streams is None  # else devices may write meanwhile
        self.storages.readable = lambda: not (self.graph_captures or self._in_unseen_capture())
        self.storages.unexplained.expected = self._expects_unwritten
        self.generators = Generators(self.buffer, self.records, session, states=self.contents.recorded)
        self.numeric = NumericState(self.records, session)
        self.thread_watch.tell_how_to_cover(session)
        self.scopes.contexts.follow(session.set_context)
        self.digests = Digests(self.buffer, self.records, self.metas, self.storages)
        digests = self.digests if options.digests != "none" else None
        if digests is not None:
            self.storages.digest_written = digests.written_ranges
        self.outside = Outside(self.records, self.metas, self.storages, digests)
        self.calls = CallRecorder(
            self.buffer,
            self.records,
            self.metas,
            self.storages,
            self.generators,
            self.numeric,
            self.digests,
            handles,
            digest_results=options.digests == "ops",
            digests_anything=options.digests != "none",
            scalars=scalars,
            opaque=OpaqueResults(options.opaque_results),
            threads=self.threads,
        )
        self.collectives = InFlight(self, options.collective_results != "none")
        self.children: Callable[[], list[str]] = list  # sentences about child processes that worked
        self.look: Callable[[], None] = lambda: None  # finds threads that began unseen
        self.ask_to_leave: Callable[[], None] = lambda: None  # the calling thread drops the modes of finished captures
        self.flushing = FlushTimes(session)
        self.on = False
        self.began = False  # it has been on
        self.joining = False  # threads are joining the capture: recording begins for all of them at once
        self.several = False  # more than one thread of the program has joined
        self.in_flight = 0  # ops that ended while recording is on, and began before it was
        self.finished = False  # recording stopped for good: closed, failed, or past its stop
        self.closed = False  # the file is no longer touched, nothing is reported
        self.failure: OpReplayError | None = None
        self.ops_seen = 0
        self.progress = options.progress()
        self.stop_scope_left = False  # the scope at whose end recording stops has ended
        self.unwritten_reads = 0  # calls of PyTorch's in progress that read memory which no captured op wrote
        self.graph_captures = 0  # how many graphs of a device are being captured: no memory of it can be read
        self.unwritten_scopes: set[str] = set()  # those of `reads_unwritten` in which such a read occurred
        # Operators of finalizers and signal handlers in the middle of the recorder's work, not told yet.
        self.interrupting: deque[str] = deque()
        self.arrivals: Counter[str] = Counter()  # calls seen of other packages' operators
        self.insides = CompositePolicy(options.inside, options.whole)
        self.implicit: ImplicitScope | None = None  # if set, recording begins with the first thing to record

    # --------------------------------------------------------------------------------------------------- start and stop

    def resume(self) -> None:
        with self.lock:
            if not self.on and not self.finished:
                if self.implicit is not None:
                    self.implicit.begin(self.scopes)
                if self.options.starts_late:
                    self.thread_watch.collect()  # nothing before this point is recorded
                self.scopes.record_open()
                self.on = self.began = True
                self.records.begin()
                self.session.hot = allowed(self.options) and not self.calls.some_replaced

    @_attempted
    def begins(self) -> bool:
        """Whether recording has begun, or begins with what is about to happen. Ops decide for themselves."""
        if self.joining:
            return False
        # Where it starts late, only an op, a scope or a step can make it begin.
        waits = self.options.starts_late and (self.options.steps is None or self.progress.waits())
        if self.implicit is not None and not waits:
            self.resume()
        return self.on

    @_attempted
    def step_ended(self) -> None:
        """The step() of an optimizer returned. If the next step is to be recorded, it begins with the next action: the
        optimizer's own scope has ended by then."""
        with self.lock:
            if not self.finished and self.progress.step_ended():
                self.stop()

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        with self.lock:
            self.session.hot = False
            if self.on:
                self.settle()
                self.storages.unexplained.report_kept(list(self.storages.live.values()))
                self.scopes.record_ends()
            self.on = False
            self.finished = True

    def settle(self) -> None:
        """Record releases, digests and unseen work up to now; while a graph is captured, digests wait."""
        self.storages.drain()
        self.storages.adopt_all()
        for unseen in self.thread_watch.collect():
            self.records.unsupported(unseen.reason, unseen.first, unseen.sentence())
        if self.interrupting:
            first, count = self.interrupting[0], len(self.interrupting)
            self.interrupting.clear()
            self.records.unsupported(
                "unseen_work",
                first,
                f"finalizers or signal handlers in the middle of the recorder's work ran {counted(count, 'operator')}, "
                f"{first} first, which are not recorded: call gc.collect() at times, or gc.freeze() and gc.disable(), "
                "so that finalizers run elsewhere, and have signal handlers only note that they were called",
            )
        if self.options.digests == "live" and not self.graph_captures and not self._in_unseen_capture():
            writing = self.calls.being_written() | self.collectives.being_written()
            self.digests.sweep(writing.union(self.session.being_written()))

    def wait_for_devices(self) -> None:
        """What the recorder is about to read may be written by any stream. This wait is its own: it has no record."""
        if not self.graph_captures and not self._in_unseen_capture():
            synchronize()

    def finish(self) -> None:
        """Write the remaining records and complete the file. Raises CaptureFailed."""
        with self.lock:
            try:
                if not self.on and not self.options.starts_late and self.thread_watch.has_counted():
                    self.begins()  # the only thing to report is work that was not recorded
                self.stop()
                self.storages.drain()
                for change in self.contents.changed_files():
                    said = f"the file {change} while it was captured; --file-policy=capture-ranges embeds what is used"
                    self.records.unsupported("file_changed", "", said)
                for sentence in self.children() if self.began else ():
                    self.records.unsupported(CHILD_WORK, "", sentence)
                self.buffer.flush()
                self.writer.close(max(0, self.buffer.now()))
            except Exception as error:
                if not self.failed(error):
                    raise
            finally:
                self.closed = True
                self.buffer.rows.drop(len(self.buffer.rows))
                self.storages.forget_all()

    def attempt(self, step: Callable[..., _T], *args: Any) -> _T | None:
        """Run recorder code in the middle of the program. No `__torch_function__` of the program sees it, and a failure
        ends the recording, not the program. Returns None on failure."""
        try:
            with DisableTorchFunction():
                result = step(*args)
        except BaseException as error:
            if not self.failed(error):
                raise
            return None
        return result

    def failed(self, error: BaseException) -> bool:
        """Whether an exception is the recorder's own error, which ends the recording. If not, a signal handler of the
        program raised it, and it must propagate."""
        if is_interrupt(error):
            return False
        self.fail(error)
        return True

    def fail(self, error: BaseException) -> None:
        """Recording cannot continue."""
        with self.lock:
            self.on = False
            self.session.hot = False
            self.finished = True
            self.scopes.recorded = False
            if self.failure is not None or self.closed:
                return
            if not isinstance(error, OpReplayError):
                failure = CaptureFailed(f"{self.writer.path}: recording failed on an unexpected {error!r}")
                failure.__cause__ = error
                error = failure
            self.failure = error
            self.buffer.rows.drop(len(self.buffer.rows))
            text = f"opreplay: the capture ended early: {error}; the program continues uncaptured"
            try:
                self.writer.abandon()
            except Exception as second:
                text = f"{text}; what was written could not be stored: {second!r}"
        tell(text)  # without a stderr, only `close` can report it

    # ----------------------------------------------------------------------------------------------------- around an op

    def begin(
        self,
        kernel: CapturedKernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: Callable[[bool], dict[str, str]] = autocast_below_mode,
        drawn: list[tuple[torch.Generator, bytes, bytes]] | None = None,
    ) -> OpCall | Unrepresentable | None:
        """Before an op: record what it needs. Returns Unrepresentable if the call cannot be recorded, None if it is not
        to be. `drawn`: see `CallRecorder.before`. For those whose own step this is a part of."""
        with self.lock:
            if not self.on:  # another thread may have ended the capture since this call began
                return None
            unseen = self.in_unseen_capture(args, kwargs)
            if unseen is not None:
                return unseen
            try:
                return self.calls.before(kernel, args, kwargs, drawn, autocast)
            except Unrepresentable as problem:
                return None if _asserts_of_symbols(kernel, args, kwargs, problem) else problem

    before = _attempted(begin)

    def in_unseen_capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Unrepresentable | None:
        """Why a call with these arguments cannot be recorded, if it becomes a part of a graph that nobody sees."""
        unseen = self._in_unseen_capture() and devices_of(followed_kind(), args, kwargs)
        return Unrepresentable("cuda_graph", IN_UNSEEN_CAPTURE) if unseen else None

    @_attempted
    def register_storages(self, tensors: list[torch.Tensor]) -> None:
        """An op is about to use these tensors: the storages among theirs that the capture does not know enter it."""
        with self.lock:
            if self.on and not self._in_unseen_capture():
                with suppress(Unrepresentable):  # the complete path tells it, if the op takes it
                    for tensor in tensors:
                        self.calls.register_storage(tensor)

    @_attempted
    def ran(self, kernel: CapturedKernel, args: Any, kwargs: Any, result: Any, started: int, ended: int) -> int | None:
        """The complete path for an op that has already run, under the settings that the stream states. Its record's
        signature; None if it has no record."""
        with self.lock:
            call = self.begin(kernel, args, kwargs, autocast_below_mode, [])
            if isinstance(call, Unrepresentable):
                self.unsupported_op(kernel, args, kwargs, call)
                return None
            return None if call is None else self.returned(call, result, started, ended)

    @_attempted
    def before_collective(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Launch | Unrepresentable | None:
        with self.lock:
            return self.collectives.before(kernel, args, kwargs) if self.on else None

    @_attempted
    def after_collective(self, launch: Launch, result: Any) -> None:
        with self.lock:
            if self.on:
                try:
                    self.collectives.after(launch, result)
                except Unrepresentable as problem:
                    self.unsupported_op(launch.kernel, launch.args, launch.kwargs, problem)

    # -------------------------------------------------------------------------------------------------- after an op ran

    @_attempted
    def stream_used(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """The program said that a stream uses a tensor's memory."""
        with self.lock:
            if self.on and self.streams is not None:
                self.outside.used_on(tensor, *self.streams.of(stream))

    def returned(self, call: OpCall, result: Any, started: int, ended: int) -> int | None:
        """After an op returned. Its record's signature; None if it has no record. If a signal handler raises meanwhile,
        the caller must call `interrupted`. For those whose own step this is a part of."""
        with self.lock:
            if not self.on:
                return None
            try:
                signature = self.calls.after(call, result, started, ended)
                call.kernel.recorded(call.args, signature)
                return signature
            except PassedThrough:
                return None
            except Unrepresentable as problem:
                self.unsupported_op(call.kernel, call.args, call.kwargs, problem)
                return None

    recorded = _attempted(returned)

    @_attempted
    def unsupported_op(
        self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
    ) -> None:
        """An op ran that cannot be reproduced; what it wrote is imported again at its next use."""
        with self.lock:
            if self.on:
                self.records.unsupported(problem.reason, kernel.name, problem.detail)
                self._written_unseen(kernel, args, kwargs)

    def _written_unseen(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for index in kernel.writes:
            for tensor in tensors_in(kernel.argument(index, args, kwargs)):
                self.outside.written(tensor)

    @_attempted
    def began_earlier(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op ended that is not recorded, because recording had not begun when it did. If it has by now, what the op
        wrote is imported at its next use."""
        with self.lock:
            if self.on:
                self.in_flight += 1
                self._written_unseen(kernel, args, kwargs)

    @_attempted
    def unreachable_op(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator ran that Python cannot look up: what it did with its arguments is unknown."""
        with self.lock:
            if self.on:
                self.records.unsupported(
                    "opaque_argument", name, f"torch.ops does not give {name}: another attribute has its name"
                )
        self.interrupted(args, kwargs, result)

    @_attempted
    def interrupted(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A signal handler raised while an op was being recorded: its record may be missing or incomplete. The program
        does not get its results; its arguments are imported again at their next use."""
        with self.lock:
            if not self.on:
                return
            for tensor in tensors_in((*args, *kwargs.values())):
                self.outside.written(tensor)
            for plain in (part for tensor in tensors_in(result) for part in plain_parts(tensor)):
                self.storages.forget(storage_of(plain))

    @_attempted
    def raised(self, call: OpCall, started: int, ended: int, interrupted: bool) -> None:
        """An op raised, or a signal handler in it did."""
        with self.lock:
            if self.on:
                self.calls.raised(call, started, ended, interrupted)

    def _expects_unwritten(self) -> bool:
        """Whether memory that no captured op wrote may be read now: by PyTorch's own code, or in one of this thread's
        scopes."""
        if self.unwritten_reads:
            return True
        found = self.scopes.open_of(self.options.reads_unwritten)
        self.unwritten_scopes.update(found)
        return bool(found)

    # ------------------------------------------------------------------------------------------------------- buffering

    @_attempted
    def look_again(self) -> None:
        """The program registered kernels of operators, or took some back."""
        with self.lock:
            if self.calls.look_again():
                self.session.hot = False  # every call takes the complete path from here on

    @_attempted
    def flush_if_due(self) -> None:
        """Called after every op: record releases, and write a part of what waits if it is time: when it is due, or the
        rows of another frame wait."""
        if len(self.storages.dead) >= RELEASE_BATCH or self.session.drains:
            with self.lock:
                self.storages.drain(all_of_them=False)
        waiting = len(self.buffer.rows)
        if waiting >= _BEHIND * self.options.chunk_records:
            self.flush()
        elif waiting >= (1 + self.buffer.writing) * self.options.chunk_records or self.flushing.overdue():
            self._write(self.buffer.write_part)

    @_attempted
    def flush(self) -> None:
        """Write what waits."""
        self._write(self.buffer.flush)

    def _write(self, step: Callable[[], None]) -> None:
        """Write all or a part, and before each frame look for threads that began unseen."""
        self.flushing.begin()
        began = time.thread_time_ns()
        if not self.finished and not self.buffer.writing:
            self.look()
        if self.buffer.writing or self.buffer.rows or self.storages.dead:
            with self.lock:
                if self.failure is None and not self.closed:
                    if not self.buffer.writing:
                        self.storages.drain(all_of_them=False)
                    step()
            self.flushing.end(time.thread_time_ns() - began, self.buffer.writing)

    # ----------------------------------------------------------------------------------------------------------- scopes

    def scope_begin(self, name: str, user: bool, token: Any = None) -> OpenScope:
        return self._scope_begin(name, user, token) or OpenScope(name, 0, user, token)

    @_attempted
    def _scope_begin(self, name: str, user: bool, token: Any) -> OpenScope | None:
        with self.lock:
            if self.finished:
                return None
            if user and self.implicit is not None:
                self.scope_left(self.implicit.give_way(self.scopes))
            if not self.on:
                self.begins()
            scope = self.scopes.begin(name, user, token)
            scope.number = self.progress.scope_begun(name)
            if user and self.options.start_op is None and self.progress.is_start(name, scope.number):
                # It began before recording was on, so it is recorded as the innermost open scope.
                self.resume()
            return scope

    @_attempted
    def scope_end(self, scope: OpenScope) -> None:
        """Leave a scope of this thread and everything inside it."""
        with self.lock:
            self.scope_left(self.scopes.end(scope))

    @_attempted
    def thread_ended(self) -> None:
        """Leave the scopes of this thread."""
        with self.lock:
            self.scope_left(self.scopes.thread_ended())

    def scope_left(self, left: list[OpenScope]) -> None:
        if not self.on:
            return
        if any(scope.user for scope in left):
            with pause_fast_path(self.session, lambda: self.on) if self.threads else nullcontext():
                self.settle()
        if any(self.progress.is_stop(scope.name, scope.number) for scope in left):
            self.stop_scope_left = True
            self.stop()


def _asserts_of_symbols(
    kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Unrepresentable
) -> bool:
    """Whether a tracer only notes what holds of its symbols: no tensor goes in or comes out."""
    return problem.reason == "symbolic_argument" and kernel.results == 0 and not tensors_in((*args, *kwargs.values()))
