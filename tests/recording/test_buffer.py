"""The buffer between ops and the writer: frames, order of storages, definitions that are forgotten, bounded memory."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.format.record_frames import spans
from replayfmt.recording.capture_session import CaptureSession
from replayfmt.recording.options import CaptureOptions
from replayfmt.recording.recorder import Recorder

from .conftest import Capture

pytestmark = pytest.mark.recorder("python")  # of no recorder at all


def work(steps: int) -> torch.Tensor:
    x = torch.ones(4, 4)
    for step in range(steps):
        y = (x * 1 + x.t()).view(16)
        x = (y * 0.5).view(4, 4)
        if step % 10 == 0:
            torch.rand(2)
    return x


@pytest.mark.slow
def test_frames_of_any_size_hold_the_same_records(capture: Capture) -> None:
    outlines = []
    for chunk in (1, 7, 16384):
        captured = capture(lambda: work(30), chunk_records=chunk)
        outlines.append(captured.ops())
        captured.replays()
    assert outlines[0] == outlines[1] == outlines[2]


def test_storage_ids_have_no_gaps_and_tensors_keep_their_ids(capture: Capture) -> None:
    reader = capture(lambda: work(50), chunk_records=16).reader
    seen: dict[tuple, int] = {}
    for record in reader.records():
        for value in (*record.args, *record.results):
            if hasattr(value, "meta"):
                place = (value.storage, value.offset, value.meta)
                assert seen.setdefault(place, value.id) == value.id
    assert len(set(seen.values())) == len(seen)
    ids = sorted({place[0] for place in seen})
    assert ids == list(range(1, reader.summary.storages + 1))


def test_spans_are_runs_of_consecutive_numbers() -> None:
    assert spans(np.array([5, 0, 9]), np.array([3, 0, 2])).tolist() == [5, 6, 7, 9, 10]
    assert spans(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_definitions_of_dead_storages_are_forgotten(tmp_path: Path) -> None:
    with replayfmt.capture(tmp_path / "x.opreplay", chunk_records=64) as recorder:
        work(300)
        recorder._core.flush()  # what is left of a frame
        recorder._core.flush()
        assert len(recorder._core.buffer._live_definitions) < 50
        assert len(recorder._core.storages.live) < 20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_ops(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x.opreplay", CaptureOptions(payload="none"))
    recorder.start()
    tracemalloc.start(1)
    try:
        x = torch.ones(4)
        sizes = []
        with torch.no_grad():
            for _ in range(4):
                for _ in range(1500):
                    y = x + 1
                    y.view(2, 2)
                    y.mul_(2)
                recorder._core.flush()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        recorder.close()
    assert open_capture(tmp_path / "x.opreplay").summary.records[RecordKind.op] >= 18_000
    assert sizes[-1] - sizes[1] < 9000 * 16, sizes  # two rounds of 4500 ops, whose rows are longer than that


@pytest.mark.slow
def test_another_thread_may_flush_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "x.opreplay"
    with replayfmt.capture(path, chunk_records=32) as recorder:
        core: CaptureSession = recorder._core
        done = threading.Event()

        def flush() -> None:
            while not done.is_set():
                core.flush()

        with recorder.paused():
            thread = threading.Thread(target=flush)
            thread.start()
        try:
            kept = work(600)
        finally:
            done.set()
            thread.join()
    assert kept is not None
    from replayfmt.replay.plan import Plan

    with Plan(path) as plan:
        assert plan.execute(verify="bitwise").outcome == "ok"
