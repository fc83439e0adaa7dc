"""Threads of every kind take part, and what runs in a thread that cannot is told."""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch._C import _len_torch_dispatch_stack

import replayfmt
from replayfmt.errors import CaptureFailed, NothingCaptured
from replayfmt.format.codes import RecordKind
from replayfmt.recording.capture_session import CaptureSession
from replayfmt.recording.dispatch.mode import mode_stack, set_modes
from replayfmt.recording.program import threads
from replayfmt.recording.program.thread_attachment import NextStep, own_id, thread_states

from .conftest import Capture, Captured

_WAIT_S = 60
TRACES = hasattr(ctypes.pythonapi, "_PyEval_SetTrace")  # whether other threads' trace functions can be set


class Server:
    """A worker that has been waiting for work since before any capture: in Python code, or in C code alone."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._given: SimpleQueue[Any] = SimpleQueue()
        self._made: SimpleQueue[Any] = SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            item = self._given.get()
            if item is None:
                return
            self._made.put(self._work(item))

    def give(self, item: Any) -> None:
        self._given.put(item)

    def take(self) -> Any:
        return self._made.get(timeout=_WAIT_S)

    def ask(self, item: Any) -> Any:
        self.give(item)
        return self.take()

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Any], Any]], Server]]:
    servers: list[Server] = []

    def make(work: Callable[[Any], Any]) -> Server:
        servers.append(Server(work))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def details(captured: Captured) -> list[Any]:
    return [record.argument("detail") for record in captured.records(RecordKind.unsupported)]


# --------------------------------------------------------------------------------------------- threads that are started


class Overrides(threading.Thread):
    def run(self) -> None:
        self.made = torch.ones(3).sin()


def _subclass() -> Any:
    thread = Overrides()
    thread.start()
    thread.join()
    return thread.made


def _timer() -> Any:
    made: SimpleQueue[Any] = SimpleQueue()
    threading.Timer(0, lambda: made.put(torch.ones(3).sin())).start()
    return made.get(timeout=_WAIT_S)


def _low_level() -> Any:
    made: SimpleQueue[Any] = SimpleQueue()
    _thread.start_new_thread(lambda x: made.put(x.sin()), (torch.ones(3),))
    return made.get(timeout=_WAIT_S)


def _pool() -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: torch.ones(3).sin()).result()


@pytest.mark.parametrize("program", [_subclass, _timer, _low_level, _pool])
def test_threads_that_are_started_in_any_way_are_recorded(capture: Capture, program: Callable[[], Any]) -> None:
    captured = capture(program)
    assert captured.ops() == ["aten::ones.default", "aten::sin.default"]
    assert captured.unsupported() == {}
    captured.replays()


def test_an_error_in_a_thread_is_told_as_without_a_capture(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    done = threading.Event()

    def hook(args: Any) -> None:
        frames = []
        trace = args.exc_traceback
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        # The thread's function is the object, or from Python 3.13 on in the message.
        told.append((args.exc_type, str(args.exc_value), frames, repr(fails) in f"{args.err_msg} {args.object!r}"))
        done.set()

    def fails() -> None:
        raise ValueError("of the program")

    def program() -> Any:
        done.clear()
        _thread.start_new_thread(fails, ())
        assert done.wait(_WAIT_S)
        return torch.ones(2)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    program()
    capture(program)
    assert told[0] == told[1] == (ValueError, "of the program", ["fails"], True)


# --------------------------------------------------------------------------------------- threads that were there before


def test_workers_that_were_waiting_are_recorded_in_each_capture(capture: Capture, serve: Callable[..., Server]) -> None:
    weight = torch.arange(9.0).view(3, 3)
    pool = ThreadPoolExecutor(2)
    assert list(pool.map(abs, [1, 2])) == [1, 2]
    server = serve(lambda x: (x @ weight).tanh())

    def program() -> Any:
        return server.ask(torch.ones(2, 3)), pool.submit(weight.cos).result()

    for _ in range(2):
        captured = capture(program)
        assert set(captured.ops()) == {
            "aten::ones.default",
            "aten::mm.default",
            "aten::tanh.default",
            "aten::cos.default",
        }
        assert captured.unsupported() == {}
        assert len({record.thread for record in captured.records(RecordKind.op)}) == 3
        captured.replays()
    assert server._work is not None and pool.submit(_len_torch_dispatch_stack).result() == 0
    pool.shutdown()


def test_a_worker_that_calls_nothing_before_its_operators_is_recorded(capture: Capture) -> None:
    x = torch.arange(4.0).view(2, 2)
    go, done = threading.Lock(), threading.Lock()
    go.acquire()
    done.acquire()
    made = []

    def work() -> None:
        go.acquire()
        y = x @ x
        y = y + x
        made.append(y)
        done.release()

    thread = threading.Thread(target=work)
    thread.start()

    def program() -> Any:
        go.release()
        assert done.acquire(timeout=_WAIT_S)
        return made[0]

    if not TRACES:
        with pytest.raises(NothingCaptured, match="unsupported"):
            capture(program)
        thread.join()
        return
    captured = capture(program)
    thread.join()
    assert captured.ops() == ["aten::mm.default", "aten::add.Tensor"]
    captured.replays()


def test_threads_that_stay_idle_leave_nothing_behind(capture: Capture, serve: Callable[..., Server]) -> None:
    server = serve(lambda _item: (sys.getprofile(), sys.gettrace(), _len_torch_dispatch_stack()))
    captured = capture(lambda: torch.ones(3) + 1)
    assert captured.unsupported() == {}
    assert server.ask(1) == (None, None, 0)


def test_a_profile_function_of_the_program_stays(capture: Capture, serve: Callable[..., Server]) -> None:
    seen: list[str] = []

    def mine(_frame: Any, event: str, _argument: Any) -> None:
        seen.append(event)

    def work(item: str) -> Any:
        if item == "set":
            sys.setprofile(mine)
        elif item == "run":
            return torch.ones(3).sin()
        return sys.getprofile()

    server = serve(work)
    server.ask("set")
    if TRACES:
        captured = capture(lambda: server.ask("run"))
        assert captured.ops() == ["aten::ones.default", "aten::sin.default"], "the trace function was free"
    else:
        with pytest.raises(NothingCaptured, match="unsupported"):
            capture(lambda: server.ask("run"))
    before = len(seen)
    assert server.ask("look") is mine and len(seen) > before


def test_a_thread_that_cannot_take_part_is_told(capture: Capture, serve: Callable[..., Server]) -> None:
    def work(_item: Any) -> None:
        sys.setprofile(lambda *_: None)
        sys.settrace(lambda *_: None)

    server = serve(work)
    server.ask("set")
    captured = capture(lambda: torch.ones(2))
    assert captured.unsupported() == {"unseen_thread": 1}
    assert "functions of the program's own wherever it could be asked" in details(captured)[0]


def _loss_with_a_pause(entered: threading.Event, over: Callable[[], object]) -> torch.Tensor:
    """A loss whose backward pass says that it is `entered`, goes on when it is over, and then computes something."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            entered.set()
            while not over():
                pass
            return gradient * 3

    loss: torch.Tensor = Waits.apply(torch.ones(3, requires_grad=True).sin()).sum()
    return loss


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
def test_operators_that_began_before_the_capture_are_told(capture: Capture, serve: Callable[..., Server]) -> None:
    """A backward pass is one call into C code: what it runs after the capture began has no mode."""
    entered, go_on = threading.Event(), threading.Event()

    loss = _loss_with_a_pause(entered, lambda: go_on.wait(0.01))
    server = serve(lambda item: item.backward())
    server._given.put(loss)
    assert entered.wait(_WAIT_S)

    def program() -> Any:
        go_on.set()
        server._made.get(timeout=_WAIT_S)
        return torch.ones(2) + 1

    captured = capture(lambda: (program(), server.ask(torch.ones(2, requires_grad=True).sum())))
    assert set(captured.unsupported()) == {"unseen_thread"}, "and, where it is watched, what of it ran"
    assert "backward pass" in details(captured)[0]
    assert "aten::expand.default" in captured.ops(), "the thread took part afterwards"


@pytest.mark.recorder("python", "native")
def test_a_capture_begins_when_the_backward_passes_of_other_threads_are_over(
    capture: Capture, serve: Callable[..., Server]
) -> None:
    entered, main = threading.Event(), threading.main_thread().ident

    def begins() -> bool:
        frame = sys._current_frames()[main or 0]
        while frame.f_back is not None and frame.f_code is not threads.Threads._wait_until_joined.__code__:
            frame = frame.f_back
        return frame.f_code is threads.Threads._wait_until_joined.__code__

    loss = _loss_with_a_pause(entered, lambda: begins() or time.sleep(0.001))
    server = serve(lambda item: item.backward())
    server.give(loss)
    assert entered.wait(_WAIT_S)
    captured = capture(lambda: (server.take(), server.ask(torch.ones(2, requires_grad=True).sum())))
    assert captured.unsupported() == {} and "aten::expand.default" in captured.ops()


def test_a_thread_of_the_recorder_that_was_found_late_does_not_take_part(capture: Capture) -> None:
    """Whoever waits for it may hold the recorder's lock, which a thread of the program takes when it ends."""
    joined: list[bool] = []

    def digest() -> None:
        recorder = replayfmt.recording.recorder._active
        assert recorder is not None and recorder._threads is not None
        threads._ask_to_leave({own_id()})  # what asks it to take part, too
        for _ in range(3):
            joined.append(recorder._threads.has_joined())

    def program() -> torch.Tensor:
        thread = threading.Thread(target=digest, name=f"{threads.DIGESTING} of a file")
        thread.start()
        thread.join()
        return torch.ones(2).sin()

    captured = capture(program)
    assert joined == [False] * 3 and captured.ops() == ["aten::ones.default", "aten::sin.default"]


def test_a_thread_that_began_in_one_capture_takes_part_in_the_next(capture: Capture) -> None:
    given: SimpleQueue[Any] = SimpleQueue()
    made: SimpleQueue[Any] = SimpleQueue()

    def work() -> None:
        while given.get():
            with replayfmt.scope("work"):
                made.put(torch.ones(3).sin())

    def program(end: bool = False) -> Any:
        given.put(True)
        result = made.get(timeout=_WAIT_S)
        if end:
            given.put(False)
            thread.join()
        return result

    def first() -> Any:
        thread.start()
        return program()

    thread = threading.Thread(target=work)
    for captured in (capture(first), capture(program), capture(lambda: program(end=True))):
        assert captured.ops() == ["aten::ones.default", "aten::sin.default"]
        assert [record.argument("name") for record in captured.records(RecordKind.scope_end)] == ["work"]
        captured.replays()


def test_a_thread_that_two_captures_met_inside_one_operator_leaves_both(tmp_path: Path) -> None:
    """However long the operator takes: PyTorch puts the mode back when it is over."""
    entered, go_on = threading.Event(), threading.Event()
    left: list[int] = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        while not go_on.wait(0.001):
            pass
        for _ in range(2 * threads._PATIENCE):
            pass
        return x + 1

    library = torch.library.Library("two_captures", "FRAGMENT")
    library.define("slow(Tensor x) -> Tensor")
    library.impl("slow", slow, "CPU")

    def work() -> None:
        torch.ops.two_captures.slow(torch.ones(2))
        left.append(_len_torch_dispatch_stack())

    thread = threading.Thread(target=work)
    try:
        with replayfmt.capture(tmp_path / "first.opreplay"):
            thread.start()
            assert entered.wait(_WAIT_S)
        with replayfmt.capture(tmp_path / "second.opreplay"):
            torch.ones(2).sin()
    finally:
        go_on.set()
        thread.join()
        library._destroy()
    assert left == [0]


# ------------------------------------------------------------------------------------------------- threads of C code


def _in_thread_of_c(function: Callable[[], Any]) -> None:
    """Run Python code in a thread that the C library makes."""
    library = ctypes.CDLL(None)
    callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: function() and None)
    thread = ctypes.c_ulong()
    assert library.pthread_create(ctypes.byref(thread), None, callback, None) == 0
    assert library.pthread_join(thread, None) == 0


def test_a_thread_that_c_code_made_takes_part_once_it_is_met(capture: Capture, tmp_path: Path) -> None:
    x = torch.ones(3)
    path = tmp_path / "met.opreplay"
    with replayfmt.capture(path) as recorder:
        y = x * 2

        def work() -> None:
            assert recorder._threads is not None
            recorder._threads.look()
            y.sin_()

        _in_thread_of_c(work)
        z = y + 1
    captured = Captured(path, z)
    assert captured.ops() == ["aten::mul.Tensor", "aten::sin_.default", "aten::add.Tensor"]
    assert captured.unsupported() == {"unseen_thread": 1}, "it may have done more before"
    assert "a thread was created by C code" in details(captured)[0]


def test_threads_of_c_code_that_run_no_operator_are_nothing_to_tell(capture: Capture, tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "met.opreplay") as recorder:
        assert recorder._threads is not None
        _in_thread_of_c(recorder._threads.look)
        torch.ones(2)
    assert Captured(tmp_path / "met.opreplay", None).unsupported() == {}


def test_python_code_in_a_thread_of_gloos_is_not_taken_for_the_copying_of_a_collective(
    capture: Capture, tmp_path: Path
) -> None:
    """Operators let the interpreter's lock go."""
    library = ctypes.CDLL(None)
    library.pthread_self.restype = ctypes.c_ulong

    def work() -> None:
        library.pthread_setname_np(ctypes.c_ulong(library.pthread_self()), b"pt_gloo_runloop")
        x.exp_()

    x = torch.ones(3)
    captured = capture(lambda: (x * 2, _in_thread_of_c(work), x + 1))
    assert set(captured.unsupported()) == {"unseen_thread"}, "and not only what it wrote, which is imported"
    assert any("pt_gloo_runloop" in each for each in details(captured))


def test_what_a_future_calls_in_a_thread_of_its_own_is_recorded(capture: Capture) -> None:
    def program() -> Any:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        chained = future.then(lambda done: done.value().exp())
        seen: list[torch.Tensor] = []
        future.add_done_callback(lambda done: seen.append(done.value().sin()))
        x = torch.ones(3)
        _in_thread_of_c(lambda: future.set_result(x))
        return chained.wait() + 1, seen[0] + 1

    captured = capture(program)
    assert captured.unsupported() == {}
    assert captured.ops().count("aten::exp.default") == captured.ops().count("aten::sin.default") == 1
    captured.replays()


def test_pytorchs_own_threads_are_recorded(capture: Capture) -> None:
    x = torch.ones(3, requires_grad=True)

    def program() -> Any:
        future = torch.jit.fork(torch.neg, x)
        return torch.autograd.grad((torch.jit.wait(future) * 2).sum(), x)

    captured = capture(program)
    assert {"aten::neg.default", "aten::mul.Tensor", "aten::sum.default"} <= set(captured.ops())
    assert captured.unsupported() == {}
    captured.replays()


# -------------------------------------------------------------------------------------------------- nothing captured


def test_a_capture_without_an_op_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.opreplay"
    with (
        pytest.raises(NothingCaptured, match="no op was captured.*the empty file was removed"),
        replayfmt.capture(path),
    ):
        pass
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), replayfmt.capture(path):
        raise ZeroDivisionError
    assert not path.exists()
    recorder = replayfmt.Recorder(path)
    recorder.start()
    with pytest.raises(CaptureFailed, match="no op was captured"):
        recorder.close()
    recorder.close()


def test_a_capture_of_unsupported_work_alone_is_an_error_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "unsupported.opreplay"
    with (
        pytest.raises(NothingCaptured, match="no op was captured; the file was kept"),
        replayfmt.capture(path) as recorder,
    ):
        recorder.unsupported("host_call", "x", "y")
    assert replayfmt.open(path).reader.summary.unsupported == {"host_call": 1}


# ------------------------------------------------------------------------------------------------- the interpreter


def test_a_thread_is_asked_at_its_next_step_and_only_there(serve: Callable[..., Server]) -> None:
    called: list[int] = []
    steps = NextStep(lambda: called.append(own_id()) or len(called) == 2)
    assert steps.available
    server = serve(lambda _item: own_id())
    number = server.ask(1)
    (state,) = [state for state in thread_states() if state.id == number]
    assert steps.set(state) and steps.set(state)
    assert server.ask(1) == number and called == [number] * 2
    (state,) = [state for state in thread_states() if state.id == number]
    assert steps.set(state)
    (state,) = [state for state in thread_states() if state.id == number]
    steps.clear(state)
    assert server.ask(1) == number and len(called) == 2


def test_what_is_raised_in_a_thread_that_is_asked_is_raised_where_it_was(serve: Callable[..., Server]) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    steps = NextStep(interrupted)

    def work(asks: bool) -> str:
        try:
            if asks:
                (state,) = [state for state in thread_states() if state.id == own_id()]
                steps.set(state)
            own_id()
        except KeyboardInterrupt:
            return "interrupted"
        return "done"

    server = serve(work)
    assert [server.ask(asks) for asks in (False, True, False)] == ["done", "interrupted", "done"]


def test_a_thread_that_is_gone_is_not_asked() -> None:
    steps = NextStep(lambda: True)
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    known = {state.id for state in thread_states()}
    states = [state for state in thread_states() if state.id != own_id()]
    go.set()
    thread.join()
    assert {state.id for state in thread_states()} < known
    gone = [state for state in states if state.id not in {state.id for state in thread_states()}]
    assert gone and not any(map(steps.set, gone))


def test_a_thread_that_is_asked_to_join_while_an_op_is_recorded_has_the_recorder_once(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever step it is asked: PyTorch takes a mode off the thread's stack until it returns."""
    flush = CaptureSession.flush_if_due

    def asked(self: CaptureSession) -> None:
        assert threads._current is not None and threads._current.join()
        flush(self)

    monkeypatch.setattr(CaptureSession, "flush_if_due", asked)

    def program() -> torch.Tensor:
        x = torch.ones(3)
        for _ in range(3):
            x = x * 2 + 1
        return x

    captured = capture(program)
    assert captured.unsupported() == {} and captured.ops().count("aten::mul.Tensor") == 3
    captured.replays()


@pytest.mark.recorder("python")
def test_a_thread_that_joined_where_no_frame_shows_the_op_has_the_recorder_once_from_the_next_op_on(
    capture: Capture,
) -> None:
    """PyTorch puts the mode back that it had taken off, beside the one of the joining."""

    def program() -> torch.Tensor:
        set_modes([*mode_stack(), *mode_stack()])
        x = torch.ones(3) * 2
        assert len(mode_stack()) == 1
        return x + 1

    captured = capture(program)
    assert captured.unsupported() == {} and captured.ops().count("aten::mul.Tensor") == 1
    captured.replays()
