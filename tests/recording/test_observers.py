"""PyTorch's own observers under a capture: RecordFunction, which they need, is off only where nobody needs it."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import _set_empty_test_observer
from torch.autograd.profiler_legacy import profile as LegacyProfile
from torch.profiler import ExecutionTraceObserver, profile, record_function

import replayfmt
from replayfmt.native import watching
from replayfmt.pytorch.environment import set_up_vector_math

from .conftest import Capture

STATE = watching.thread_watch("auto").state
pytestmark = [
    pytest.mark.recorder("native"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(STATE != "native", reason=f"the recorder's library cannot be built here ({STATE})"),
]

_TORCH_CPU = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def enabled() -> bool:
    """Whether RecordFunction is on in the calling thread."""
    function = _TORCH_CPU._ZN2at23isRecordFunctionEnabledEv
    function.restype = ctypes.c_bool
    return bool(function())


def falls_quiet() -> bool:
    """Whether it is off after operators that are not new to the capture, but for the few times at which it is on."""
    x = torch.ones(2)
    for _ in range(10):
        x.neg()
        if not enabled():
            return True
    return False


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Other tests may have compiled; and RecordFunction is on again after each test."""
    torch._dynamo.reset()
    yield
    assert enabled()


def step() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_it_is_off_while_the_capture_is_alone(capture: Capture) -> None:
    def program() -> tuple[bool, list[bool]]:
        first, seen = enabled(), []
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda _gradient: seen.append(enabled()))
        for _ in range(10):
            (x * 2).sum().backward()
        return first, seen

    captured = capture(program)
    first, seen = captured.returned
    assert not first
    assert seen[0], "what follows something new is watched"
    assert False in seen
    assert not captured.unsupported()


# ------------------------------------------------------------------------------------------------- PyTorch's observers


def kineto(run: Callable[[], None]) -> list[str]:
    with profile() as found:
        run()
    return [event.name for event in found.events()]


def legacy(run: Callable[[], None]) -> list[str]:
    with LegacyProfile() as found:
        run()
    return [event.name for event in found.function_events]


def execution_trace(run: Callable[[], None]) -> list[str]:
    path = Path(os.environ["PYTEST_TRACE"])
    observer = ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    run()
    observer.stop()
    observer.unregister_callback()
    return [node["name"] for node in json.loads(path.read_text())["nodes"]]


def of_scopes(run: Callable[[], None]) -> list[str]:
    with profile() as found:
        run()
        with record_function("mine"):
            torch.ones(2).sin()
    return [event.name for event in found.events()]


OBSERVERS = [kineto, legacy, execution_trace, of_scopes]


@pytest.mark.parametrize("observe", OBSERVERS, ids=lambda each: each.__name__)
def test_an_observer_that_starts_during_a_capture_sees_what_it_sees_without_one(
    capture: Capture, observe: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_TRACE", str(tmp_path / "trace.json"))
    expected = observe(step)
    assert len(expected) > 40 and "aten::linear" in expected

    def program() -> list[str]:
        assert falls_quiet()
        return observe(step)

    assert Counter(capture(program).returned) == Counter(expected)
    assert Counter(observe(step)) == Counter(expected), "nor is anything left behind"


@pytest.mark.parametrize("observe", [kineto, execution_trace], ids=lambda each: each.__name__)
def test_one_that_started_before_goes_on(
    capture: Capture, observe: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_TRACE", str(tmp_path / "trace.json"))
    seen: list[bool] = []

    def program() -> None:
        seen.append(enabled())
        step()

    found = Counter(observe(lambda: capture(program)))
    assert seen == [True]
    assert found >= Counter(observe(step))


def test_what_a_capture_computes_at_its_start_is_in_no_profile(capture: Capture) -> None:
    set_up_vector_math.cache_clear()
    assert "aten::exp" not in kineto(lambda: capture(step))
    set_up_vector_math.cache_clear()
    captured = capture(step)
    assert set_up_vector_math.cache_info().currsize == 1, "a start without a profiler computes it"
    assert "aten::exp" not in captured.ops()


def test_a_profiler_of_all_threads_that_another_thread_starts_sees_the_first(capture: Capture) -> None:
    """The first thread ran without callbacks until the other one began, and is in Python meanwhile."""
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)

    def program() -> list[str]:
        profiler = profile(experimental_config=settings)
        torch.ones(2)
        thread = threading.Thread(target=profiler.start)
        thread.start()
        thread.join()
        assert enabled()
        torch.ones(5).sin()
        thread = threading.Thread(target=profiler.stop)
        thread.start()
        thread.join()
        return [event.name for event in profiler.events()]

    returned = capture(program).returned
    assert {"aten::ones", "aten::sin"} <= set(returned)


# --------------------------------------------------------------------------------------------------------- its threads


def test_it_is_on_again_where_a_capture_ended_that_another_thread_ended(tmp_path: Path) -> None:
    """The thread in which it was off is idle meanwhile."""
    began, ended = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    seen: list[bool] = []

    def first() -> None:
        while not began._cond._waiters:  # a thread that joins only now makes all loud
            time.sleep(0.001)
        recording.__enter__()
        seen.append(not falls_quiet())
        began.wait()
        ended.wait()
        seen.append(enabled())

    recording = replayfmt.capture(tmp_path / "ended.opreplay", recorder="native")
    thread = threading.Thread(target=first)
    thread.start()
    began.wait()
    recording.__exit__(None, None, None)
    ended.wait()
    thread.join()
    assert seen == [False, True]


def test_it_is_on_again_in_a_forked_child(tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "parent.opreplay", recorder="native"):
        assert falls_quiet()
        child = os.fork()
        if child == 0:
            os._exit(0 if enabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert falls_quiet()


def test_it_is_on_again_after_a_backward_pass_in_which_the_capture_ended(tmp_path: Path) -> None:
    recording = replayfmt.capture(tmp_path / "inside.opreplay", recorder="native")
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda _gradient: None if recording.__exit__(None, None, None) else None)
    recording.__enter__()
    (x * 2).sum().backward()
    assert enabled()


def test_an_observer_of_all_threads_that_begins_inside_a_backward_pass_is_told_what_it_misses(
    capture: Capture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"

    def program() -> tuple[bool, torch.Tensor]:
        x = torch.ones(3, requires_grad=True)
        x.sin().cos().sum().backward()  # nothing of the next pass is new
        x.sin().cos().sum().backward()
        y = x.sin().cos()
        observer = ExecutionTraceObserver()
        y.register_hook(lambda _gradient: observer.register_callback(str(path)).start() and None)
        z = y.sum()
        assert falls_quiet()
        z.backward()
        seen = enabled()
        made = torch.ones(2).neg()
        observer.stop()
        observer.unregister_callback()
        return seen, made

    for _ in range(10):  # at few times the pass is not quiet, and nothing is missed
        captured = capture(program)
        names = [node["name"] for node in json.loads(path.read_text())["nodes"]]
        assert captured.returned[0], "it is on after the pass"
        assert {"aten::ones", "aten::neg"} <= set(names)
        captured.replays()
        told = capfd.readouterr().err.count("was started during a backward pass did not see")
        assert told == ("SinBackward0" not in names)
        if told:
            return
    pytest.fail("no pass was quiet")


def test_threads_of_backward_passes_and_pools_are_seen_and_quiet(capture: Capture) -> None:
    def program() -> torch.Tensor:
        forked = torch.jit.script(_fork_and_wait)(torch.ones(2))
        step()
        assert falls_quiet()
        return forked

    captured = capture(program)
    assert not captured.unsupported()
    assert "aten::neg.default" in captured.ops()
    captured.replays()


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(x) * 2


def _fork_and_wait(x: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(_negated, x)) + x


def test_compiled_code_keeps_it_on(capture: Capture) -> None:
    """Its guards are looked through without the key, inside a RecordFunction."""
    compiled: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)

    def program() -> bool:
        before = enabled()
        function(torch.ones(3))
        function(torch.ones(3))
        return before

    function(torch.ones(3))
    assert capture(program).returned, "it was compiled before"
    assert compiled == [1]
    torch._dynamo.reset()

    def again() -> list[bool]:
        before = enabled()
        torch.compile(lambda x: x.cos() + 1, backend=backend)(torch.ones(3))
        return [before, enabled()]

    assert capture(again).returned == [False, True], "it is compiled meanwhile"


# ------------------------------------------------------------------------------------------------ callbacks of C++ code


@pytest.mark.parametrize("noticed_by", ["a look", "the end"])
def test_a_callback_that_comes_through_no_door_is_noticed_and_told(
    capture: Capture, capfd: pytest.CaptureFixture[str], noticed_by: str
) -> None:
    """As one of C++ code. Here by a function that the capture could not wrap, since the program holds it."""
    register = _set_empty_test_observer

    def program() -> None:
        assert falls_quiet()
        register(True, 1.0)
        while noticed_by == "a look" and falls_quiet():
            pass

    try:
        capture(program)
    finally:
        torch._C._autograd._clear_callbacks()
    assert capfd.readouterr().err.count("registered a RecordFunction callback during the capture") == 1
    capture(lambda: torch.ones(2))
    assert "RecordFunction" not in capfd.readouterr().err
