"""The original program's own time: run again without a recorder, in a process of its own.

`python -m replayfmt.benchmark.program SCOPE REPEAT SCRIPT ARGS…` runs a script as `python SCRIPT ARGS…` would, after
importing torch, and writes one line to the descriptor that OPREPLAY_PROGRAM_TIMES names: the nanoseconds inside the
scopes of that name (`replayfmt.scope`), or with an empty SCOPE those of the whole script. Devices are waited for at the
ends. With a REPEAT of `BEFORE,SECONDS` it runs the script again and again, first for BEFORE seconds and then for
SECONDS, and writes when the latter were.
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

from .energy.windows import EnergyWindow
from .reconciliation import ProgramTimes

FLAG = "--program"
_DESCRIPTOR = "OPREPLAY_PROGRAM_TIMES"
_SHOWN = 500  # characters of the last line of a failed program's stderr


def time_program(command: str, scope: str | None, runs: int) -> ProgramTimes:
    """Run `command` (a script with its arguments, as after `python`) that often. Raises UsageError for an empty command
    or one that is no file, ReplayFailed if a run fails or never enters the scope."""
    words = script_words(command)
    times = tuple(_time(words, scope or "") for _ in range(runs))
    return ProgramTimes(command, f"its scope {scope}" if scope else "the whole script, torch imported before", times)


def run_for(command: str, before_s: float, seconds: float) -> EnergyWindow:
    """Run `command` again and again in one process, at least twice: first for `before_s`, then for `seconds`, which are
    the window. Raises what `time_program` does."""
    told = json.loads(_run(script_words(command), "", f"{before_s!r},{seconds!r}"))
    name = f"{command}, the whole script again and again in one process"
    return EnergyWindow("program", name, told.pop("runs"), **told)


def script_words(command: str) -> list[str]:
    """The script and its arguments. Raises UsageError for a command that names no script."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{FLAG}={command}: {error}; expected a Python script with its arguments") from error
    if not words or not Path(words[0]).is_file():
        raise UsageError(f"{FLAG}={command}: expected a Python script with its arguments, as after `python`")
    return words


def _time(words: list[str], scope: str) -> float:
    nanoseconds, passes = json.loads(_run(words, scope))
    if not passes:
        raise ReplayFailed(
            f"{FLAG}={shlex.join(words)}: it never entered a scope {scope!r}, so its time is not known; without "
            "--replay-scope that of the whole script is measured"
        )
    return float(nanoseconds)


def _run(words: list[str], scope: str, repeat: str = "") -> bytes:
    """What a run writes to the descriptor."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as told:
        try:
            ran = subprocess.run(
                [sys.executable, "-m", __name__, scope, repeat, *words],
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
    return text


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

    scope, repeat, script, *arguments = sys.argv[1:]
    watch = _Watch(scope)
    sys.modules["replayfmt"].scope = watch.watched  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    descriptor = int(os.environ.pop(_DESCRIPTOR))
    if repeat:
        before_s, seconds = (float(each) for each in repeat.split(","))
        _run_until(script, arguments, before_s)
        told: object = _run_until(script, arguments, seconds)
    else:
        if not scope:
            watch.begin()
        _run_once(script)
        if not scope:
            watch.end()
        told = [watch.nanoseconds, watch.passes]
    os.write(descriptor, json.dumps(told).encode())


def _run_once(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise


def _run_until(script: str, arguments: list[str], seconds: float) -> dict[str, int]:
    """Run a script at least once, and until so much time has passed: how often it ran, and when."""
    _synchronize()
    utc, began = time.time_ns(), time.perf_counter_ns()
    runs = 0
    while not runs or time.perf_counter_ns() - began < seconds * 1e9:
        sys.argv = [script, *arguments]  # the last run may have changed it
        _run_once(script)
        runs += 1
    _synchronize()
    return {
        "runs": runs,
        "start_utc_ns": utc,
        "end_utc_ns": time.time_ns(),
        "start_monotonic_ns": began,
        "end_monotonic_ns": time.perf_counter_ns(),
    }


if __name__ == "__main__":
    main()
