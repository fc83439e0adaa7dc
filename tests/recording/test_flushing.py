"""What waits is written while the program runs: by the recorder's own thread, or, where the program gives that thread
no turn, by the threads that record."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import replayfmt
from replayfmt.errors import OpReplayError
from replayfmt.format.codes import RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording.capture_session import CaptureSession
from replayfmt.recording.program.threads import Threads
from replayfmt.recording.stream import buffer
from replayfmt.recording.stream.buffer import FlushTimes

_NEVER_NS = 10**15


def written_ops(path: Path) -> int:
    """How many ops the file would have after a crash."""
    try:
        with open_capture(f"{path}.partial") as reader:
            return sum(record.kind == RecordKind.op for record in reader.records())
    except OpReplayError:  # not even its head is there
        return 0


def adds(count: int) -> None:
    x = torch.ones(3)
    for _ in range(count):  # what is new takes the complete path, what follows the hot one
        x = x + 1


def awaited(path: Path, ops: int) -> bool:
    end = time.monotonic() + 120
    while written_ops(path) < ops and time.monotonic() < end:
        time.sleep(0.01)
    return written_ops(path) >= ops


@pytest.fixture
def _no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's thread waits until it is woken: here, until the capture is closed."""
    over = threading.Event()
    monkeypatch.setattr(FlushTimes, "wait", lambda self: over.wait())
    monkeypatch.setattr(FlushTimes, "wake", lambda self: over.set())
    monkeypatch.setattr(buffer, "_GAP", 0)


@pytest.mark.usefixtures("_no_turn")
@pytest.mark.parametrize("is_due", [True, False])
def test_a_thread_that_records_writes_what_is_overdue(
    is_due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    monkeypatch.setattr(Threads, "look", lambda self: looked.append(threading.get_ident()))
    monkeypatch.setattr(buffer, "_DUE_NS", 0 if is_due else _NEVER_NS)
    monkeypatch.setattr(buffer, "_SHARE", 0)
    path = tmp_path / "1.opreplay"
    with replayfmt.capture(path):
        for turn in range(1, 4):
            adds(100)
            written = written_ops(path)
            assert 101 * turn - 50 < written <= 101 * turn if is_due else not written
        assert set(looked) == ({threading.get_ident()} if is_due else set())
    assert open_capture(path).summary.records[RecordKind.op] == 303


def test_the_recorders_thread_writes_where_nothing_more_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "_DUE_NS", _NEVER_NS)
    monkeypatch.setattr(buffer, "PERIOD_NS", 1_000_000)
    monkeypatch.setattr(buffer, "_SHARE", 0)
    path = tmp_path / "1.opreplay"
    with replayfmt.capture(path):
        for turn in range(1, 4):
            adds(10)
            assert awaited(path, 11 * turn)


@pytest.mark.usefixtures("_no_turn")
def test_a_full_frame_is_written_before_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "_DUE_NS", _NEVER_NS)
    path = tmp_path / "1.opreplay"
    with replayfmt.capture(path, chunk_records=1024):
        adds(1000)
        assert not written_ops(path)
        adds(500)
        assert written_ops(path) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["native", "python"])
def test_a_clock_that_goes_back_or_stands_does_not_end_a_capture(
    recorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries for tests do it, the program replaces Python's clock."""
    real, path = time.perf_counter_ns, tmp_path / "1.opreplay"
    clocks = (lambda: real() - 10**15, lambda: real() + 10**15, lambda: -real(), lambda: 0)
    with replayfmt.capture(path, digests="ops", recorder=recorder):
        for number, clock in enumerate(clocks, start=1):
            monkeypatch.setattr(time, "perf_counter_ns", clock)
            with replayfmt.scope("under another clock"):
                torch.ones(number, number) @ torch.ones(number, number)
        assert awaited(path, 3 * (len(clocks) - 1)), "the recorder's thread goes on"
    monkeypatch.undo()
    assert open_capture(path).summary.records[RecordKind.op] == 3 * len(clocks)
    assert replayfmt.run(path, verify="bitwise").outcome == "ok"


def test_scopes_begin_and_end_while_a_frame_is_written(tmp_path: Path) -> None:
    path = tmp_path / "1.opreplay"
    with replayfmt.capture(path) as recorder:
        adds(100)
        rows = recorder._core.buffer
        rows.write_part()
        parts = 0
        while rows.writing:
            with replayfmt.scope(f"part {parts}"):
                adds(1)
            rows.write_part()
            parts += 1
        assert parts > 5
    reader = open_capture(path)
    assert {f"part {number}" for number in range(parts)} <= {scope.name for scope in reader.scopes if scope}
    assert reader.summary.records[RecordKind.op] == 101 + 2 * parts


def test_a_program_that_records_fast_waits_for_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "_GAP", 10**6)  # no part is due before another frame's rows are there
    whole: list[int] = []
    flush = CaptureSession.flush
    monkeypatch.setattr(CaptureSession, "flush", lambda self: (whole.append(threading.get_ident()), flush(self))[1])
    path = tmp_path / "1.opreplay"
    with replayfmt.capture(path, chunk_records=512):
        adds(5000)
        assert threading.get_ident() not in whole
    assert open_capture(path).summary.records[RecordKind.op] == 5001
