"""Compiled regions that are interrupted, and captures that begin while one runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import replayfmt
from replayfmt.format.reader import open_capture
from replayfmt.recording import inductor

from .conftest import Capture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def meeting() -> Iterator[list[Callable[[], None]]]:
    """What an operator in the middle of the region calls."""
    called: list[Callable[[], None]] = []
    with torch.library._scoped_library("compiled_interruptions", "FRAGMENT") as library:
        library.define("meet(Tensor x) -> Tensor")

        def meet(x: Tensor) -> Tensor:
            for each in called:
                each()
            return x.clone()

        library.impl("meet", meet, "CPU")
        library.impl("meet", lambda x: torch.empty_like(x), "Meta")
        yield called


def region() -> Callable[[Tensor, Tensor], Any]:
    def work(x: Tensor, total: Tensor) -> Tensor:
        y = x.sin() @ x
        total.add_(y)
        return torch.ops.compiled_interruptions.meet(y).cos() * total

    return torch.compile(work)


def in_the_middle(path: Path, meeting: list[Callable[[], None]], **options: Any) -> None:
    """Begins a capture while another thread is in the middle of a region, and uses afterwards what that writes."""
    run, x, total = region(), torch.randn(8, 8), torch.zeros(8, 8)
    run(x, torch.zeros(8, 8))
    inside, begun = threading.Event(), threading.Event()
    meeting.append(lambda: (inside.set(), begun.wait(), None)[-1])
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(run(x, total)))
    thread.start()
    inside.wait()
    with replayfmt.capture(path, **options):
        begun.set()
        thread.join()
        meeting.clear()
        _kept = results[0] + total


def test_what_is_left_of_a_region_that_a_thread_runs_as_a_capture_begins_is_recorded(
    tmp_path: Path, meeting: list[Callable[[], None]]
) -> None:
    path = tmp_path / "c.opreplay"
    in_the_middle(path, meeting)
    with open_capture(path) as reader:
        assert reader.summary.unsupported == {}
        names = [kernel.name for kernel in reader.kernels if kernel is not None]
    assert [name for name in names if name.startswith("inductor_cpp::")], names
    with replayfmt.Plan(path, allow_code=True) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_where_regions_are_kept_one_that_a_thread_runs_as_a_capture_begins_is_reported(
    tmp_path: Path, meeting: list[Callable[[], None]]
) -> None:
    path = tmp_path / "c.opreplay"
    in_the_middle(path, meeting, compiled="keep")
    with open_capture(path) as reader:
        assert reader.summary.unsupported == {"compiled_region": 1}


class Stop(TimeoutError):
    """What a program raises when its time is up."""


@pytest.mark.parametrize("place", ["read_module", "find_kernel", "machine_of_code"])
def test_what_a_signal_handler_raises_while_a_region_is_read_is_the_programs_and_the_region_is_recorded(
    place: str, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, x = torch.compile(lambda x: x.sin() @ x + 1), torch.randn(8, 8)
    run(x)
    module = inductor if hasattr(inductor, place) else inductor
    original, struck = getattr(module, place), []

    def interrupted(*args: Any) -> Any:
        if not struck:
            struck.append(place)
            signal.raise_signal(signal.SIGUSR1)
        return original(*args)

    def stop(*_: Any) -> None:
        raise Stop

    def program() -> Tensor:
        with pytest.raises(Stop):
            run(x)
        return run(x)

    monkeypatch.setattr(module, place, interrupted)
    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        captured = capture(program)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert captured.unsupported() == []
    assert any(each.startswith("cpp_fused") for each in captured.kernels())
    captured.replays()
