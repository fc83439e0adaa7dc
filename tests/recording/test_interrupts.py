"""Interrupts (Ctrl-C and the like) wherever they strike: the program may go on, and the capture stays true.

Python runs signal handlers after calls, at the begin of functions and where loops go back. A tracer raises there what a
handler would raise: at one such place after the other, in place of signals that would strike somewhere by chance.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.recording.stream.records import Records

from .conftest import Capture

_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}
_STRIDE = 23  # every place would take minutes


class Struck(BaseException):
    """What a handler raises that wants out: an interrupt, say."""


class TimedOut(Exception):
    """What a handler raises that somebody may handle."""


def _handler(*_: Any) -> None:
    """Stands for the program's: the recorder puts handlers off where it must not be interrupted."""


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    instructions = list(dis.get_instructions(code))
    pairs = zip(instructions, instructions[1:], strict=False)
    return frozenset(following.offset for before, following in pairs if before.opname in _CALLS)


class Striking:
    """A tracer that raises at a place, counted from 1, or at the first one after it where handlers are not put off.
    `from_outside`: as one thread raises in another."""

    def __init__(self, place: int, error: type[BaseException], from_outside: bool = False) -> None:
        self.left = place
        self.error = error
        self.from_outside = from_outside
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and frame.f_lasti in _after_calls(frame.f_code)):
            self.left -= 1
            if self.left <= 0 and signal.getsignal(signal.SIGALRM) is _handler:
                self.struck = True
                sys.settrace(None)
                if not self.from_outside:
                    raise self.error
                thread = ctypes.c_ulong(threading.get_ident())
                assert ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(self.error)) == 1
        return self


@pytest.fixture
def handled() -> Iterator[None]:
    """A program with a signal handler, run without a tracer."""
    before, tracer = signal.signal(signal.SIGALRM, _handler), sys.gettrace()
    sys.settrace(None)
    yield
    signal.signal(signal.SIGALRM, before)
    sys.settrace(tracer)


def dispatch_state() -> tuple[Any, ...]:
    """What of a thread's state an op that was interrupted could leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_enabled(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
    )


def writing(x: torch.Tensor, y: torch.Tensor) -> None:
    for _ in range(4):  # the complete path twice, then the hot one
        x.add_(1)
        y.mul_(2)
        (y * 0.5).view(1, -1)


def drawing_and_reading(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.rand(y.numel())
    y.tolist()
    x.add_(y.sum().item())
    for _ in range(3):
        y.cos_()


def scopes(x: torch.Tensor, y: torch.Tensor) -> None:
    with replayfmt.scope("a"):
        x.add_(1)
        (torch.arange(y.numel()) * 1.0).softmax(0)


@pytest.mark.sweep
@pytest.mark.recorder("python", "native")
@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize(
    ("error", "from_outside"),
    [(Struck, False), (TimedOut, False), (TimedOut, True)],
    ids=["Struck", "TimedOut", "from another thread"],
)
@pytest.mark.parametrize("work", [writing, drawing_and_reading, scopes], ids=lambda work: work.__name__)
def test_an_interrupt_at_any_place_reaches_the_program_and_leaves_a_capture_that_replays(
    capture: Capture,
    work: Callable[[torch.Tensor, torch.Tensor], None],
    error: type[BaseException],
    from_outside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strikes = 0
    kept: list[Any] = []  # by Python itself: what is raised in a finalizer goes to its hook and no further
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: kept.append(raised.exc_value))

    def program() -> Any:
        nonlocal strikes
        x, place, expected = torch.zeros(3), 1, dispatch_state()
        while True:
            y = torch.ones(4 + strikes)  # what no op has seen takes the way of a first call
            striking, caught = Striking(place, error, from_outside), False
            kept.clear()
            try:
                sys.settrace(striking)
                work(x, y)
            except error:
                caught = True
            finally:
                sys.settrace(None)
            assert (caught or any(isinstance(value, error) for value in kept)) is striking.struck, place
            if not striking.struck:  # the work is over before that place
                return x * 1
            assert dispatch_state() == expected, place
            strikes, place = strikes + 1, place + _STRIDE

    captured = capture(program, chunk_records=4096)
    assert strikes > 20
    captured.replays()


def test_an_interrupt_while_content_enters_leaves_a_capture_that_replays(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage has its id by then, and its import is not recorded."""
    x, record, interrupted = torch.ones(3), Records.storage_import, []

    def interrupting(self: Records, *args: Any) -> None:
        if not interrupted:
            interrupted.append(True)
            raise Struck
        record(self, *args)

    monkeypatch.setattr(Records, "storage_import", interrupting)

    def program() -> torch.Tensor:
        with pytest.raises(Struck):
            x.mul(2)
        return x.mul(3)

    captured = capture(program)
    assert len(captured.records(RecordKind.storage_import)) == 1
    captured.replays()
