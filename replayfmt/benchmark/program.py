"""The original program's own time: run again without a recorder, in a process of its own.

`python -m replayfmt.benchmark.program SCOPE SCRIPT ARGS…` runs a script as `python SCRIPT ARGS…` would, after importing
torch, and writes one line to the descriptor that OPREPLAY_PROGRAM_TIMES names: the nanoseconds inside the scopes of
that name (`replayfmt.scope`), or with an empty SCOPE those of the whole script. Devices are waited for at the ends.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replayfmt.errors import ReplayFailed, UsageError

from .reconciliation import ProgramTimes

FLAG = "--program"
_DESCRIPTOR = "OPREPLAY_PROGRAM_TIMES"
_SHOWN = 500  # characters of the last line of a failed program's stderr


def time_program(command: str, scope: str | None, runs: int) -> ProgramTimes:
    """Run `command` (a script with its arguments, as after `python`) that often. Raises UsageError for an empty command
    or one that is no file, ReplayFailed if a run fails or never enters the scope."""
    words = shlex.split(command)
    if not words or not Path(words[0]).is_file():
        raise UsageError(f"{FLAG}={command}: expected a Python script with its arguments, as after `python`")
    times = tuple(_run(words, scope or "") for _ in range(runs))
    return ProgramTimes(command, f"its scope {scope}" if scope else "the whole script, torch imported before", times)


def _run(words: list[str], scope: str) -> float:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as told:
        try:
            ran = subprocess.run(
                [sys.executable, "-m", __name__, scope, *words],
                env={**os.environ, _DESCRIPTOR: str(writing)},
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                check=False,
            )
        finally:
            os.close(writing)
        text = told.read()
    if ran.returncode or not text:
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        end = said[-1][:_SHOWN] if said else "it said nothing on stderr"
        raise ReplayFailed(f"{FLAG}={shlex.join(words)}: it ended with exit code {ran.returncode}: {end}")
    nanoseconds, passes = json.loads(text)
    if not passes:
        raise ReplayFailed(f"{FLAG}={shlex.join(words)}: it never entered a scope {scope!r}, so its time is not known")
    return float(nanoseconds)


class _Watch:
    """Adds up the time inside the outermost scopes of one name."""

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._depth = self._began = 0
        self.nanoseconds = self.passes = 0

    def begin(self) -> None:
        if not self._depth:
            _synchronize()
            self._began = time.perf_counter_ns()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if not self._depth:
            _synchronize()
            self.nanoseconds += time.perf_counter_ns() - self._began
            self.passes += 1

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """In place of `replayfmt.scope`."""
        if name != self._scope:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            self.end()


def _synchronize() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main() -> None:
    """Run the script that the command line names."""
    import torch  # noqa: F401 - so that importing it is in no program's time

    scope, script, *arguments = sys.argv[1:]
    watch = _Watch(scope)
    sys.modules["replayfmt"].scope = watch.watched  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    descriptor = int(os.environ.pop(_DESCRIPTOR))
    if not scope:
        watch.begin()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    if not scope:
        watch.end()
    os.write(descriptor, json.dumps([watch.nanoseconds, watch.passes]).encode())


if __name__ == "__main__":
    main()
