"""What the threads of backward passes record on an accelerator. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test

import replayfmt
from replayfmt import Plan
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording.dispatch.native_mode import NativeMode
from replayfmt.recording.program import threads

sim = register()


def test_a_training_step_that_holds_nothing_new_takes_no_python_in_either_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ["OPREPLAY_RECORDER"] != "native":
        pytest.skip("is about the recorder native")
    cold: list[str] = []
    for name in ("before", "late"):
        original = getattr(NativeMode, name)

        def counted(self: NativeMode, func: Any, *arguments: Any, original: Any = original) -> Any:
            cold.append(str(func))
            return original(self, func, *arguments)

        monkeypatch.setattr(NativeMode, name, counted)
    x = torch.ones(5, 4, device="sim:0")
    weights = [torch.ones(4, 4, device="sim:0", requires_grad=True) for _ in range(3)]
    path = tmp_path / "a.opreplay"
    steps = []
    with replayfmt.capture(path):
        for _ in range(4):
            cold.clear()
            y = x
            for weight in weights:
                y = (y @ weight).tanh()
            y.sum().backward()
            steps.append(list(cold))
    assert steps[2] == steps[3] == []
    reader = open_capture(path)
    assert len({record.thread for record in reader.records() if record.kind is RecordKind.op}) == 2
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


class _Doubled(torch.autograd.Function):
    """Its backward pass runs in a thread of autograd's, and takes steps in Python there."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            pass
        return given[0] * 2


@pytest.mark.parametrize("warm", [False, True])
def test_a_thread_of_autograd_is_asked_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Asked at each of its steps in Python, its first backward pass under a capture would take minutes."""
    asked: list[int] = []
    take_part = threads._take_part

    def counted(capture: threads.Threads) -> bool:
        asked.append(threads.own_id())
        return take_part(capture)

    monkeypatch.setattr(threads, "_take_part", counted)
    x = torch.ones(4, 4, device="sim:0", requires_grad=True)
    if warm:  # then the thread is there before the capture
        _Doubled.apply(x).sum().backward()
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        for _ in range(3):
            _Doubled.apply(x).tanh().sum().backward()
            x.grad = None
        kept = torch.autograd.grad(_Doubled.apply(x).exp().sum(), x)
    assert asked and max(Counter(asked).values()) == 1, Counter(asked)
    reader = open_capture(path)
    assert not reader.summary.unsupported
    assert len({record.thread for record in reader.records() if record.kind is RecordKind.op}) == 2
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
    del kept
