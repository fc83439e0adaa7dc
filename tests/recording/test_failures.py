"""A failed write, or a mistake of the recorder's, ends the capture and not the program."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo  # or a start would not keep it out

import replayfmt
from replayfmt.errors import CaptureFailed
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording import calls
from replayfmt.recording.recorder import Recorder

from .conftest import Capture


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(os, "writev", refuse)
    monkeypatch.setattr(os, "pwrite", refuse)


def test_a_full_disk_ends_the_capture_with_one_error_and_the_program_goes_on(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path / "x.opreplay")
    recorder.start()
    torch.ones(3)
    with monkeypatch.context() as patched:
        full_disk(patched)
        content = torch.ones(1 << 20)
        content.untyped_storage()
        recorder._core.flush()
    assert (torch.ones(3) + 1).sum().item() == 6.0
    with pytest.raises(CaptureFailed, match="No space left"):
        recorder.close()
    recorder.close()
    assert capfd.readouterr().err.count("the capture ended early") == 1
    assert not (tmp_path / "x.opreplay").exists()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_programs_own_exception_matters_more_than_a_failed_write(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), replayfmt.capture(tmp_path / "x.opreplay"):
        torch.ones(3)
        full_disk(monkeypatch)
        raise ZeroDivisionError


def test_a_mistake_of_the_recorder_does_not_reach_the_program(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a mistake")

    with pytest.raises(CaptureFailed, match="KeyError") as failure, replayfmt.capture(tmp_path / "x.opreplay"):
        torch.ones(3)
        monkeypatch.setattr(calls.CallRecorder, "after", broken)
        assert (torch.ones(3) + 1).tolist() == [2.0, 2.0, 2.0]
    assert isinstance(failure.value.__cause__, KeyError)
    assert "recording failed" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
def test_buffered_ops_reach_the_file_within_a_second(tmp_path) -> None:
    recorder = Recorder(tmp_path / "x.opreplay")
    recorder.start()
    try:
        for _ in range(7):
            torch.ones(3)
        deadline = time.monotonic() + 300
        while True:
            reader = open_capture(tmp_path / "x.opreplay.partial")
            if reader.record_count >= 7 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert reader.record_count >= 7
        assert not reader.complete
    finally:
        recorder.close()


def test_a_forked_child_does_not_record_and_leaves_the_file_alone(tmp_path) -> None:
    path = tmp_path / "x.opreplay"
    with replayfmt.capture(path):
        torch.ones(3)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.ones(3) + 1
                with replayfmt.scope("in the child"):
                    status = 0 if torch.rand(2).shape == (2,) else 1
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
        torch.zeros(3)
    reader = open_capture(path)
    kernels = [reader.kernels[r.signature.kernel].name for r in reader.records() if r.signature.kernel]
    assert kernels == ["aten::ones", "aten::zeros"]


def test_a_forked_child_that_leaves_the_with_block_leaves_quietly(tmp_path) -> None:
    path = tmp_path / "x.opreplay"
    child = 0
    try:
        with replayfmt.capture(path):
            torch.ones(3)
            child = os.fork()
        if child == 0:
            os._exit(0)
    finally:
        if child == 0 and not path.exists():
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert open_capture(path).complete


def test_an_op_that_names_a_gpu_that_is_not_there_raises_and_is_recorded_as_such(capture: Capture) -> None:
    def program() -> torch.Tensor:
        for _ in range(3):
            with pytest.raises((AssertionError, RuntimeError)):
                torch.ops.aten.ones.default([3], device=torch.device("cuda:120"))
        return torch.ones(3).exp()

    captured = capture(program)
    raised = [record for record in captured.records(RecordKind.op) if record.signature.status is OpStatus.raised]
    assert len(raised) == 3


STEPS_OF_A_START = (
    "replayfmt.recording.capture_session.Streams.__init__",
    "replayfmt.recording.capture_session.NumericState.__init__",
    "replayfmt.recording.capture_session.CallRecorder.__init__",
    "replayfmt.recording.recorder.keep_dynamo_out",
    "replayfmt.recording.recorder.AfterFork.__init__",
    "replayfmt.recording.recorder.Hooks.install",
    "replayfmt.recording.recorder.Graphs.install",
    "replayfmt.recording.recorder.DirectWrites.install",
    "replayfmt.recording.recorder.ProgramReplacement.install",
    "replayfmt.recording.capture_session.CaptureSession.resume",
    "replayfmt.recording.recorder.Termination.install",
    pytest.param(
        "replayfmt.recording.program.thread_attachment._InferenceMode.begin",
        marks=pytest.mark.recorder("python"),
        id="inference",
    ),
    pytest.param(
        "replayfmt.recording.dispatch.mode.RecordingMode.__enter__", marks=pytest.mark.recorder("python"), id="mode"
    ),
    pytest.param("replayfmt.native.hook.DispatchHook.begin", marks=pytest.mark.recorder("native"), id="hook"),
    "replayfmt.native.watching.ThreadWatch.begin",
    "replayfmt.recording.recorder.Threads.install",
    "replayfmt.recording.recorder.HiddenThread.start",
)


def state_of_the_process() -> list[Any]:
    """What a capture replaces in other libraries, and in Python."""
    replaced = (
        torch.Tensor,
        torch.storage.UntypedStorage,
        torch._C.ScriptFunction,
        torch._C._InferenceMode,
        torch.Event,
    )
    namespaces = [vars(each) for each in (*replaced, os, threading, torch._ops)]
    held = [{name: id(value) for name, value in namespace.items()} for namespace in namespaces]
    return [held, torch._C._len_torch_dispatch_stack(), signal.getsignal(signal.SIGTERM), list(sys.meta_path)]


@pytest.mark.slow
@pytest.mark.recorder("python", "native")
@pytest.mark.parametrize("step", STEPS_OF_A_START)
def test_a_start_that_fails_undoes_what_it_did_and_a_later_capture_works(
    step: str, tmp_path, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(lambda: torch.ones(3) + 1)  # what a process keeps of its first capture is there
    before = state_of_the_process()

    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError(f"this PyTorch has no {step}")

    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        if step.endswith("Streams.__init__"):
            patched.setattr("replayfmt.recording.capture_session.followed_kind", lambda: "cuda")
        with pytest.raises(CaptureFailed, match="could not be started with torch 2"):
            replayfmt.Recorder(tmp_path / "failed.opreplay").start()
    assert state_of_the_process() == before
    assert not list(tmp_path.glob("failed*"))
    later = capture(lambda: torch.ones(3) + 1)
    assert later.ops() == ["aten::ones.default", "aten::add.Tensor"]
    later.replays()
