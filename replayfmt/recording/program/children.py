"""Child processes of the program under capture: they do not record into its file, which says which of them worked.

Commands that run Python programs are recognized: they may do part of the program's work on the devices.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from replayfmt.errors import NothingCaptured
from replayfmt.format.validation import tell

from ..options import CaptureOptions
from ..patches import Patch, Patched, PatchSet, Watch, around

_PYTHON = re.compile(r"\A(python|pypy)[\d.]*(\.exe)?\Z")
_ASSIGNMENT = re.compile(r"\A\w+=")
_WITH_VALUE = ("-W", "-X")  # flags of the interpreter with a value of their own
_HELPER_MODULES = re.compile(
    r"\A(pip|ensurepip|venv|virtualenv|site|sysconfig|platform|compileall|py_compile|setuptools|build|ninja|triton"
    r"|torch\._inductor|torch\.utils\.collect_env|multiprocessing)(\.|\Z)"
)
# The last of these is how Inductor checks whether a library that it built can be loaded.
_HELPER_CODE = re.compile(
    r"\bmultiprocessing\.(resource_tracker|forkserver|spawn)\b"
    r"|\bcdll\.LoadLibrary\([^)]*\)\s*\Z"
)
_HELPER_SCRIPTS = re.compile(r"(\A|[/\\])(torch[/\\]_inductor|triton|setup\.py)([/\\]|\Z)")


def runs_python_program(arguments: Any, *, executable: Any = None) -> bool:
    """Whether a command, as `subprocess.Popen` or `os.posix_spawn` take it, is a Python interpreter with a program to
    run. A command in one string is split as a shell splits its first words."""
    words = _words(arguments)
    while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("exec", "env", "nohup")):
        words = words[1:]
    program = os.fsdecode(executable) if executable is not None else words[0] if words else ""
    return _is_python(program) and not _is_helper(words[1:])


def _words(arguments: Any) -> list[str]:
    if isinstance(arguments, (str, bytes, os.PathLike)):
        try:
            return shlex.split(os.fsdecode(arguments))
        except ValueError:  # a quote that is never closed: the shell will say so
            return []
    return [os.fsdecode(word) for word in arguments]


def _is_python(program: str) -> bool:
    return bool(_PYTHON.match(os.path.basename(program))) or (bool(sys.executable) and program == sys.executable)


def _is_helper(words: list[str]) -> bool:
    """Whether an interpreter with these arguments runs none of the program's own code."""
    following = iter(words)
    for word in following:
        if word == "-m":
            return bool(_HELPER_MODULES.match(next(following, "")))
        if word == "-c":
            return bool(_HELPER_CODE.search(next(following, "")))
        if word in ("-V", "--version", "-h", "--help"):
            return True
        if word in _WITH_VALUE:
            next(following, None)
        elif not word.startswith("-") or word == "-":
            return bool(_HELPER_SCRIPTS.search(word))
    return False


IMPLICIT_SCOPE = "execute"  # the scope of a program without scopes of its own
_MULTIPROCESSING = "multiprocessing"
_in_child: list[Callable[[], None]] = []
_registered = False


class AfterFork:
    """Calls `disable` in every child that this process forks, until `stop()`. It runs first in the child, where other
    threads' locks may be held forever: it must take none."""

    def __init__(self, disable: Callable[[], None]) -> None:
        global _registered
        self._disable = disable
        _in_child.append(disable)
        if not _registered:
            # Cannot be undone, so it is done once for the process.
            os.register_at_fork(after_in_child=_disable_in_child)
            _registered = True

    def stop(self) -> None:
        """Idempotent."""
        if self._disable in _in_child:
            _in_child.remove(self._disable)


def _disable_in_child() -> None:
    # A child's own children have nothing left to disable.
    waiting = _in_child[:]
    _in_child.clear()
    for disable in waiting:
        disable()


class ChildrenSeen(Patched):
    """The children that this process started while installed: `seen` maps their process ids to descriptions.

    It sees os.fork, posix_spawn, subprocess and multiprocessing (fork, spawn and the fork server itself), not processes
    that C libraries start.
    """

    def __init__(self, path: str = "", options: CaptureOptions | None = None) -> None:
        """Of the capture to `path`, which with these options may record them."""
        self.seen: dict[int, str] = {}
        self.path = path
        self._recorded = options.unlimited() if options is not None and options.children == "record" else None
        self._own: set[int] = set()  # idents of threads that start processes for the recorder
        self._workers: set[int] = set()
        forks = around(functools.partial(self._returning_pid, lambda _arguments: ("forked", True)))
        spawns = around(
            functools.partial(
                self._returning_pid,
                lambda arguments: (_command(arguments[1]), runs_python_program(arguments[1], executable=arguments[0])),
            )
        )
        self._patches = PatchSet(
            [
                Patch("os", "fork", forks),
                Patch("os", "forkpty", forks),
                Patch("os", "posix_spawn", spawns),
                Patch("os", "posix_spawnp", spawns),
                Patch("multiprocessing.util", "spawnv_passfds", spawns),
                Patch("subprocess", "Popen.__init__", around(self._popen)),
                Patch("multiprocessing.process", "BaseProcess.start", around(self._process)),
            ]
        )

    @contextmanager
    def own(self) -> Iterator[None]:
        """Processes that the calling thread starts inside belong to the recorder and are not noted."""
        self._own.add(get_ident())
        try:
            yield
        finally:
            self._own.discard(get_ident())

    def sentence(self) -> str:
        """The children as part of a message: `1 child: 4711 (python worker.py)`, or that there were none."""
        return _listed(self.seen) if self.seen else "no child process was seen"

    def workers(self) -> str:
        """The children that run the program's own functions, or a Python program, listed in the same way; "" if there
        are none."""
        workers = {pid: what for pid, what in self.seen.items() if pid in self._workers}
        return _listed(workers) if workers else ""

    def worked(self, ran: Callable[[int], bool | None]) -> dict[int, str]:
        """The children that ran operators, or may have, with what is known of them. `ran` says it of a forked child,
        where that is known."""
        return {
            pid: what
            for pid, what in self.seen.items()
            if (found := ran(pid)) or (found is None and pid in self._workers)
        }

    def by_multiprocessing(self, pid: int) -> bool:
        """Whether multiprocessing started it: only such children can be captured."""
        return self.seen[pid].startswith(_MULTIPROCESSING)

    def _note(self, pid: object, what: str, works: bool) -> None:
        if isinstance(pid, int) and pid > 0 and get_ident() not in self._own:
            self.seen[pid] = what
            if works:
                self._workers.add(pid)
            else:
                self._workers.discard(pid)

    def _returning_pid(
        self,
        describe: Callable[[tuple[Any, ...]], tuple[str, bool]],
        original: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = original(*args, **kwargs)
        self._note(result[0] if isinstance(result, tuple) else result, *describe(args))
        return result

    def _popen(self, original: Callable[..., None], popen: Any, *args: Any, **kwargs: Any) -> None:
        original(popen, *args, **kwargs)
        works = runs_python_program(popen.args, executable=kwargs.get("executable"))
        self._note(popen.pid, _command(popen.args), works)

    def _process(self, original: Callable[..., None], process: Any) -> None:
        target = _target(process)  # gone once it runs
        if self._recorded is not None:
            process.run = RecordedRun(process, self.path, self._recorded)
        try:
            original(process)
        finally:
            if self._recorded is not None:
                del process.run
        self._note(process.pid, f"{_MULTIPROCESSING} {process.name}{target}", True)


_SHOWN = 8  # children that a message lists
_COMMAND_LENGTH = 120


def _listed(children: dict[int, str]) -> str:
    listed = [f"{pid} ({what})" for pid, what in list(children.items())[:_SHOWN]]
    more = len(children) - len(listed)
    return f"{len(children)} child process{'es' if len(children) > 1 else ''} seen: {', '.join(listed)}" + (
        f" and {more} more" if more else ""
    )


def _target(process: Any) -> str:
    """What a multiprocessing child calls: ` running package.module:function`, as far as known."""
    target = getattr(process, "_target", None) or type(process).run
    name = getattr(target, "__qualname__", None)
    known = name is not None and name != "BaseProcess.run"
    return f" running {getattr(target, '__module__', '')}:{name}" if known else ""


def _command(arguments: Any) -> str:
    if isinstance(arguments, (str, bytes, os.PathLike)):
        text = os.fsdecode(arguments)
    else:
        text = shlex.join(os.fsdecode(part) for part in arguments)
    return text if len(text) <= _COMMAND_LENGTH else text[: _COMMAND_LENGTH - 1] + "…"


class RecordedRun:
    """What a child that multiprocessing starts runs in place of its process's `run`: the same, under a capture. It is
    pickled with the process where the child is spawned."""

    def __init__(self, process: Any, path: str, options: CaptureOptions) -> None:
        self._process, self._path, self._options = process, path, options

    def __call__(self) -> None:
        vars(self._process).pop("run", None)
        recorders: list[Any] = []
        watch = Watch("torch", lambda _torch: self._start(recorders))
        try:
            self._process.run()
        finally:
            watch.stop()
            for recorder in recorders:
                _complete(recorder)

    def _start(self, recorders: list[Any]) -> None:
        try:
            module: Any = importlib.import_module("replayfmt.recording.recorder")  # which needs torch, and this module
            recorder = module.Recorder(child_path(self._path, os.getpid()), self._options, IMPLICIT_SCOPE)
            recorder.start()
        except Exception as error:
            tell(f"opreplay: the child process {os.getpid()} is not captured: {error}")
        else:
            recorders.append(recorder)


def _complete(recorder: Any) -> None:
    try:
        recorder.close()
    except NothingCaptured:
        pass  # the capture of its parent says that there is no file
    except Exception as error:
        tell(f"opreplay: the capture of the child process {os.getpid()} is not complete: {error}")


def child_path(path: str, pid: int) -> str:
    """Where the capture of a child goes: beside its parent's."""
    root, extension = os.path.splitext(path)
    return f"{root}.{pid}{extension}"
