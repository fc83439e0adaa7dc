"""The program under capture behaves as without it: memory, references, exceptions, what is left behind."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.errors import CaptureFailed, OutputExists, UsageError
from replayfmt.format.codes import OpStatus, RecordKind
from replayfmt.format.reader import open_capture
from replayfmt.recording.options import CaptureOptions
from replayfmt.recording.recorder import Recorder
from replayfmt.recording.storages.trackers import ATTRIBUTE

from .conftest import Capture


def test_memory_is_freed_when_it_would_be_without_a_capture(tmp_path) -> None:
    with replayfmt.capture(tmp_path / "x.opreplay"):
        for _ in range(4):  # the complete path, then the fast one
            x = torch.ones(3)
            y = x + 1
            z = y.view(3, 1)
            storages = [weakref.ref(t.untyped_storage()) for t in (x, y)]
            del y
            assert storages[1]() is not None, "the view keeps it"
            del x, z
            assert [s() for s in storages] == [None, None]


def test_nothing_refers_to_the_programs_tensors(tmp_path) -> None:
    with replayfmt.capture(tmp_path / "x.opreplay"):
        for _ in range(4):
            x = torch.ones(3)
            before = sys.getrefcount(x)
            parts = [*(x + 1).split(1), *torch._foreach_add([x, x], 1)]
            x.add_(1)
            torch.rand(2)
            assert sys.getrefcount(x) == before
            assert all(sys.getrefcount(part) <= 4 for part in parts)


@pytest.mark.slow
def test_memory_that_only_autograd_holds_stays_known(capture: Capture) -> None:
    def program() -> Any:
        w = torch.ones(3, requires_grad=True)
        result = torch.exp(w).sum()  # exp's result lives on in the graph
        gc.collect()
        result.backward()
        return w.grad

    captured = capture(program, digests="ops")
    assert len(captured.records(RecordKind.storage_import)) == 0, "everything was made by captured ops"
    captured.replays()


def test_deaths_are_recorded(capture: Capture) -> None:
    def program() -> torch.Tensor:
        kept = torch.ones(3)
        for _ in range(5):
            kept = kept + 1
        return kept

    captured = capture(program)
    released = [r.argument("storage").id for r in captured.records(RecordKind.storage_release)]
    assert sorted(released) == [1, 2, 3, 4, 5]


def test_nothing_is_left_on_the_programs_objects(tmp_path) -> None:
    layer = torch.nn.Linear(3, 3)
    run = threading.Thread.run
    with replayfmt.capture(tmp_path / "x.opreplay"):
        result = layer(torch.ones(1, 3))
    for tensor in (layer.weight, layer.bias, result):
        assert not hasattr(tensor.untyped_storage(), ATTRIBUTE)
        assert tensor.untyped_storage().resizable()
    assert threading.Thread.run is run
    assert torch._C._len_torch_dispatch_stack() == 0


def test_captures_follow_each_other(tmp_path) -> None:
    x = torch.ones(3)
    for number in range(3):
        with replayfmt.capture(tmp_path / f"{number}.opreplay"):
            x = x + 1
        reader = open_capture(tmp_path / f"{number}.opreplay")
        assert reader.summary.records[RecordKind.storage_import] == 1


def test_exceptions_of_ops_pass_through_and_are_recorded(capture: Capture) -> None:
    def program() -> Any:
        x = torch.ones(2, 3)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                x @ x
        return x + 1

    captured = capture(program)
    statuses = [r.signature.status for r in captured.records(RecordKind.op)]
    assert statuses.count(OpStatus.raised) == 4
    captured.replays()


def test_an_exception_of_the_program_passes_and_the_file_is_complete(tmp_path) -> None:
    path = tmp_path / "x.opreplay"
    with pytest.raises(ZeroDivisionError), replayfmt.capture(path), replayfmt.scope("outer"), replayfmt.scope("inner"):
        torch.ones(3)
        raise ZeroDivisionError
    reader = open_capture(path)
    assert reader.complete
    names = [
        (r.kind.name, r.argument("name"))
        for r in reader.records()
        if r.kind in (RecordKind.scope_begin, RecordKind.scope_end)
    ]
    assert names == [("scope_begin", "outer"), ("scope_begin", "inner"), ("scope_end", "inner"), ("scope_end", "outer")]


def test_close_is_idempotent_and_ends_open_scopes(tmp_path) -> None:
    recorder = Recorder(tmp_path / "x.opreplay")
    recorder.start()
    recorder.scope_begin("a")
    recorder.scope_begin("b")
    torch.ones(3)
    recorder.close()
    recorder.close()
    reader = open_capture(tmp_path / "x.opreplay")
    assert [r.argument("name") for r in reader.records() if r.kind is RecordKind.scope_end] == ["b", "a"]
    torch.ones(3)
    with pytest.raises(CaptureFailed, match="started before"):
        recorder.start()


def test_two_captures_at_once_are_refused(tmp_path) -> None:
    with replayfmt.capture(tmp_path / "a.opreplay"):
        with pytest.raises(CaptureFailed, match="in progress"):
            Recorder(tmp_path / "b.opreplay").start()
        torch.ones(2)
    assert open_capture(tmp_path / "a.opreplay").summary.records[RecordKind.op] == 1


def test_an_existing_file_is_kept_unless_forced(tmp_path) -> None:
    path = tmp_path / "x.opreplay"
    path.write_text("mine")
    with pytest.raises(OutputExists), replayfmt.capture(path):
        pass
    assert path.read_text() == "mine"
    assert torch._C._len_torch_dispatch_stack() == 0
    with replayfmt.capture(path, force=True):
        torch.ones(1)
    assert open_capture(path).complete


def test_scope_does_nothing_where_nothing_records() -> None:
    with replayfmt.scope("anything"):
        torch.ones(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": "some"},
        {"digests": "all"},
        {"compiled": "maybe"},
        {"payload": "none", "digests": "ops"},
        {"start_op": -1},
        {"start_op": 5, "stop_op": 5},
        {"chunk_records": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CaptureOptions(**wrong)


def test_a_capture_without_content_has_no_content(capture: Capture) -> None:
    x = torch.randn(1000)
    captured = capture(lambda: (x + 1).tolist(), payload="none")
    reader = captured.reader
    assert reader.session.policies["digests"] == "none"
    assert reader.summary.absent_storages == 1
    assert list(reader.payloads) == []
    assert captured.records(RecordKind.digest) == []
    (read,) = captured.records(RecordKind.host_read)
    assert [node.name for node in read.signature.args] == ["method", "tensor"]
