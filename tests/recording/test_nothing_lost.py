"""What a program ran is what the capture holds, counted by somebody else: PyTorch's own profiler, in a run without one.

The programs issue their operators where it is easy to miss some: from hooks, finalizers, signal handlers, trace
functions, threads, beneath modes. Each runs several times, so that the native recorder's hot path takes part.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import replayfmt
from replayfmt.errors import ReplayRefused
from replayfmt.recording.calls import CallRecorder

from .conftest import Capture

TIMES = 4


class Leaves:
    """Runs operators when it dies."""

    def __init__(self, made: list[torch.Tensor]) -> None:
        self.made = made
        self.itself = self  # garbage, then

    def __del__(self) -> None:
        self.made.append(torch.ones(2) * 3)


def finalizers(made: list[torch.Tensor]) -> None:
    Leaves(made)
    gc.collect()
    storage = (torch.ones(3) * 2).untyped_storage()
    weakref.finalize(storage, lambda: made.append(torch.ones(1) + 4))
    del storage
    x = torch.ones(3).exp()
    gone = weakref.ref(x, lambda _: made.append(torch.zeros(2) + 1))
    del x
    assert gone() is None


def signal_handler(made: list[torch.Tensor]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: made.append(torch.ones(2) + 5))
    try:
        x = torch.ones(2)
        for _ in range(3):
            x = x * 2
            os.kill(os.getpid(), signal.SIGUSR1)
        made.append(x + 1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def trace_function(made: list[torch.Tensor]) -> None:
    def traced() -> torch.Tensor:
        x = torch.ones(3)
        y = x * 2
        return y + 1

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is traced.__code__ and event == "line":
            made.append(torch.ones(2) + 7)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        made.append(traced())
    finally:
        sys.settrace(before)


def hooks_of_backward_passes(made: list[torch.Tensor]) -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                torch.autograd.backward((inner**2).sum())
            assert inner.grad is not None
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: made.append(torch.ones(2) * 8))
            return grad * inner.grad

    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    a.register_hook(lambda grad: grad * 3)
    b.register_post_accumulate_grad_hook(lambda each: made.append(each.grad.exp()))
    torch.autograd.graph.register_multi_grad_hook((a, b), lambda grads: made.append(grads[0] + 1))
    product = Again.apply(a * b)
    product.grad_fn.register_prehook(lambda grads: tuple(grad - 1 for grad in grads))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
        product.sin().sum().backward()


def threads(made: list[torch.Tensor]) -> None:
    with ThreadPoolExecutor(1) as pool:
        made += pool.map(lambda number: (torch.ones(2) * number).sin(), range(3))
    x = torch.ones(3, requires_grad=True)
    y = x.sin().exp()
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None
    made.append(x.grad)


class Replaces(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 + 1 if func is torch.ops.aten.mul.Tensor else result


def modes_and_guards(made: list[torch.Tensor]) -> None:
    x = torch.arange(3.0)
    with Replaces():
        made.append(x * 3)
    with torch._C._AutoDispatchBelowAutograd():
        made.append(x * 4)


def memory_that_changes_hands(made: list[torch.Tensor]) -> None:
    a, b, view = torch.arange(8.0), torch.arange(8.0) * 2, torch.empty(0)
    for number in range(3):
        view.set_((a, b)[number % 2].untyped_storage(), number, (2,), (2,))  # type: ignore[call-overload]
        made.append(view.add_(1).clone())
    torch.utils.swap_tensors(a, b)
    b.data = a * 3
    grown = torch.zeros(2).resize_(5).fill_(2)
    written = (a + 1).numpy()
    written[:] = 5
    made += [a + b, grown, torch.from_numpy(written) + 1, torch.from_dlpack(a).mul_(2)]


PROGRAMS = (
    finalizers,
    signal_handler,
    trace_function,
    hooks_of_backward_passes,
    threads,
    modes_and_guards,
    memory_that_changes_hands,
)


def is_composite(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.partition("::")[2])
    overloads = [getattr(packet, each) for each in packet.overloads()]
    dispatched = [each for each in overloads if torch._C._dispatch_has_kernel(each.name())]
    return all(each.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) for each in dispatched)


def issued(run: Callable[[], Any]) -> Counter[str]:
    """The operators that a run calls, without those inside of others; of composites their parts."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
        run()
    found: Counter[str] = Counter()
    waiting = [event for event in profiled.events() if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        if event.name.startswith("aten::") and not is_composite(event.name):
            found[event.name] += 1
        else:
            waiting += event.cpu_children
    return found


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_operator_that_ran_is_in_the_capture(capture: Capture, program: Callable[[Any], None]) -> None:
    def run() -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for _ in range(TIMES):
            program(made)
        return made

    run()
    expected = issued(run)
    captured = capture(run)
    assert sum(expected.values()) >= 3 * TIMES
    assert expected - Counter(name.rpartition(".")[0] for name in captured.ops()) == Counter()
    assert captured.unsupported() == {}
    captured.replays()


# An operator's first call takes the complete path, which is written in Python.
_EACH_ONCE = (
    torch.sin,
    torch.cos,
    torch.tan,
    torch.exp,
    torch.neg,
    torch.abs,
    torch.sqrt,
    torch.floor,
    torch.ceil,
    torch.sigmoid,
)


class _Cycle:
    def __init__(self, written: torch.Tensor) -> None:
        self.itself, self.written = self, written

    def __del__(self) -> None:
        self.written.add_(1)


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
def test_what_finalizers_run_in_the_middle_of_the_recorders_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs wherever something is allocated: here where the recorder prepares an op's record."""
    written, path, step = torch.zeros(3), tmp_path / "1.opreplay", CallRecorder.before

    def collecting(*args: Any, **kwargs: Any) -> Any:
        begun = step(*args, **kwargs)
        gc.collect()
        return begun

    gc.disable()
    try:
        with replayfmt.capture(path):
            monkeypatch.setattr(CallRecorder, "before", collecting)
            for function in _EACH_ONCE[:5]:
                _Cycle(written)
                function(torch.ones(3))
            monkeypatch.setattr(CallRecorder, "before", step)
    finally:
        gc.enable()
    with replayfmt.open(path) as capture:
        recorded = sum(op.kernel.name == "aten::add_" for op in capture.ops)
        assert set(capture.summary.unsupported) == {"unseen_work"}
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.run(path)
    [sentence] = [each for each in refused.value.findings if "unseen_work" in each]
    told = re.search(r"finalizers or signal handlers in the middle of the recorder's work ran (\d+) ", sentence)
    assert told is not None and recorded + int(told[1]) == written[0] == 5
    assert not any(type(getattr(each, "__self__", None)).__name__ == "Interruptions" for each in gc.callbacks)


def _ran_by_a_handler(path: Path, monkeypatch: pytest.MonkeyPatch, handler: Callable[..., None]) -> int:
    """Captures a program whose handler runs in the middle of the recorder's work on its operators, and between them.
    Returns how many `mul_` are recorded."""
    step = CallRecorder.before

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        begun = step(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)
        return begun

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with replayfmt.capture(path):
            assert signal.getsignal(signal.SIGUSR1) is handler
            signal.raise_signal(signal.SIGUSR1)
            monkeypatch.setattr(CallRecorder, "before", interrupted)
            for function in _EACH_ONCE:
                function(torch.ones(3))
            monkeypatch.setattr(CallRecorder, "before", step)
            signal.raise_signal(signal.SIGUSR1)
        assert signal.signal(signal.SIGUSR1, handler) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    with replayfmt.open(path) as capture:
        return sum(op.kernel.name == "aten::mul_" for op in capture.ops)


def test_what_signal_handlers_run_in_the_middle_of_the_recorders_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, path, ran = torch.ones(3), tmp_path / "1.opreplay", []

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append(frame)
        written.mul_(2)

    recorded = _ran_by_a_handler(path, monkeypatch, handler)
    assert written[0] == 2.0 ** len(ran) and len(ran) > 10
    with pytest.raises(ReplayRefused) as refused:
        replayfmt.run(path)
    [sentence] = [each for each in refused.value.findings if "unseen_work" in each]
    assert f"signal handlers in the middle of the recorder's work ran {len(ran) - recorded} operators" in sentence
    assert 2 <= recorded < len(ran), "what it runs between operators is recorded"


def test_a_signal_handler_that_runs_no_operator_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "1.opreplay", []
    assert _ran_by_a_handler(path, monkeypatch, lambda number, frame: ran.append(number)) == 0
    assert len(ran) > 10
    assert replayfmt.run(path).outcome == "ok"


def test_a_handler_set_during_a_capture_is_the_programs_own(tmp_path: Path) -> None:
    """Also for what it raises, and after the capture."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(number)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with replayfmt.capture(tmp_path / "1.opreplay"):
            torch.ones(2)
            assert signal.signal(signal.SIGUSR1, handler) is before
            assert signal.getsignal(signal.SIGUSR1) is handler
            with pytest.raises(TimeoutError) as caught:
                signal.raise_signal(signal.SIGUSR1)
            assert [entry.name for entry in caught.traceback][1:] == ["handler"]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.recorder("native")
def test_a_program_that_is_as_deep_as_python_lets_it_be_is_recorded(capture: Capture) -> None:
    def down(frames: int) -> torch.Tensor:
        return down(frames - 1) if frames else torch.add(torch.ones(2), 1, out=torch.empty(0))  # a complete path

    def program() -> Any:
        limit, results = sys.getrecursionlimit(), []
        with suppress(RecursionError):
            for frames in range(limit - 200, limit):
                results.append(down(frames))
        assert results
        assert sys.getrecursionlimit() == limit
        return results

    captured = capture(program, digests="ops")
    assert captured.unsupported() == {}
    captured.replays()
