"""A row that is made without the lock while others need it: they wait for it, however long its thread is suspended.

The thread is held where it has taken the ids and has not appended the row. It is let go once somebody was seen waiting,
or was done without having waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording.recorder import Recorder
from replayfmt.recording.stream import in_flight
from replayfmt.replay.plan import Plan

pytestmark = pytest.mark.recorder("python")  # of its fast path


def kernels(path: Path) -> list[str]:
    with open_capture(path) as reader:
        return [reader.kernels[r.signature.kernel].name for r in reader.records() if r.kind is RecordKind.op]


def record_with(path: Path, meanwhile: Callable[[Recorder], Any], monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records ops of this thread. While the last of them is held, another thread runs `meanwhile`."""
    held, go_on = threading.Event(), threading.Event()
    seen: list[set[int]] = []

    def look(seconds: float) -> None:
        go_on.set()
        time.sleep(0)

    monkeypatch.setattr(in_flight, "_wait", look)
    recorder = Recorder(path)
    recorder.start()
    assert recorder._core is not None
    names = recorder._core.sites._factory._globals
    track = names["Tracker"]

    def hold(*args: Any) -> Any:
        held.set()
        assert go_on.wait(600)
        seen.append(in_flight.making_rows())
        return track(*args)

    def work() -> None:
        assert held.wait(600)
        try:
            meanwhile(recorder)
        finally:
            go_on.set()

    with recorder.paused():
        thread = threading.Thread(target=work)
        thread.start()
    x = torch.ones(3)
    for _ in range(6):
        kept = x.exp()
    names["Tracker"] = hold
    kept = x.exp()
    names["Tracker"] = track
    thread.join()
    assert kept is not None and seen == [{threading.get_ident()}]
    return recorder


def test_a_second_thread_records_after_the_row_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    path = tmp_path / "x.opreplay"

    def meanwhile(recorder: Recorder) -> None:
        kept.append(torch.zeros(4).cos())

    record_with(path, meanwhile, monkeypatch).close()
    assert kernels(path) == ["aten::ones", *["aten::exp"] * 7, "aten::zeros", "aten::cos"]
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_the_end_of_a_capture_waits_for_the_row_of_an_op_that_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.opreplay"
    recorder = record_with(path, lambda recorder: recorder._core.finish(), monkeypatch)  # type: ignore[union-attr]
    recorder.close()
    assert kernels(path) == ["aten::ones", *["aten::exp"] * 7]
    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"


def test_nobody_is_waited_for_where_no_row_is_made() -> None:
    assert in_flight.making_rows() == set()
    in_flight.wait_for_rows()
