"""Runs what is measured: windows of repeated replays and ops, and the original program in a process of its own.

`WindowRunner` runs idle, the whole replay, each scope, and each distinct op, all again and again. Each window begins
after the same work has already run for as long as the source of power averages over, so that what it says in the window
is of this work alone. What a replay or an op writes is put back before each run, inside its window, and a window of
putting back alone follows. A scope is a replay of its own, of a capture that was cut to it.

`time_program` and `run_for` run the original program without a recorder, as `python -m
replayfmt.benchmark.energy.running SCOPE REPEAT SCRIPT ARGS…`. That runs a script as `python SCRIPT ARGS…` would, after
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayfmt.errors import ReplayFailed, ReplayMismatch, UsageError
from replayfmt.pytorch.accelerators import is_accelerator
from replayfmt.replay.plan import Plan
from replayfmt.replay.results import VerifyMode
from replayfmt.replay.run.steps import IsolatedOp

from ..measure import Progress, unseen
from ..per_op.groups import OpGroup, SelectedOps, select_ops, work_of
from ..per_op.results import ProgramTimes
from .windows import LEAST_SAMPLES, EnergyWindow, Role

# Calls between two looks at the clock take at least this long.
_LOOK_NS = 1_000_000


@dataclass(frozen=True)
class WindowClock:
    """The clocks of windows, in nanoseconds, and how to let time pass."""

    utc: Callable[[], int] = time.time_ns
    monotonic: Callable[[], int] = time.perf_counter_ns
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class WindowOptions:
    """`interval_s` is that between two samples, `averaging_s` what each of power is an average over, `update_s` how
    long an energy counter stays the same."""

    interval_s: float = 0.04
    averaging_s: float = 1.0
    verify: VerifyMode = "auto"
    pattern: str | None = None
    limit: int | None = None
    update_s: float = 0.0

    @property
    def window_s(self) -> float:
        """Long enough for the samples that are needed, wherever between two samples it begins, and for an average."""
        return max((LEAST_SAMPLES + 2) * max(self.interval_s, self.update_s), self.averaging_s)


class WindowRunner:
    """Runs windows one after the other. `windows` and `not_run` grow with each."""

    def __init__(
        self,
        options: WindowOptions,
        moments: WindowClock | None = None,
        progress: Progress | None = None,
        require_source: Callable[[], None] = lambda: None,
    ) -> None:
        """`require_source` is called after each window, and raises if nothing sampled the power any more."""
        self._options, self._moments, self.require_source = options, moments or WindowClock(), require_source
        self._progress = progress or unseen
        self.windows: list[EnergyWindow] = []
        self.not_run: list[dict[str, Any]] = []
        self.distinct_ops = self.selected_ops = 0
        self.interrupted = False

    def idle_and_whole(self, plan: Plan, when_verified: Callable[[], None] = lambda: None) -> None:
        """After a verified replay a window in which nothing runs, and at once the whole replay: the rise of power is
        where the idle window ends. `when_verified` is called right after the verified replay. Raises ReplayMismatch if
        that does not match."""
        self._progress("verifying", 0, None)
        result = plan.execute(verify=self._options.verify)
        if result.outcome != "ok":
            raise ReplayMismatch(f"the replay did not match the capture, so no energy is measured: {result.divergence}")
        _synchronize(plan.devices)
        when_verified()
        self._progress("idle", 0, None)
        begun = self._now()
        self._moments.sleep(self._options.averaging_s + self._options.window_s)
        self._add("idle", "idle", 0, begun)
        self._progress("whole replay", 0, None)
        self._replay("whole", "whole replay", plan)

    def scope(self, plan: Plan, name: str, passes: int) -> None:
        """A replay of what one scope holds, in all its passes: `plan` is that of a capture of it alone."""
        self._progress(f"scope {name}", 0, None)
        self._replay("scope", name, plan, count=passes)

    def program(self, command: str) -> None:
        """The captured program itself, again and again in a process of its own."""
        self._progress("program", 0, None)
        self.windows.append(run_for(command, self._options.averaging_s, self._options.window_s))
        self.require_source()

    def _replay(self, role: Role, name: str, plan: Plan, **told: Any) -> None:
        self._repeat(role, name, _often(lambda: plan.execute(verify="none")), plan.devices, batch=1, **told)
        restoring = plan.restoring()
        if restoring:
            self._repeat("restore", name, _often(restoring), plan.devices, **told)
            self.require_source()

    def ops(self, plan: Plan) -> None:
        """Every distinct op. The plan must be made with keep_going. An interrupt (SIGINT) ends it: `interrupted`."""
        options = self._options
        chosen = select_ops(plan.reader, pattern=options.pattern, limit=options.limit, progress=self._progress)

        self.distinct_ops, self.selected_ops = chosen.total, len(chosen.groups)
        waiting = {group.first_ordinal: group for group in chosen.groups}
        failed: dict[int, str] = {}
        only = None if chosen.everything else plan.preparation.slice(chosen.by_ordinal)
        done = 0

        def each(op: IsolatedOp) -> None:
            nonlocal done
            group = chosen.by_ordinal.get(op.ordinal)
            if group is None or group.first_ordinal not in waiting:
                return
            self._progress(group.kernel.qualified_name, done, len(chosen.groups))
            begun = len(self.windows)
            try:
                self._op(op, group, plan.devices)
            except KeyboardInterrupt:
                del self.windows[begun:]
                raise
            except Exception as error:  # any exception of an op is its verdict, and the replay continues
                del self.windows[begun:]
                failed[group.first_ordinal] = f"{type(error).__name__}: {error}".partition("\n")[0]
                return
            failed.pop(group.first_ordinal, None)
            del waiting[group.first_ordinal]
            done += 1
            self.require_source()

        verdicts: dict[int, str] = {}
        try:
            verdicts = {each.ordinal: each.reason for each in plan.examine(each, only) if each.verdict != "ok"}
        except KeyboardInterrupt:
            self.interrupted = True
            failed |= dict.fromkeys(waiting, "interrupted before it was measured")
        self._tell(chosen, waiting, failed, verdicts)

    def _tell(
        self, chosen: SelectedOps, waiting: dict[int, OpGroup], failed: dict[int, str], verdicts: dict[int, str]
    ) -> None:
        """List what has no window."""
        for ordinal, group in waiting.items():
            reason = failed.get(ordinal) or verdicts.get(ordinal) or "it could not be run"
            kernel = group.kernel.qualified_name
            self.not_run.append({"name": group.signature, "kernel": kernel, "count": group.count, "reason": reason})
        for reason, calls in chosen.unsupported.calls.items():
            self.not_run.append(
                {"name": f"unsupported: {reason}", "count": calls, "reason": "no replay does this work"}
            )

    def _op(self, op: IsolatedOp, group: OpGroup, devices: list[torch.device]) -> None:
        op.restore()
        work = work_of(group.kernel, op.called())
        op.restore()

        told: dict[str, Any] = {
            "count": group.count,
            "kernel": group.kernel.qualified_name,
            "kernel_class": work.kernel_class,
        }
        run = _often(op.restore, lambda: op.calls(1)) if op.writes else op.calls
        self._repeat("op", group.signature, run, devices, **told)
        if op.writes:
            self._repeat("restore", group.signature, _often(op.restore), devices, **told)

    def _repeat(
        self,
        role: Role,
        name: str,
        run: Callable[[int], None],
        devices: list[torch.device],
        *,
        batch: int | None = None,
        **told: Any,
    ) -> None:
        """Run for the averaging time, then for the window's; `batch` calls between two looks at the clock."""
        monotonic = self._moments.monotonic
        run(1)
        _synchronize(devices)
        began = monotonic()
        calls = 0
        size = batch or 1
        while monotonic() - began < self._options.averaging_s * 1e9 or not calls:
            before = monotonic()
            run(size)
            calls += size
            if batch is None and monotonic() - before < _LOOK_NS:
                size *= 2
        _synchronize(devices)
        begun = self._now()
        runs = 0
        while monotonic() - begun[1] < self._options.window_s * 1e9:
            run(size)
            runs += size
        _synchronize(devices)
        self._add(role, name, runs, begun, **told)

    def _now(self) -> tuple[int, int]:
        return self._moments.utc(), self._moments.monotonic()

    def _add(self, role: Role, name: str, runs: int, begun: tuple[int, int], **told: Any) -> None:
        utc, monotonic = self._now()
        self.windows.append(EnergyWindow(role, name, runs, begun[0], utc, begun[1], monotonic, **told))
        if role in ("idle", "whole", "scope"):
            self.require_source()


def _often(*work: Callable[[], object]) -> Callable[[int], None]:
    """What does all of `work`, in this order, a number of times."""

    def run(count: int) -> None:
        for _ in range(count):
            for each in work:
                each()

    return run


def _synchronize(devices: list[torch.device]) -> None:
    for device in devices:
        if is_accelerator(device):
            torch.accelerator.synchronize(device)


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
            "--scope that of the whole script is measured"
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

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """In place of `replayfmt.scope`."""
        if name != self._scope:
            yield
            return
        if not self._depth:
            _wait_for_devices()
            self._began = time.perf_counter_ns()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                _wait_for_devices()
                self.nanoseconds += time.perf_counter_ns() - self._began
                self.passes += 1


def _wait_for_devices() -> None:
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
        with watch.watched(""):  # what is measured without a scope
            _run_once(script)
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
    _wait_for_devices()
    utc, began = time.time_ns(), time.perf_counter_ns()
    runs = 0
    while not runs or time.perf_counter_ns() - began < seconds * 1e9:
        sys.argv = [script, *arguments]  # the last run may have changed it
        _run_once(script)
        runs += 1
    _wait_for_devices()
    return {
        "runs": runs,
        "start_utc_ns": utc,
        "end_utc_ns": time.time_ns(),
        "start_monotonic_ns": began,
        "end_monotonic_ns": time.perf_counter_ns(),
    }


if __name__ == "__main__":
    main()
