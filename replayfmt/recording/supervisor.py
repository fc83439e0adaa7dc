"""One program under capture, from before its first line to after its last: what `opreplay-capture` does.

The recorder starts when the program has imported torch, so that what the program sets before that (mostly environment
variables) takes effect. The capture closes when the interpreter exits: after the program's other threads and its atexit
handlers, with the program's exit code, or 1 if only the capture failed. Imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import platform
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from replayfmt.errors import CaptureFailed, NothingCaptured, OpReplayError, UsageError
from replayfmt.format.codes import RecordKind
from replayfmt.format.output import RANK_FILE, check_place, identity, is_folder, make_folder, remove, same_file
from replayfmt.format.validation import counted, printable, scope_count
from replayfmt.native.ending import prepare

from .options import CaptureOptions
from .patches import Watch
from .program.children import IMPLICIT_SCOPE, AfterFork, ChildrenSeen
from .program.marks import Mark, Marks
from .program.process import BuildEnded, ProgramReplacement, Termination, TorchFirst
from .program.running import Program, compile_source

if TYPE_CHECKING:
    from .program.module_scopes import ModuleScopes
    from .recorder import Recorder


def output_path(template: str, environment: dict[str, str], pid: int) -> str:
    """`template` with `{rank}`, `{pid}` and `{host}` filled in. What torchrun starts again, after a rank has failed,
    goes to `restart1`, `restart2`, ...: the earlier files are there. Raises UsageError if ranks would share a file,
    CaptureFailed for a folder without ranks."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        rank, ranks, restarts = (int(environment.get(name) or default) for name, default in names)
    except ValueError as error:
        raise UsageError(
            f"the environment variables {', '.join(name for name, _ in names)} must be integers: {error}"
        ) from None
    template = template.replace("{host}", platform.node())
    if is_folder(template):
        if "RANK" not in environment:
            raise CaptureFailed(
                f"{template}: a folder is for the files of the ranks that torchrun starts (it sets RANK), and this is "
                "one process; name a file to write to"
            )
        template = os.path.join(template, RANK_FILE)
        if restarts:
            folder, name = os.path.split(template)
            above, host = os.path.split(folder)
            of_host = [host] if host == platform.node() else []
            template = os.path.join(above if of_host else folder, f"restart{restarts}", *of_host, name)
        make_folder(os.path.dirname(template))
    elif restarts:
        stem, ending = os.path.splitext(template)
        template = f"{stem}.restart{restarts}{ending}"
    if ranks > 1 and "{rank}" not in template and "{pid}" not in template:
        raise UsageError(
            f"WORLD_SIZE is {ranks}, and every rank would write to {template}; put {{rank}} or {{pid}} "
            "into the name, for instance step.{rank}.opreplay, or give a folder: step/"
        )
    return template.replace("{rank}", str(rank)).replace("{pid}", str(pid))


def check_output(path: str, force: bool, read: Iterable[str]) -> None:
    """Raise now what would prevent writing the capture later: OutputExists, CaptureFailed; UsageError if it would
    overwrite a file that is `read` for it."""
    for each in read:
        if same_file(each, path):
            raise UsageError(f"{path}: the capture would take the place of what it is made from; name another file")
    check_place(path, force)
    check_place(f"{path}.partial", force)


class CapturedProgram:
    """Runs one program once, in this process, and captures what it does."""

    def __init__(
        self,
        program: Program,
        path: str,
        options: CaptureOptions,
        marks: Sequence[Mark] = (),
        module_scopes: bool = False,
    ) -> None:
        """Raises UsageError, OutputExists or CaptureFailed if the program must not be started."""
        program.check()
        check_output(path, options.force, (*options.known_files, *([] if program.is_module else [program.target])))
        self._program = program
        self._path = os.path.abspath(path)  # the program may change its directory
        self._shown_path = path
        self._options = options
        self._marks = Marks(marks, self._scope, program.target if program.is_module else None)
        self._with_module_scopes = module_scopes
        self._module_scopes: ModuleScopes | None = None
        self._recorder: Recorder | None = None
        self._failure: OpReplayError | None = None
        self._children = ChildrenSeen(self._path, options)
        self._after_fork = AfterFork(self._forget)
        self._termination = Termination(self._finish)
        self._replacement = ProgramReplacement(self._replaced)
        self._earlier = identity(path) if options.force else None
        self._torch: Watch | None = None
        self._torch_first = TorchFirst()
        self._forked = False
        self._finished = False
        self._code = 0

    def run(self) -> int:
        """Run the program and return its exit code. The caller passes it to `sys.exit`; the capture closes during
        exit."""
        prepare()
        atexit.register(self._at_exit)  # before any of the program's, so that it runs after them
        self._termination.install()
        self._replacement.install()
        self._children.install()
        self._marks.install()
        self._torch_first.install()
        self._torch = Watch("torch", self._start)
        self._code = self._program.run(self._marks.compiler(compile_source))
        return self._code

    # ------------------------------------------------------------------------------------------------------- start

    def _start(self, _torch: ModuleType) -> None:
        """Start recording. A failure here is the capture's failure; the program continues without it."""
        if self._recorder is not None or self._failure is not None:
            return
        self._torch_first.remove()
        try:
            if threading.current_thread() is not threading.main_thread():
                raise CaptureFailed(
                    f"torch was first imported by the thread {threading.current_thread().name}, so the "
                    "main thread cannot be recorded; import torch before starting threads"
                )
            from .recorder import Recorder

            # Marks are scopes of the program's own.
            implicit = None if self._marks.marks or self._options.start_scope is not None else IMPLICIT_SCOPE
            recorder = Recorder(self._path, self._options, implicit, self._replaced, self._children)
            self._termination.ends_build = True
            with self._children.own():  # the compiler that builds part of the recorder
                recorder.start()
            self._termination.ends_build = False
            self._recorder = recorder
            if self._with_module_scopes:
                from .program.module_scopes import ModuleScopes

                self._module_scopes = ModuleScopes(recorder)
                self._module_scopes.install()
        except BuildEnded:
            self._failure = CaptureFailed(f"{self._shown_path}: SIGTERM came while part of the recorder was built")
            _say(f"opreplay-capture: {self._failure.status}: {self._failure}")
            self._termination.leave()
        except OpReplayError as error:
            self._failure = error
        except Exception as error:
            _show_bug()
            self._failure = CaptureFailed(f"{self._shown_path}: the recorder could not be started: {error!r}")
        if self._failure is not None:
            _say(f"opreplay-capture: {self._failure.status}: {self._failure}; the program continues uncaptured")

    def _scope(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A scope of the program if a capture is recording, else nothing."""
        if self._recorder is None:
            return contextlib.nullcontext()
        from .recorder import scope

        return scope(name)

    # --------------------------------------------------------------------------------------------------------- end

    def _forget(self) -> None:
        """In a forked child: forget the capture."""
        self._forked = True
        self._replacement.remove()
        self._children.remove()
        self._marks.remove()
        if self._torch is not None:
            self._torch.stop()
        if self._module_scopes is not None:
            self._module_scopes.remove()
        self._termination.remove()

    def _replaced(self, function: str | None) -> None:
        """The process is about to run another program, or to end without atexit (None): otherwise the capture would not
        be closed, and its exit code would be lost."""
        if self._finished or self._forked:
            return
        if function is not None:
            _say(
                f"opreplay-capture: the program replaces itself ({function}): the capture ends here and does not "
                f"include what follows"
            )
        self._finish()
        if self._failure is not None and self._earlier is not None and identity(self._path) == self._earlier:
            remove(self._path, self._earlier)
            _say(f"opreplay-capture: the earlier {self._shown_path} was removed: it is not of this program")

    def _at_exit(self) -> None:
        if self._forked:
            return
        self._finish()
        code = self._code or (1 if self._failure is not None else 0)
        if code != self._code:
            # An atexit handler cannot change the exit code. The rest of the interpreter's shutdown is done here.
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not stream.closed:
                    stream.flush()
            _flush_files()
            os._exit(code)

    def _finish(self) -> None:
        """Close the capture and report the result. Only the first call does anything; in a child, none does."""
        if self._finished or self._forked:
            return
        self._finished = True
        if self._torch is not None:
            self._torch.stop()
        self._after_fork.stop()
        self._replacement.remove()
        self._children.remove()
        self._marks.remove()
        if self._module_scopes is not None:
            self._module_scopes.remove()
        try:
            summary = self._close()
        except OpReplayError as error:
            # A rank that had nothing to do: with an exit code for it, torchrun would end those that are at work.
            if not (isinstance(error, NothingCaptured) and int(os.environ.get("WORLD_SIZE") or 1) > 1):
                self._failure = self._failure or error
            _say(f"opreplay-capture: {error.status}: {error}")
        except Exception as error:
            # A bug in the recorder. During exit it would only be printed, and the exit code would be that of a good
            # capture.
            _show_bug()
            self._failure = self._failure or CaptureFailed(f"{self._shown_path}: could not be closed: {error!r}")
            _say(f"opreplay-capture: {self._failure.status}: {self._failure}")
        else:
            if summary:
                _say(f"opreplay-capture: {summary}")
            if self._options.children == "note" and (workers := self._children.workers()):
                _say(f"opreplay-capture: note: {workers}{self._about_children()}")
        for sentence in [] if self._recorder is None else self._recorder.notes():
            _say(f"opreplay-capture: note: {sentence}")
        for sentence in self._marks.never_called():
            _say(f"opreplay-capture: warning: {sentence}")
        unmatched = [] if self._recorder is None else self._recorder.unmatched()
        for sentence in (*self._marks.unmatched(), *unmatched):
            self._failure = self._failure or CaptureFailed(sentence)
            _say(f"opreplay-capture: {CaptureFailed.status}: {sentence}")

    def _close(self) -> str:
        """Close the file and describe it in one line; "" if it never started and that was already reported. Raises
        OpReplayError if it failed or holds no op."""
        if self._recorder is None:
            if self._failure is not None:
                return ""
            raise NothingCaptured(
                f"{self._shown_path}: no op was captured, because the program never imported torch; "
                f"{self._children.sentence()}{self._about_children()}",
                "no file was written",
            )
        nothing = None
        try:
            self._recorder.close()
        except NothingCaptured as error:
            nothing = error
            if not os.path.exists(self._path):
                raise NothingCaptured(f"{self._shown_path}: {self._about_nothing()}", nothing.file) from None
        from replayfmt.format.reader import open_capture

        with contextlib.closing(open_capture(self._path)) as capture:
            summary, length, kernels = capture.summary, capture.length, len(capture.kernels) - 1
            names = len(capture.scopes) - 1
            code = sum(bool(kernel is not None and kernel.attachments) for kernel in capture.kernels)
        ops = summary.records.get(RecordKind.op, 0)
        unsupported = ", ".join(f"{reason} {count}" for reason, count in sorted(summary.unsupported.items())) or "none"
        scopes = scope_count(names, summary.records.get(RecordKind.scope_begin, 0))
        self._write_manifest()
        # For a user who did not ask for code in the capture.
        with_code = f" ({code:,} with code: a replay needs --allow-code)" if code else ""
        text = (
            f"{self._shown_path}: {counted(ops, 'op')} of {counted(kernels, 'kernel')}{with_code}, {scopes}, "
            f"{counted(length, 'byte')}; "
            f"unsupported: {unsupported}"
        )
        if nothing is not None:
            raise NothingCaptured(f"{text}; {self._about_nothing()}", nothing.file)
        return text

    def _write_manifest(self) -> None:
        """The last of all ranks to end says what their folder holds."""
        folder, name = os.path.split(self._path)
        world = int(os.environ.get("WORLD_SIZE") or 1)
        if "RANK" not in os.environ or name != RANK_FILE.format(rank=os.environ["RANK"]):
            return
        from replayfmt.format.rank_files import is_whole, write_manifest

        if os.path.basename(folder) == platform.node():  # that of this host, beside those of others
            folder = os.path.dirname(folder)
        if is_whole(folder, world):
            write_manifest(folder, checked=False)

    def _about_nothing(self) -> str:
        limits = " within the limits of what is to be recorded" if self._options.limited else ""
        return f"no op was captured{limits}; {self._children.sentence()}{self._about_children()}"

    def _about_children(self) -> str:
        if not self._children.seen:
            return ""
        return (
            ", and child processes are not recorded: capture those of multiprocessing with --children=record, and the "
            "command of each other one with its own opreplay-capture"
        )


def _flush_files() -> None:
    """Flush files that the program left open: the interpreter would do so during its shutdown."""
    for item in gc.get_objects():
        if issubclass(type(item), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or its disk is full: that could not be reported either
                item.flush()


_STDERR = identity(2)


def _say(text: str) -> None:
    """Print one line on stderr, bypassing the program's own sys.stderr, which may be closed or buffered. If stderr is
    gone, there is no way left to report it: its descriptor may be that of a file of the program's."""
    if _STDERR is None or identity(2) != _STDERR:
        return
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(text)}\n".encode(errors="backslashreplace"))


def _show_bug() -> None:
    """Show the exception of the recorder that is being handled."""
    if sys.stderr is not None:
        traceback.print_exc()
