"""What other threads do while and after a capture is closed: nothing of it reaches the file or is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording import kernels
from replayfmt.recording.dispatch.native_mode import NativeMode
from replayfmt.recording.recorder import Recorder
from replayfmt.recording.storages.trackers import ATTRIBUTE


class Held:
    """An operator of PyTorch's own, so that it can take the hot path, whose call waits once it is told to hold."""

    name = "aten::erfinv"

    def __init__(self) -> None:
        self.entered, self.released, self.holds = threading.Event(), threading.Event(), False
        self._library = torch._C._dispatch_library("IMPL", "aten", "CPU", __file__, 1)
        self._library.impl("erfinv", "CPU", self._run)
        self.op = torch.erfinv

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self.holds:
            self.entered.set()
            assert self.released.wait(600)
        return torch.empty_like(x)

    def close(self) -> None:
        self._library.reset()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(kernels, "is_replaced", lambda name: False)  # of such an operator the parts are recorded
    held = Held()
    yield held
    held.released.set()  # a test that failed leaves its thread waiting
    held.close()


class WatchedLock:
    """A recorder's lock that counts who found it taken and waits."""

    def __init__(self, recorder: Recorder) -> None:
        core = recorder._core
        assert core is not None
        self._lock, self._waiting = core.lock, threading.Semaphore(0)
        core.lock = core.buffer.lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.release()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def await_waiting(self, count: int) -> None:
        for _ in range(count):
            assert self._waiting.acquire(timeout=600)


def started(path: Path) -> Recorder:
    recorder = Recorder(path)
    recorder.start()
    return recorder


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)  # nothing waits for one that a failed test left
    thread.start()
    return thread


@pytest.mark.parametrize("calls_before", [0, 5], ids=["at its first call", "at a later call"])
def test_an_op_that_returns_after_the_close_is_not_recorded(
    tmp_path: Path, held: Held, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, calls_before: int
) -> None:
    capturing = started(tmp_path / "1.opreplay")
    core = capturing._core
    assert core is not None
    complete: list[str] = []
    before = core.calls.before

    def counted(kernel: Any, *rest: Any, **options: Any) -> Any:
        complete.append(kernel.name)
        return before(kernel, *rest, **options)

    monkeypatch.setattr(core.calls, "before", counted)
    made: list[torch.Tensor] = []

    def work() -> None:
        x = torch.ones(3)
        for _ in range(calls_before):
            held.op(x)
        held.holds = True
        made.append(held.op(x))
        held.holds = False
        with replayfmt.scope("late"):
            for _ in range(5):
                made.append(held.op(x) + 1)
        assert made[0].tolist()

    thread = in_thread(work)
    assert held.entered.wait(600)
    native = capturing.options.recorder != "python"  # whose complete path hears of the first call when it has returned
    assert complete.count(held.name) == (min(calls_before, 1) if native else calls_before + 1)
    capturing.close()
    held.released.set()
    thread.join()
    core.flush()
    core.flush_if_due()
    assert not any(hasattr(tensor.untyped_storage(), ATTRIBUTE) for tensor in made)
    assert capsys.readouterr().err == ""
    capturing.close()
    reader = open_capture(tmp_path / "1.opreplay")
    names = [reader.kernels[r.signature.kernel].name for r in reader.records() if r.kind is RecordKind.op]
    assert names.count(held.name) == calls_before
    assert reader.complete and reader.summary.unsupported == {}

    with replayfmt.capture(tmp_path / "2.opreplay"):
        made[0].fill_(1).add_(1)
    with replayfmt.Plan(tmp_path / "2.opreplay") as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


@pytest.fixture
def on_complete_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls came to Python before they ran."""
    seen: list[str] = []
    before = NativeMode.before

    def counted(self: NativeMode, func: Any, *arguments: Any) -> Any:
        seen.append(str(func))
        return before(self, func, *arguments)

    monkeypatch.setattr(NativeMode, "before", counted)
    return seen


@pytest.mark.slow
@pytest.mark.recorder("native")
@pytest.mark.parametrize("followed", [False, True], ids=["no other capture", "another capture"])
def test_an_op_on_the_hot_path_that_returns_after_the_close_is_not_recorded(
    tmp_path: Path, held: Held, capsys: pytest.CaptureFixture[str], on_complete_path: list[str], followed: bool
) -> None:
    """While one thread records: another one ends the capture."""
    x = torch.ones(3)
    capturing = started(tmp_path / "1.opreplay")
    others: list[Recorder] = []

    def close() -> None:
        assert held.entered.wait(600)
        capturing.close()
        if followed:
            others.append(started(tmp_path / "2.opreplay"))
        held.released.set()

    for _ in range(5):
        held.op(x)
    on_complete_path.clear()
    closing = in_thread(close)
    held.holds = True
    late = held.op(x)
    held.holds = False
    closing.join()
    assert "aten.erfinv.default" not in on_complete_path
    reader = open_capture(tmp_path / "1.opreplay")
    assert reader.complete and reader.summary.records[RecordKind.op] == 5
    assert reader.summary.unsupported == {}
    for other in others:
        late.fill_(1).add_(1)
        other.close()
        # The op was still running when this capture began: what it did meanwhile is not in it, which it says.
        assert open_capture(other.path).summary.unsupported == {"unseen_thread": 1}
        names = [kernel.name for kernel in open_capture(other.path).kernels if kernel is not None]
        assert held.name not in names and names
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
def test_an_op_that_returns_in_the_next_capture_is_in_neither(tmp_path: Path, held: Held) -> None:
    first = started(tmp_path / "1.opreplay")
    torch.ones(1)
    held.holds = True
    made: list[torch.Tensor] = []
    thread = in_thread(lambda: made.append(held.op(torch.ones(3))))
    assert held.entered.wait(600)
    first.close()
    second = started(tmp_path / "2.opreplay")
    torch.ones(1)
    held.released.set()
    thread.join()
    made[0].fill_(1).add_(1)
    second.close()
    for recorder, unsupported in ((first, {}), (second, {"unseen_thread": 1})):
        reader = open_capture(recorder.path)
        assert reader.complete and reader.summary.unsupported == unsupported
        assert held.name not in [kernel.name for kernel in reader.kernels if kernel is not None]


def test_an_op_that_waits_for_the_lock_while_the_capture_is_closed_just_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = started(tmp_path / "1.opreplay")
    core, lock = recorder._core, WatchedLock(recorder)
    assert core is not None
    made: list[torch.Tensor] = []
    x = torch.ones(3)  # a storage that would enter the capture
    with lock:
        thread = in_thread(lambda: made.append(x + 1))
        lock.await_waiting(1)  # it has found recording on
        core.finish()
    thread.join()
    recorder.close()
    assert made[0].tolist() == [2, 2, 2]
    assert capsys.readouterr().err == ""
    assert open_capture(tmp_path / "1.opreplay").complete


def test_what_the_hooks_tell_after_the_close_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = started(tmp_path / "1.opreplay")
    x = torch.ones(3) + 1
    core, lock = recorder._core, WatchedLock(recorder)
    assert core is not None
    with lock:
        threads = [
            in_thread(lambda: recorder.unsupported("host_call", "late", "too late")),
            in_thread(lambda: recorder.mark_outside_write(x)),
            in_thread(lambda: recorder.host_read("tolist", x)),
            in_thread(lambda: recorder.scope_begin("late")),
            in_thread(core.flush),
            in_thread(lambda: core.fail(ValueError("too late"))),
        ]
        lock.await_waiting(len(threads))  # all of them have found recording on
        core.finish()
    for thread in threads:
        thread.join()
    recorder.close()
    assert capsys.readouterr().err == ""
    reader = open_capture(tmp_path / "1.opreplay")
    assert reader.complete and reader.summary.unsupported == {}
    assert [scope.name for scope in reader.scopes if scope is not None] == []
