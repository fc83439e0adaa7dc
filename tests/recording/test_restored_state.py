"""Captures that begin or end where PyTorch puts a thread's state back afterwards, and work under guards on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _len_torch_dispatch_stack

import replayfmt
from replayfmt.native.hook import loaded_hook

from .conftest import Capture, Captured
from .test_threads import Server, details

X = torch.ones(3)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Of a capture that is over, in this thread. The operator fails where a dispatch key is left without its mode."""
    yield
    torch.ones(1).neg()
    hook = loaded_hook()
    assert hook is None or not hook.included()
    assert _len_torch_dispatch_stack() == 0


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    return replayfmt.capture(tmp_path / "recording.opreplay")


def begin(recording: Any) -> None:
    recording.__enter__()


def end(recording: Any) -> None:
    recording.__exit__(None, None, None)


def made(tmp_path: Path) -> Captured:
    return Captured(tmp_path / "recording.opreplay", None)


# ------------------------------------------------------------------------------------------------------ backward passes


def backward(hook: Callable[[], Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.sin() * 2
    y.register_hook(lambda _gradient: hook() and None)
    y.sum().backward()


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
def test_one_that_begins_inside_a_backward_pass_says_what_it_lacks_and_goes_on_after_it(
    recording: Any, tmp_path: Path
) -> None:
    backward(lambda: begin(recording))
    for _ in range(3):
        X.tan()
    end(recording)
    captured = made(tmp_path)
    assert captured.ops().count("aten::tan.default") == 3
    assert "the capture began inside a backward pass: what is left of the pass is not recorded" in details(captured)


def test_one_that_ends_inside_a_backward_pass_leaves_nothing_behind(recording: Any, tmp_path: Path) -> None:
    begin(recording)
    backward(lambda: end(recording))
    X.tan()
    assert "aten::tan.default" not in made(tmp_path).ops()


def test_one_that_ends_while_another_thread_is_in_a_backward_pass_leaves_nothing_behind_there(
    recording: Any, tmp_path: Path
) -> None:
    inside, ended, left = threading.Event(), threading.Event(), []

    def work() -> None:
        backward(lambda: (inside.set(), ended.wait(60)))
        left.append((loaded_hook() and loaded_hook().included(), _len_torch_dispatch_stack()))

    begin(recording)
    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    end(recording)
    ended.set()
    thread.join()
    assert left in ([(False, 0)], [(None, 0)])


# ------------------------------------------------------------------------------------------------------- inference mode


@pytest.mark.parametrize("enabled", [True, False])
def test_one_that_begins_in_inference_mode_goes_on_after_it(recording: Any, tmp_path: Path, enabled: bool) -> None:
    with torch.inference_mode(enabled):
        begin(recording)
        X.sin()
    X.cos().tan()
    end(recording)
    assert made(tmp_path).ops() == ["aten::sin.default", "aten::cos.default", "aten::tan.default"]


def test_one_that_ends_in_inference_mode_leaves_nothing_behind(recording: Any, tmp_path: Path) -> None:
    begin(recording)
    with torch.inference_mode():
        X.sin()
        with torch.inference_mode(False):
            end(recording)
        X.cos()
    X.tan()
    assert made(tmp_path).ops() == ["aten::sin.default"]


def test_a_worker_that_a_capture_meets_in_inference_mode_is_recorded_after_it(capture: Capture) -> None:
    met = threading.Event()

    @torch.inference_mode()
    def serve(_: str) -> torch.Tensor:
        began.set()
        met.wait(60)
        return X.sin()

    def work(item: str) -> Any:
        return serve(item) if item == "inference" else X.tan()

    began, server = threading.Event(), Server(work)
    try:
        server.give("inference")
        assert began.wait(60)

        def program() -> None:
            met.set()
            server.take()
            server.ask("after")

        captured = capture(program)
    finally:
        server.close()
    assert captured.ops() == ["aten::sin.default", "aten::tan.default"]
    assert not captured.unsupported()


# --------------------------------------------------------------------------------------------------------------- guards

NO_KEYS = torch._C.DispatchKeySet.from_raw_repr(0)
GUARDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no dispatch to Python": torch._C._DisableTorchDispatch,
    "without the key of Python": lambda: torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    ),
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "without modes": torch.utils._python_dispatch._disable_current_modes,
}


@pytest.mark.recorder("native")
@pytest.mark.parametrize("guard", GUARDS)
def test_work_under_a_guard_on_dispatch_is_recorded(capture: Capture, guard: str) -> None:
    def program() -> torch.Tensor:
        with GUARDS[guard]():
            y = X.sin()
        return y.cos()

    captured = capture(program)
    assert captured.ops() == ["aten::sin.default", "aten::cos.default"]
    captured.replays()


@pytest.mark.recorder("native")
def test_what_functionalization_asks_of_tensors_without_memory_is_not(capture: Capture) -> None:
    captured = capture(lambda: torch.func.functionalize(lambda x: x.sin().add_(1))(X))
    assert captured.ops() == ["aten::sin.default", "aten::add.Tensor"]


def test_one_that_begins_under_a_guard_that_takes_it_away_says_so(recording: Any, tmp_path: Path) -> None:
    """As a guard of C++ code does."""
    with torch._C._ForceDispatchKeyGuard(NO_KEYS, NO_KEYS):
        begin(recording)
        X.sin()
    X.cos()
    end(recording)
    captured = made(tmp_path)
    assert captured.ops() == ["aten::sin.default"]
    assert any("put the dispatch keys" in detail for detail in details(captured))
