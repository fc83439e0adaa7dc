"""The last line of defence: whichever step of the recorder goes wrong, the program runs as without a capture, and the
capture ends with one message or says what is unsupported. It is never complete where something is missing.

The steps are found, not listed: every function and method of the recorder and of what it writes with.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt import recording
from replayfmt.errors import CaptureFailed
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording import capture_session, recorder
from replayfmt.recording.dispatch import native_mode

# Beside the recorder itself: what it writes with, and what it knows PyTorch by.
_OTHERS = (
    "format.writer",
    "format.frame_output",
    "format.flatbuffer_tables",
    "format.definition_tables",
    "format.output",
    "format.record_columns",
    "pytorch.tensors.memory",
    "pytorch.tensors.digests",
    "pytorch.tensors.composites",
    "pytorch.environment",
)
# Not steps: the defence itself, what a program calls on purpose and has to be told of, and what stands in the place of
# something that the program calls, and runs that.
_DEFENCE = {
    "CaptureSession.attempt",
    "CaptureSession.failed",
    "CaptureSession.fail",
    "_attempted",
    "_outermost",
    "is_interrupt",
    "_frames",
    "_arguments",
    "_is_frame",
    "leave_no_frames",
    "leave_no_own_frame",
    "_next_of_others",
    "_is_ours",
    "_is_own_module",
    "is_recorders",
    "CaptureWriter.abandon",
    "Recorder._put_back",
    "_put_back",
    "_set_inactive",
    "mode_stack",
    "remove_mode_at",
    "_end_counting",
    "set_modes",
    "OpenScope.__init__",
    "ModeAttachment.end",
    "HookAttachment.end",
    "Uninterrupted.__exit__",
    "Uninterrupted._restore",
}
_CALLED_BY_PROGRAMS = {
    "capture",
    "scope",
    "Recorder.start",
    "Recorder.close",
    "Recorder.scope_begin",
    "Recorder.scope_end",
    "Recorder.__init__",
    "Recorder._check_content",
}
# fmt: off
_STANDS_IN = {"RecordingMode.__torch_dispatch__", "RecordingMode._dispatch", "RecordingMode.record",
              "RecordingMode._record", "RecordingMode.issue", "RecordingMode._dispatched",
              "RecordingMode._special", "RecordingMode.run_inside",
              "RecordingMode.observed", "ObservingMode.observed",
              "RecordingMode._run_unrecorded", "RecordingMode._run_unsupported",
              "AsInProgram.__call__", "CompositeDecomposition.__call__",
              "Body.__call__", "_below_another_handler",
              "construct",
              "StandIn.__get__", "StandIn.__hash__", "StandIn.__eq__", "_Read.__call__", "_Write.__call__",
              "_Carrying.__init__", "_Carrying.__call__", "_Carrying.__repr__", "watch",
              "Recorder.recording", "Recorder._mode_now", "Recorder.launching", "Recorder.present",
              "Recorder.sees_first", "Recorder.paused", "Recorder.host_read", "Recorder.tell",
              "Recorder.attempt", "Recorder._running", "CaptureSession.scope_begin",
              "NativeMode.run", "NativeMode.run_inside",
              "ModeAttachment.mode_now", "ModeAttachment.sees_first", "ModeAttachment.paused",
              "HookAttachment.mode_now",
              "HookAttachment.sees_first", "HookAttachment.paused", "HookAttachment._without_key", "_told",
              "HookAttachment._away", "HookAttachment._loud", "HookAttachment._looked_through",
              "_InferenceMode._entering", "_InferenceMode._leaving", "Threads._starting", "Threads._staying",
              "DeclaredWork._around_keys", "WholeComposites._after_lookup",
              "WholeComposites._after_registering", "Graphs.begin", "Graphs.end", "Graphs.warm_up",
              "Graphs.replay", "Graphs.reset", "Graphs.register", "Graphs.branch", "Graphs.raw",
              "TritonLaunches.launch", "TritonLaunches.bind", "TritonLaunches.call_launcher",
              "TritonLaunches.tune", "TritonLaunches.trial", "TritonLaunches.launch_of_inductor",
              "CollectiveHooks._made", "CollectiveHooks._direct", "CollectiveHooks._launching",
              "CollectiveHooks._filling", "CollectiveHooks._starting", "CollectiveHooks._waiting",
              "CollectiveHooks._continuing", "_resize", "_sharing", "_compiling", "_script",
              "ProgramReplacement._finishing", "ChildrenSeen._returning_pid", "ChildrenSeen._popen",
              "ChildrenSeen._process",
              "ModeAttachment.hidden", "HookAttachment.hidden", "_without_modes"}
# fmt: on
_ATTEMPT = (capture_session.CaptureSession, native_mode.NativeMode)  # by a wrapper of their methods
_NO_STEPS = _DEFENCE | _CALLED_BY_PROGRAMS | _STANDS_IN


class Mistake(Exception):
    """What a step raises here."""


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(recording.__path__, "replayfmt.recording."):
        yield importlib.import_module(found.name)
    for name in _OTHERS:
        yield importlib.import_module(f"replayfmt.{name}")


def steps() -> list[tuple[Any, str]]:
    """(class or module, name) of every step."""
    found, left_out = [], set()
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                if name in _NO_STEPS:
                    left_out.add(name)
                else:
                    found.append((module, name))
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for method, raw in vars(value).items():
                    label = f"{name}.{method}"
                    if label in _NO_STEPS:
                        left_out.add(label)
                    elif isinstance(raw, (FunctionType, staticmethod)):
                        found.append((value, method))
    assert left_out == _NO_STEPS  # otherwise a name is of something that is no more
    return found


def label(step: tuple[Any, str]) -> str:
    holder, name = step
    return (
        f"{holder.__module__.rpartition('.')[2]}.{holder.__name__}.{name}"
        if isinstance(holder, type)
        else f"{holder.__name__.rpartition('.')[2]}.{name}"
    )


class Sabotage:
    """Stands in for one step. `armed`: from now on it raises, where it is to. `struck`: it was called meanwhile."""

    def __init__(self, step: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
        self.armed = self.struck = False
        holder, name = step
        raw = vars(holder)[name]
        original = raw.__func__ if isinstance(raw, staticmethod) else raw

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self.armed:
                self.struck = True
                if raises:
                    raise Mistake(name)
            return original(*args, **kwargs)

        if isinstance(raw, FunctionType) and hasattr(raw, "__wrapped__") and holder in _ATTEMPT:
            original = stand_in.__wrapped__ = raw.__wrapped__  # the step is what it attempts
            monkeypatch.setattr(raw, "__wrapped__", stand_in)
            return
        monkeypatch.setattr(holder, name, staticmethod(stand_in) if isinstance(raw, staticmethod) else stand_in)
        if isinstance(holder, ModuleType):  # whoever imported it by name
            for module in [m for n, m in list(sys.modules.items()) if n.startswith("replayfmt.") and m is not holder]:
                if vars(module).get(name) is original:
                    monkeypatch.setattr(module, name, stand_in)


class Plain(torch.Tensor):
    pass


def program() -> list[Any]:
    """A little of everything that the recorder looks at."""
    torch.manual_seed(1)
    told: list[Any] = []
    weight = torch.nn.Parameter(torch.ones(3, 3))
    x, kept = torch.arange(9.0).reshape(3, 3), torch.zeros(3)
    for turn in range(4):
        y = (x @ weight).relu() + turn
        y.t().mul_(0.5)
        loss = (y * torch.rand(3)).sum()
        loss.backward()
        told.append(loss.item())
        kept.add_(y[0].detach())
    with replayfmt.scope("a part"), torch.autograd.profiler.record_function("noted"):
        shared = torch.ones(4)
        shared.numpy()[1] = 5.0
        told += [(shared * 2).tolist(), torch.empty(2).fill_(3.0).tolist(), Plain([1.0]).add(1).tolist()]
    for work in (lambda: torch.mm(x, torch.ones(2, 2)), lambda: x.numpy(1), lambda: Plain("text")):
        with pytest.raises((RuntimeError, TypeError)) as raised:
            work()
        told.append(str(raised.value))
    sparse = torch.eye(3).to_sparse()
    told.append(torch.sparse.mm(sparse, x).sum().item())
    thread = threading.Thread(target=lambda: told.append(torch.cos(x).sum().item()))
    thread.start()
    thread.join()
    with torch.inference_mode():
        told.append(torch.nn.functional.linear(x, x).sum().item())
    grown = torch.ones(2)
    grown.resize_(5).fill_(1.0)
    torch.set_default_dtype(torch.float64)
    told.append(torch.ones(2).sum().item())
    torch.set_default_dtype(torch.float32)
    return [*told, kept.tolist(), weight.grad.tolist(), grown.tolist()]


def captured(path: Path, sabotages: list[Sabotage]) -> tuple[list[Any], CaptureFailed | None]:
    """What the program returned under a capture, and how the capture failed."""
    returned: list[Any] = []
    recording: Any = None
    try:
        with replayfmt.capture(path) as recording:
            for sabotage in sabotages:
                sabotage.armed = True
            returned = program()
    except CaptureFailed as error:
        return returned, error
    finally:
        for sabotage in sabotages:
            sabotage.armed = False
        if recording is not None:
            recording._put_back(recording._core)  # what was kept from being put back must not disturb what follows
    return returned, None


def count(path: Path) -> int:
    return open_capture(path).summary.records[RecordKind.op]


def taken_steps(path: Path) -> list[tuple[Any, str]]:
    """The steps that a capture of the program takes. Leaves the capture at `path`."""
    with pytest.MonkeyPatch.context() as patched:
        watched = [(step, Sabotage(step, patched, raises=False)) for step in steps()]
        _, failure = captured(path, [sabotage for _, sabotage in watched])
        assert failure is None
    return [step for step, sabotage in watched if sabotage.struck]


def problems(step: tuple[Any, str], path: Path, expected: list[Any], ops: int) -> list[str]:
    """What is wrong where this step goes wrong."""
    interrupt = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patched:
        returned, failure = captured(path, [Sabotage(step, patched, raises=True)])
    left = torch._C._len_torch_dispatch_stack()
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    if recorder._active is not None:
        recorder._active = None
        return ["the recorder is still there"]
    if signal.getsignal(signal.SIGINT) is not interrupt:
        signal.signal(signal.SIGINT, interrupt)
        return ["the program's signal handler was not put back"]
    if left:
        return ["a mode was left behind"]
    if returned != expected:
        return ["the program had other results"]
    if failure is not None:
        return ["a capture that failed lacks ops"] if path.exists() and count(path) != ops else []
    if open_capture(path).summary.unsupported or count(path) == ops:
        return []
    return [f"{count(path)} of {ops} ops are there, and nothing says so"]


@pytest.fixture
def another_thread() -> Iterator[None]:
    """A thread of the program that is always between two steps, so that it is asked to take part at once."""
    over = threading.Event()

    def step() -> None:
        while not over.wait(0.001):
            pass

    thread = threading.Thread(target=step)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.sweep
@pytest.mark.recorder("python", "native")
@pytest.mark.usefixtures("another_thread")
def test_a_step_that_goes_wrong_ends_the_capture_and_not_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = program()
    taken = taken_steps(tmp_path / "whole.opreplay")
    ops = count(tmp_path / "whole.opreplay")
    found = []
    for number, step in enumerate(taken):
        try:
            wrong = problems(step, tmp_path / f"{number}.opreplay", expected, ops)
        except BaseException as error:
            wrong = [f"the program got {error!r}"]
            if isinstance(error, KeyboardInterrupt):
                raise
        if capfd.readouterr().err.count("the capture ended early") > 1:
            wrong.append("it was said more than once")
        found += [f"{label(step)}: {each}" for each in wrong]
    assert len(taken) > 150
    assert not found, "\n".join(found)
