"""Times of kernels that work on streams of their own, on the simulated device. Run by test_accelerator.py in a process
of its own.

A copy to pinned memory on another stream happens when the host waits for that stream: to the clock of these tests it
takes a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device import devices_as_they_were, native_alone, recorder, register  # noqa: F401 - fixtures of every test

import replayfmt
from replayfmt.benchmark.candidates.task_calls import time_of
from replayfmt.benchmark.comparison import measure_both
from replayfmt.benchmark.measure import Options
from replayfmt.benchmark.statistics import MinTime
from replayfmt.pytorch import device_work

sim = register()
DEVICE = torch.device("sim:0")
SECOND = 1_000_000_000


class Late:
    """Doubles a tensor, and copies it on another stream; `elapsed` is a clock."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4).pin_memory()
        self.seen = self.memory.numpy()
        self._asked, self._copied = itertools.count(), 0

    def elapsed(self) -> int:
        if self.seen[0]:
            self.seen[0], self._copied = 0, self._copied + 1
        return next(self._asked) + SECOND * self._copied

    def elsewhere(self, given: torch.Tensor, other: Any = None) -> torch.Tensor:
        with torch.Stream(DEVICE) as side:
            side.wait_stream(torch.accelerator.current_stream(DEVICE))
            self.memory.copy_(given, non_blocking=True)
        return given + given

    def here(self, given: torch.Tensor, other: Any = None) -> torch.Tensor:
        return given + given


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    made = Late()
    monkeypatch.setattr(device_work, "time", SimpleNamespace(perf_counter_ns=made.elapsed))
    return made


@native_alone
@pytest.mark.parametrize(("name", "seconds"), [("here", 0), ("elsewhere", 1)])
def test_the_judge_waits_for_every_stream(late: Late, name: str, seconds: int) -> None:
    function: Callable[..., Any] = getattr(late, name)
    given: Any = SimpleNamespace(positional=(torch.ones(4, device=DEVICE),), named={})
    taken, returned = time_of(function, [given], DEVICE)
    assert returned.cpu().tolist() == [2.0] * 4 and taken // SECOND == seconds


@native_alone
@pytest.mark.parametrize(("name", "seconds"), [("here", 0), ("elsewhere", 1)])
def test_so_does_the_comparison_of_replays(late: Late, tmp_path: Path, name: str, seconds: int) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        kept = torch.ones(4).to(DEVICE) * 2
    del kept
    substitution = replayfmt.Substitution("aten::mul", getattr(late, name))
    with replayfmt.Plan(path, substitutions=[substitution]) as plan:
        whole = measure_both(plan, Options(min_time=MinTime(iterations=2), verify="none", warmup=0)).rows[0].comparison
    assert [each // SECOND for each in whole.substituted] == [seconds] * 2
    assert [each // SECOND for each in whole.original] == [0] * 2
