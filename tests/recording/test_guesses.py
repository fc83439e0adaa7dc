"""Which calls of a program that repeats itself are recognized: what is not takes the complete path, at many times the
cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.recording.dispatch.mode import RecordingMode

from .conftest import Capture

pytestmark = pytest.mark.recorder("python")  # of its fast path


def unrecognized(path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> Counter[str]:
    """The operators whose calls took the complete path in a run of which there were several before."""
    seen: Counter[str] = Counter()
    complete = RecordingMode.dispatch

    def counted(self: RecordingMode, func: Any, *arguments: Any) -> Any:
        seen[str(func)] += 1
        return complete(self, func, *arguments)

    monkeypatch.setattr(RecordingMode, "dispatch", counted)
    with replayfmt.capture(path, payload="none"):
        for _ in range(4):
            run()
        seen.clear()
        run()
    return seen


def test_what_follows_a_call_without_a_site_is_told_apart_by_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, flag = [torch.ones(size) for size in range(1, 31)], torch.ones(())

    def run() -> None:
        for tensor in tensors:
            tensor.add_(1.0)
            flag.item()
            tensor.mul_(0.5)

    assert unrecognized(tmp_path / "a.opreplay", monkeypatch, run) == {"aten._local_scalar_dense.default": 30}


def test_a_call_after_one_that_is_the_same_for_many_is_found_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, steps = [torch.ones(size) for size in range(1, 16)], [torch.ones(()) for _ in range(15)]

    def run() -> None:
        for tensor, step in zip(tensors, steps, strict=True):
            step.add_(1.0)
            tensor.mul_(0.5)

    assert unrecognized(tmp_path / "a.opreplay", monkeypatch, run) == {}


def test_equal_numbers_of_other_types_in_a_list_are_not_taken_for_each_other(capture: Capture) -> None:
    integers = [torch.arange(3, dtype=torch.int32)]

    def run() -> list[torch.Tensor]:
        return [torch._foreach_mul(integers, [number])[0] for number in (1, 1, 1, 1.0, 1, 1.0, True, 0, 0, 0, -0.0)]

    captured = capture(run)
    assert [result.dtype for result in captured.returned].count(torch.float32) == 3
    captured.replays()
