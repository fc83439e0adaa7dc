"""What CUDA tells of a graph that is being captured, through cuda-bindings that a test stands in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayfmt.pytorch.accelerators import GraphNode, UnknownFrontier, frontier
from replayfmt.recording.code.graph_capture import UnrecordedWork

runtime = pytest.importorskip("cuda.bindings.runtime", reason="needs cuda-bindings")
_OK = runtime.cudaError_t.cudaSuccess
_KIND = runtime.cudaGraphNodeType
_STATUS = runtime.cudaStreamCaptureStatus


class FakeCapture:
    """A capture on stream 7 of the first of two devices; the current stream of the other is its default one. `heads`
    are the nodes that the stream has come to, `nodes` the kinds and dependencies of all by handle."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.nodes: dict[int, tuple[Any, list[int]]] = {}
        self.status = _STATUS.cudaStreamCaptureStatusActive
        self.error = _OK

    def add(self, handle: int, kind: Any, after: list[int]) -> None:
        self.nodes[handle] = (kind, after)
        self.heads = [handle]

    def info(self, stream: int) -> tuple[Any, ...]:
        assert stream == 7, "a default stream cannot be captured"
        if self.error != _OK:
            return self.error, None, None, None, None, None, None
        return _OK, self.status, 1, 99, list(self.heads), [], len(self.heads)

    def kind(self, node: int) -> tuple[Any, Any]:
        return _OK, self.nodes[node][0]

    def dependencies(self, node: int, count: int = 0) -> tuple[Any, ...]:
        after = self.nodes[node][1]
        return _OK, after[:count], [], len(after)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    made = FakeCapture()
    monkeypatch.setattr(runtime, "cudaStreamGetCaptureInfo", made.info)
    monkeypatch.setattr(runtime, "cudaGraphNodeGetType", made.kind)
    monkeypatch.setattr(runtime, "cudaGraphNodeGetDependencies", made.dependencies)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0 if index else 7))
    return made


def test_the_frontier_has_the_nodes_and_their_kinds(capture: FakeCapture) -> None:
    assert frontier("cuda") == []
    capture.add(11, _KIND.cudaGraphNodeTypeKernel, [])
    capture.add(12, _KIND.cudaGraphNodeTypeHost, [11])
    assert frontier("cuda") == [GraphNode(12, "host")]
    capture.heads = [11, 12]
    assert sorted(frontier("cuda")) == [GraphNode(11, "kernel"), GraphNode(12, "host")]
    capture.status = _STATUS.cudaStreamCaptureStatusNone
    assert frontier("cuda") == []


def test_nodes_that_do_nothing_hide_none(capture: FakeCapture) -> None:
    capture.add(11, _KIND.cudaGraphNodeTypeMemcpy, [])
    capture.add(12, _KIND.cudaGraphNodeTypeEmpty, [11])
    capture.add(13, _KIND.cudaGraphNodeTypeEmpty, [12])
    assert frontier("cuda") == [GraphNode(11, "memcpy")]


def test_a_host_callback_and_a_kernel_between_ops_are_found(capture: FakeCapture) -> None:
    work = UnrecordedWork("cuda")
    work.account()
    assert not work.found()
    capture.add(11, _KIND.cudaGraphNodeTypeKernel, [])
    work.account()
    assert not work.found() and not work.unknown
    capture.add(12, _KIND.cudaGraphNodeTypeEmpty, [11])
    assert not work.found(), "it does nothing"
    capture.add(13, _KIND.cudaGraphNodeTypeHost, [12])
    assert work.found() == "host"
    capture.add(14, _KIND.cudaGraphNodeTypeKernel, [])
    capture.heads = [13, 14]
    assert work.found() == "host, kernel"


def test_a_capture_that_is_not_seen_is_not_taken_for_one_without_other_work(capture: FakeCapture) -> None:
    capture.status = _STATUS.cudaStreamCaptureStatusInvalidated
    work = UnrecordedWork("cuda")
    work.account()
    work.account()
    assert not work.unknown, "a view has no work"
    work.account("aten::add")
    assert not work.found()
    assert work.unknown == "the device told of no work of aten::add, which has some"
    capture.status = _STATUS.cudaStreamCaptureStatusActive
    work = UnrecordedWork("cuda")
    capture.add(11, _KIND.cudaGraphNodeTypeKernel, [])
    work.account("aten::add")
    assert not work.unknown
    work.account("aten::mul")
    assert "of aten::mul" in work.unknown, "it saw work, and none of this op"
    capture.add(12, _KIND.cudaGraphNodeTypeHost, [11])
    assert work.found() == "host", "it goes on looking"


def test_what_cannot_be_told_is_said_and_not_taken_for_nothing(
    capture: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.error = runtime.cudaError_t.cudaErrorLossyQuery
    work = UnrecordedWork("cuda")
    work.account()
    assert work.unknown == "cudaStreamGetCaptureInfo failed: cudaErrorLossyQuery"
    capture.error = _OK
    monkeypatch.setattr(runtime, "cudaStreamGetCaptureInfo", lambda _stream: (_OK, capture.status, 1))
    with pytest.raises(UnknownFrontier, match="older than version 13"):
        frontier("cuda")

    def gone(_stream: int) -> None:
        raise RuntimeError('Function "cudaStreamGetCaptureInfo_v3" not found')

    monkeypatch.setattr(runtime, "cudaStreamGetCaptureInfo", gone)
    with pytest.raises(UnknownFrontier, match="_v3.* not found"):
        frontier("cuda")
    monkeypatch.delattr(runtime, "cudaStreamGetCaptureInfo")
    with pytest.raises(UnknownFrontier, match="no cudaStreamGetCaptureInfo that can be used"):
        frontier("cuda")
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(UnknownFrontier, match="cannot be imported"):
        frontier("cuda")


def test_a_device_whose_module_does_not_tell_is_unknown() -> None:
    with pytest.raises(UnknownFrontier, match="module for cpu has no capture_frontier"):
        frontier("cpu")
