"""`--isolate`: run the tool in a child process, whose death is a finding.  Native kernels can kill a process, and a
capture chooses their arguments. The worker process records in a file which window of records it is in, and Python's
fault handler writes the line it was at."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replayfmt.errors import OpReplayError, ReplayFailed
from replayfmt.format.reader import open_capture

from .command import report

if TYPE_CHECKING:
    from replayfmt.replay.codegen.windows import Window

_NOTES = "OPREPLAY_ISOLATED"  # in the environment of the worker process: the folder of its notes
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command line of a child process that runs a tool. It finds the same modules as this process, because
    --allow-import names them, and does not outlive it."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import end_with; end_with({os.getpid()}); "
        f"from {module} import main; main()"
    )
    return [sys.executable, "-c", program, *arguments]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, however that happens: the kernels of a capture may keep it busy
    forever, and nobody else knows of it. Only Linux can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def isolate_option(function: Any) -> Any:
    """Add `--isolate` to a tool."""
    return click.option(
        "--isolate",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_isolate,
        help="Work in a child process: if a kernel kills it, that is a failure with the op's name and exit code 1.",
    )(function)


def _isolate(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    folder = os.environ.get(_NOTES)
    if not wanted or context.resilient_parsing:
        return
    if folder is not None:
        _take_notes(Path(folder))
        return
    assert context.command.callback is not None
    command = worker_command(context.command.callback.__module__, *sys.argv[1:])
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="opreplay-") as notes:
        environment = {**os.environ, _NOTES: notes}
        # Kills it if an exception ends the wait.
        code = subprocess.call(command, stdout=_stdout(), env=environment)
        if code < 0:
            report(ReplayFailed(_obituary(-code, Path(notes))))
            code = 1
    context.exit(code)


def _stdout() -> int | None:
    """Where the tool prints, which need not be descriptor 1; None for that, if sys.stdout is no file."""
    try:
        return sys.stdout.fileno()
    except OSError:
        return None


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, a signal that would end this process at once is an exception, so that it leaves nothing behind."""

    def leave(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------- in the process that works


def _take_notes(folder: Path) -> None:
    """Record each window before it runs, and the line Python was at when the process dies."""
    del os.environ[_NOTES]  # not for the processes that this one starts
    faulthandler.enable((folder / "fault").open("w"), all_threads=False)
    notes = (folder / "window").open("w")

    def note(path: str, window: Window) -> None:
        notes.seek(0)
        notes.truncate()
        json.dump(
            {
                "capture": path,
                "first": window.first_ordinal,
                "lines": [window.ordinal_of_line(line) for line in window.lines],
            },
            notes,
        )
        notes.flush()

    from replayfmt.replay.run import execute

    execute.before_window = note


# ------------------------------------------------------------------------------------------ in the one that waits


def _obituary(number: int, folder: Path) -> str:
    name = signal.Signals(number).name
    why = ", as the system does where there is no memory left" if number == signal.SIGKILL else ""
    text = (folder / "window").read_text() if (folder / "window").exists() else ""
    said = f"the worker process was killed by {name}{why}"
    try:
        noted = json.loads(text)
    except ValueError:
        return f"{said}, before the first op"
    fault = (folder / "fault").read_text()
    line = re.search(r'File "<opreplay window>", line (\d+)', fault)
    if line is None:
        return f"{noted['capture']}: {said}, at ordinal {noted['first']} or later"
    ordinal = noted["lines"][int(line[1])]
    return f"{noted['capture']}: {said} at ordinal {ordinal}{_described(noted['capture'], ordinal)}"


def _described(path: str, ordinal: int) -> str:
    try:
        with open_capture(path) as reader:
            record = reader.record(ordinal)
            kernel = reader.kernels[record.signature.kernel] if record.signature.kernel else None
            return f" ({kernel.qualified_name if kernel is not None else record.kind.name})"
    except (OpReplayError, IndexError):
        return ""
