"""The recorder: starts a capture, keeps its presence in all threads, and completes the file however the program ends.

`keep_dynamo_out` keeps Dynamo out of the recorder's own code. While a compiled function runs that Dynamo could not
compile as a whole, it looks at each frame of Python that is called on the way: the recorder's, too, which would be
compiled with the program's operators and the recorder's state as their constants.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, Unpack

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from replayfmt.errors import CaptureFailed, NothingCaptured, OpReplayError, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.keywords import explained
from replayfmt.format.output import same_file
from replayfmt.format.validation import check_kind, path_of, tell, text_of
from replayfmt.pytorch.environment import set_up_vector_math
from replayfmt.pytorch.operators import OpaqueResults
from replayfmt.pytorch.tensors.memory import call_undispatched

from . import capture_session
from .capture_session import CaptureSession
from .code.graph_replays import Graphs
from .code.triton_launches import TritonLaunches
from .collectives import CollectiveHooks
from .dispatch.custom_operators import DeclaredWork, ObservingMode
from .dispatch.mode import RecordingMode, mode_stack, remove_finished_modes
from .dispatch.native_mode import NativeMode
from .dispatch.whole_composites import WholeComposites
from .frames import codes_in, in_recorders_work
from .hooks.host_access import DirectWrites, HostReads
from .hooks.user_code import Construction, Interruptions
from .kernels import Attached, CapturedKernel
from .options import CaptureKeywords, CaptureOptions
from .patches import Patched, Watch
from .program.children import AfterFork, ChildrenSeen, child_path
from .program.module_scopes import ModuleScopes
from .program.process import ProgramReplacement, Termination, end_if_stuck
from .program.thread_attachment import HookAttachment, ModeAttachment, ThreadAttachment
from .program.threads import HiddenThread, Threads
from .stream.device_streams import StreamTrace
from .stream.records import Unrepresentable
from .stream.scopes import ImplicitScope
from .stream.session import Session
from .undispatched import Hooks

_PACKAGE = __name__.partition(".")[0]


@functools.cache
def keep_dynamo_out() -> None:
    """Have Dynamo leave the recorder's frames alone, for as long as the process lives. What the program's operators
    call in between is not the recorder's."""
    dynamo = torch._C._dynamo.eval_frame
    skip, go_on = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for code in _codes(module):
                dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, go_on))
    # With what they call, which is never the program's. The second's code is that of all attempted methods, the third's
    # that of all that the hook calls.
    whole = (
        capture_session.CaptureSession.attempt,
        capture_session.CaptureSession.before,
        NativeMode.before,
        ModuleScopes._begin,
        ModuleScopes._end,
    )
    for function in whole:
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions, of its classes' methods, and of the functions that these make."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for member in vars(value).values() if isinstance(value, type) else [value]:
            for each in (member.fget, member.fset) if isinstance(member, property) else [member]:
                yield from _codes_of(each)


def _codes_of(member: Any) -> Iterator[CodeType]:
    function = getattr(member, "__func__", member)
    while isinstance(function, FunctionType):
        if function.__globals__.get("__name__", "").partition(".")[0] == _PACKAGE:  # not a decorator's of another's
            yield from codes_in(function.__code__)
        function = getattr(function, "__wrapped__", None)


_T = TypeVar("_T")
_Step = TypeVar("_Step", bound=Callable[..., Any])
_PATIENCE_S = 5.0  # for the recorder's own thread to end
_active: Recorder | None = None
_activation = threading.Lock()


def _attach(core: CaptureSession, attached: Iterable[Attached]) -> None:
    """Keep what belongs to no kernel."""
    with core.lock:
        core.writer.attach(attached)


def _attempted(step: _Step) -> _Step:
    """Answer what a hook asks in the middle of the program as an attempt (see `CaptureSession.attempt`): None if
    it fails."""

    @functools.wraps(step)
    def attempted(recorder: Recorder, *args: Any) -> Any:
        core = recorder._core
        return step(recorder, *args) if core is None else core.attempt(step, recorder, *args)

    return attempted  # type: ignore[return-value]


class Recorder:
    """One capture. Not reusable: a second capture needs a second recorder."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: CaptureOptions | None = None,
        implicit_scope: str | None = None,
        on_replacement: Callable[[str | None], None] | None = None,
        children: ChildrenSeen | None = None,
    ) -> None:
        """`implicit_scope`: the name of the scope around everything, if the program has no scopes of its own.
        `on_replacement(function)` closes the capture; `function` is the name of the one by which the program replaces
        itself (None: it ends at once). `children`: those that its owner sees, from before the capture on."""
        self.path = path_of("path", path)
        if options is not None:
            check_kind("options", options, CaptureOptions)
        self.options = CaptureOptions() if options is None else options
        self._core: CaptureSession | None = None
        self._presence: ThreadAttachment | None = None
        self._patches: list[Patched] = []
        self._on_replacement = on_replacement or self._close_for_replacement
        self._after_fork: AfterFork | None = None
        self._children = children
        self._dynamo: Watch | None = None
        self._threads: Threads | None = None
        self._flusher: HiddenThread | None = None
        self._closed = False
        self._forked = False
        self._implicit_scope = implicit_scope
        self._step_hook: RemovableHandle | None = None
        self._termination = Termination(self._close_for_signal)

    # -------------------------------------------------------------------------------------------------------- lifecycle

    def start(self) -> None:
        """Start recording the threads of this process.

        Raises CaptureFailed if another dispatch mode or another capture is active or the file cannot be written,
        OutputExists if the file exists, UsageError if it is one of `options.files`.
        """
        global _active
        if self._core is not None or self._closed:
            raise CaptureFailed(f"{self.path}: this recorder was started before; make a new one for another capture")
        for each in self.options.known_files:
            if same_file(each, self.path):
                raise UsageError(f"{self.path}: the capture would take the place of a file that it refers to")
        with _activation:
            if _active is not None:
                raise CaptureFailed(f"{self.path}: a capture to {_active.path} is in progress; close it first")
            remove_finished_modes()
            if mode_stack():
                names = ", ".join(type(mode).__name__ for mode in mode_stack())
                raise CaptureFailed(
                    f"{self.path}: a dispatch mode is active ({names}), so what it replaces could not be replayed; "
                    "start the capture outside of it"
                )
            with self._in_order():
                self._core = CaptureSession(self.path, self.options)
            _active = self
        try:
            with self._in_order():
                self._begin(self._core)
        except BaseException:
            self._closed = self._core.finished = self._core.closed = True
            self._put_back(self._core)
            self._core.writer.discard()
            raise

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """A step of the start: whatever this PyTorch lacks for it is one clear error."""
        try:
            yield
        except OpReplayError:
            raise
        except Exception as error:
            what = f"{self.path}: the capture could not be started with torch {torch.__version__}: {error!r}"
            raise CaptureFailed(what) from error

    def _begin(self, core: CaptureSession) -> None:
        """Put into the process what records. A start that fails in here is undone by `_put_back`."""
        if "torch._dynamo" in sys.modules:  # else nothing is compiled before it is imported
            keep_dynamo_out()
        self._dynamo = Watch("torch._dynamo", lambda _module: core.attempt(keep_dynamo_out))
        hook = core.hook
        self._presence = ModeAttachment(core, ObservingMode(core)) if hook is None else HookAttachment(core, hook)
        self._threads = Threads(self._presence, core)
        self._after_fork = AfterFork(self.disable_after_fork)
        self._patches = [
            Hooks(self, self.options.compiled),
            TritonLaunches(self),
            Graphs(self),
            HostReads(self),
            DirectWrites(self),
            Interruptions(
                self._misses, lambda operator: core.interrupting.append(operator) if core.on else None, core.attempt
            ),
            CollectiveHooks(self, core),
            *([Construction(self)] if hook is None else []),
            WholeComposites(self, core.look_again),
            DeclaredWork(self, core),
            ProgramReplacement(self._on_replacement),
            *([] if core.streams is None else [StreamTrace(self, core.streams, core.lock)]),
        ]
        if self._children is None:
            self._children = ChildrenSeen(os.path.abspath(self.path), self.options)
            self._patches.append(self._children)
        core.children = self._about_children
        core.joining = True
        for patches in self._patches:
            patches.install()
        if self.options.steps is not None:
            self._step_hook = register_optimizer_step_post_hook(self._step_ended)
        self._termination.install(only_default=True)
        self._threads.install()
        with self.hidden():
            core.attempt(call_undispatched, set_up_vector_math)
        if self._implicit_scope is not None:
            core.implicit = ImplicitScope(self._implicit_scope)
        core.joining = False
        if core.implicit is None and not self.options.starts_late:
            core.resume()
        core.attempt(self._threads.started)
        core.look = self._threads.look
        self._flusher = HiddenThread(self._flush_loop)
        self._flusher.start()

    def close(self) -> None:
        """Stop recording and complete the file. Idempotent. Raises the first failure of any write, and NothingCaptured
        if no op was recorded."""
        global _active
        if self._closed:
            return
        self._closed = True
        core = self._core
        if core is None:
            return
        problem: Exception | None = None
        try:
            if not self._forked:
                if self._threads is not None:
                    core.attempt(self._threads.check)
                with self.paused():
                    for patches in self._patches:
                        if isinstance(patches, TritonLaunches):
                            core.attempt(_attach, core, patches.configurations.attached)
                    core.finish()
        except Exception as error:
            if not core.failed(error):
                raise
            problem = error
        finally:
            problem = self._put_back(core) or problem
        if problem is not None and core.failure is None:
            raise CaptureFailed(f"{self.path}: the capture could not be ended in order: {problem!r}") from problem
        if self._flusher is not None and not self._forked:
            core.attempt(self._flusher.join, _PATIENCE_S)
        if core.failure is not None:
            raise core.failure
        if not self._forked:
            self._check_content(core)

    def _check_content(self, core: CaptureSession) -> None:
        """Refuse a capture that holds no op, whatever the reason. Raises NothingCaptured."""
        summary = core.writer.summary
        if summary is None or summary.records.get(RecordKind.op):
            return
        limits = " within the limits of what is to be recorded" if self.options.limited else ""
        what = f"{self.path}: no op was captured{limits}"
        if summary.unsupported:
            raise NothingCaptured(what, "the file was kept because it records unsupported work")
        core.writer.withdraw()
        raise NothingCaptured(f"{what}; this process ran no PyTorch operator", "the empty file was removed")

    def _put_back(self, core: CaptureSession) -> Exception | None:
        """Undo everything that recording changed in the process. Returns the first problem, if any."""
        first = None
        steps = [self._termination.remove]
        if self._dynamo is not None:
            steps.append(self._dynamo.stop)
        if self._step_hook is not None:
            steps.append(self._step_hook.remove)
        if self._threads is not None:
            steps.append(self._threads.remove)
        steps += [patches.remove for patches in self._patches]
        if self._after_fork is not None:
            steps.append(self._after_fork.stop)
        for step in (*steps, core.flushing.wake):
            try:
                step()
            except Exception as error:
                first = first or error
        with _activation:
            _set_inactive(self)
        return first

    def _close_for_signal(self) -> None:
        try:
            self.close()
        except NothingCaptured as error:
            tell(f"opreplay: {error}")
        except CaptureFailed:  # was reported when it happened
            pass

    def _close_for_replacement(self, function: str | None) -> None:
        if self._forked:
            return
        if function is not None:
            tell(f"opreplay: the program replaces itself ({function}): the capture to {self.path} ends here")
        self._close_for_signal()

    def disable_after_fork(self) -> None:
        """In a forked child: record nothing, and leave the parent's file alone."""
        self._forked = True
        core = self._core
        if core is not None:
            core.on = False
            core.finished = core.closed = True  # an op that forked is under way still, and must write nothing
            if not core.lock._is_owned():  # type: ignore[attr-defined]
                core.lock._at_fork_reinit()  # type: ignore[attr-defined]  # another thread may have held it
        if self._threads is not None:
            self._threads.forked()
        for patches in self._patches:
            patches.remove()
        if self._dynamo is not None:
            self._dynamo.stop()
        self._termination.remove()
        _set_inactive(self)

    def _about_children(self) -> list[str]:
        """A sentence for each child process that worked."""
        core, children = self._core, self._children
        assert core is not None and children is not None
        records = self.options.children == "record"

        def ran(pid: int) -> bool | None:
            file = child_path(children.path, pid)
            if records and children.by_multiprocessing(pid):
                return os.path.exists(file) or os.path.exists(f"{file}.partial")
            return core.thread_watch.ran_in_child(pid)

        found = []
        for pid, what in children.worked(ran).items():
            if ran(pid) is None and not children.by_multiprocessing(pid):
                continue  # a command of its own, which the capture's end names; only what works for this program counts
            did = "ran" if ran(pid) else "may have run"
            beside = records and children.by_multiprocessing(pid)
            file = os.path.basename(child_path(self.path, pid))
            where = f"its own capture is {file}" if beside else "none of its work is recorded here"
            found.append(f"the child process {pid} ({what}) {did} operators; {where}")
        return found

    @property
    def in_flight(self) -> int:
        """How many operators of other threads began before recording did and ended later: they are not recorded, and
        what they wrote is imported."""
        return 0 if self._core is None else self._core.in_flight

    @property
    def failure(self) -> Exception | None:
        """Why recording ended early, if it did."""
        return None if self._core is None else self._core.failure

    def unmatched(self) -> list[str]:
        """A message for every option that named something that did not occur. Valid once the capture is closed."""
        core, scope = self._core, self.options.stop_scope
        if core is None or core.failure is not None:
            return []
        found = OpaqueResults(self.options.opaque_results).unmatched(core.calls.operators)
        found += core.insides.unmatched()
        found += [
            f"--reads-unwritten={name}: no memory that nothing wrote was read in a scope of that name"
            for name in self.options.reads_unwritten
            if name not in core.unwritten_scopes
        ]
        steps = core.progress.unmatched()
        if steps is not None:
            found.append(steps)
        if scope is not None and not core.stop_scope_left:
            found.append(
                f"--stop-scope={scope}: no scope of that name was left while recording; all that followed is recorded"
            )
        return found

    def notes(self) -> list[str]:
        """What is worth knowing of the capture besides its records. Valid once it is closed."""
        core = self._core
        if core is None or core.failure is not None:
            return []
        found, left_out = list(core.records.notes), len(core.digests.left_out)
        if left_out:
            found.append(
                f"{left_out} of the storages were written in part, at places that are not known or too many: a replay "
                "does not compare all that was written there"
            )
        return found

    def _misses(self) -> bool:
        """Whether the recorder works in the calling thread, and would not see what else that runs."""
        presence, threads = self._presence, self._threads
        if presence is None or threads is None or presence.mode_now() is not None:
            return False
        if any(isinstance(mode, RecordingMode) and mode.core is self._core for mode in mode_stack()):
            return False  # one that observes an operator
        return threads.has_joined() or in_recorders_work()

    def _flush_loop(self) -> None:
        core = self._core
        assert core is not None
        core.attempt(core.scopes.stand_in)
        while not self._closed and core.failure is None:
            core.attempt(core.flushing.wait)
            core.flush()
            core.attempt(end_if_stuck, core.thread_watch)

    # ----------------------------------------------------------------------------------------------------------- scopes

    def scope_begin(self, name: str) -> None:
        """Enter a scope of this thread."""
        text_of("scope", name)
        core = self._running()
        if core is not None:
            core.scope_begin(name, user=True)

    def scope_end(self, name: str) -> None:
        """Leave the innermost scope of that name, and the scopes open inside it. Raises UsageError if none is open."""
        core = self._running()
        if core is not None:
            with self.paused():
                scope = core.scopes.innermost(name)
                core.scope_end(scope)

    def module_scope_begin(self, name: str) -> None:
        """Enter a scope that the program did not name itself: no digests are taken at its end."""
        core = self._running()
        if core is not None:
            core.scope_begin(name, user=False, token="module")

    def module_scope_end(self, name: str) -> None:
        """Leave it. Does nothing if it has already ended together with an enclosing scope."""
        core = self._running()
        if core is not None:
            entered = core.attempt(core.scopes.find, lambda entry: entry.token == "module" and entry.name == name)
            if entered is not None:
                core.scope_end(entered)

    def _step_ended(self, *_step: Any) -> None:
        core = self._running()
        if core is not None:
            with self.paused():
                core.step_ended()

    def _running(self) -> CaptureSession | None:
        core = self._core
        return None if core is None or core.finished or self._closed else core

    # ----------------------------------------------------------------------------------- for the hooks: see `HookHost`

    @_attempted
    def present(self) -> bool:
        core = self._core
        return core is not None and not core.finished and self._mode_now() is not None

    @_attempted
    def launching(self) -> bool:
        core = self._core
        for mode in mode_stack() if core is not None else ():
            if isinstance(mode, RecordingMode) and mode.core is core:
                mode.launched = True
        return self.recording()

    def in_any_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._threads is None else self._threads.in_any_thread(function)

    @_attempted
    def inside(self) -> bool:
        core = self._core
        return core is None or not core.on or self.within()

    @_attempted
    def within(self) -> bool:
        presence = self._presence
        hidden = presence is not None and presence.joined() and self._mode_now() is None
        return hidden or in_recorders_work()

    @_attempted
    def recording(self) -> bool:
        core = self._core
        return core is not None and self._mode_now() is not None and bool(core.on or core.begins())

    @_attempted
    def mode_here(self) -> RecordingMode | None:
        core, mode = self._core, self._mode_now()
        if mode is None and core is not None and not core.finished:
            mode = next((each for each in mode_stack() if isinstance(each, RecordingMode) and each.core is core), None)
        return mode

    @_attempted
    def graph_here(self) -> bool:
        mode = self.mode_here()
        return mode is not None and mode.captures_graph

    def is_on(self) -> bool:
        return self._core is not None and self._core.on

    def hidden(self) -> AbstractContextManager[None]:
        return nullcontext() if self._presence is None else self._presence.hidden()

    def issue(self, kernel: CapturedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = self.mode_here()
        if mode is None:
            return kernel.call(*args, **kwargs)
        with self.hidden():
            return mode.issue(kernel, args, kwargs)

    def sees_first(self) -> bool:
        core, presence = self._core, self._presence
        return presence is not None and core is not None and not core.finished and presence.sees_first()

    def _mode_now(self) -> RecordingMode | None:
        return None if self._presence is None else self._presence.mode_now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        presence = self._presence
        with presence.paused() if presence is not None else nullcontext():
            yield

    def attempt(self, step: Callable[..., _T], *args: Any) -> _T | None:
        """Run recorder code in the middle of the program: see `CaptureSession.attempt`."""
        core = self._core
        return None if core is None else core.attempt(step, *args)

    def unsupported(self, reason: str, op: str, detail: str) -> int | None:
        return self.tell(lambda core: core.records.unsupported(reason, op, detail))

    def unsupported_throughout(self, reason: str, op: str, detail: str) -> None:
        core = self._core
        if core is not None:
            core.attempt(_tell_throughout, core, (reason, op, detail))

    def mark_outside_write(self, tensor: torch.Tensor) -> bool:
        return bool(self.tell(lambda core: core.outside.written(tensor)))

    @property
    def session(self) -> Session:
        """What the capture in progress knows."""
        assert self._core is not None
        return self._core.session

    @_attempted
    def host_read(self, method: str, tensor: torch.Tensor) -> None:
        core = self._core
        if core is not None and self._mode_now() is not None and (core.on or core.begins()):
            _tell(core, lambda core: core.outside.host_read(method, tensor), ())

    def watch(self, storage: torch.UntypedStorage, *, windowed: bool = True) -> None:
        self.tell(lambda core: core.outside.shared(storage, windowed))

    def tell(self, what: Callable[..., _T], *args: Any) -> _T | None:
        core = self._core
        return core.attempt(_tell, core, what, args) if core is not None and core.on else None


@explained(CaptureKeywords, CaptureOptions)
@contextmanager
def capture(path: str | os.PathLike[str], **options: Unpack[CaptureKeywords]) -> Iterator[Recorder]:
    """Record the work done inside the block into `path`. The options are the fields of CaptureOptions.

    Raises what `Recorder.start` raises, and on leaving what `Recorder.close` raises, unless an exception of the program
    is propagating: that one takes precedence (a failure was reported on stderr).
    """
    recorder = Recorder(path, CaptureOptions.of("capture", {**options}))
    recorder.start()
    try:
        yield recorder
    except BaseException:
        with suppress(CaptureFailed):  # reported when it happened; the program's own exception matters more
            recorder.close()
        raise
    recorder.close()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a region. Does nothing if nothing is being recorded, nor in code that is compiled: around a call of that it
    does."""
    if torch.compiler.is_compiling():  # or the code would be another under a capture
        yield
        return
    text_of("scope", name)
    recorder = _active
    core = None if recorder is None else recorder._running()
    if recorder is None or core is None:
        yield
        return
    entered = core.scope_begin(name, user=True)
    try:
        yield
    finally:
        with recorder.paused():
            core.scope_end(entered)


def _tell(core: CaptureSession, what: Callable[..., _T], args: tuple[Any, ...]) -> _T | None:
    with core.lock:
        if core.on:
            try:
                return what(core, *args)
            except Unrepresentable as problem:
                core.records.unsupported(problem.reason, "", problem.detail)
    return None


def _tell_throughout(core: CaptureSession, said: tuple[str, str, str]) -> None:
    with core.lock:
        if core.on:
            core.records.unsupported(*said)
        else:
            core.records.from_start.append(said)


def _set_inactive(recorder: Recorder) -> None:
    global _active
    if _active is recorder:
        _active = None
