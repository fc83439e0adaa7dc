"""Traces that were taken while a CUDA or HIP graph was captured: what ran there, though none of its kernels did."""

from __future__ import annotations

from typing import Any

from .conftest import Import, Imported
from .traces import ADD, H100, MM, annotation, kernel, launch, op, tensor

RELU = [tensor("float", 4, 3)]
EAGER = [op("aten::relu", 10, 20, RELU), launch(1, 12), kernel(1, 50, 5), op("aten::add", 40, 10, ADD)]


def begin(start: float, **more: Any) -> dict[str, Any]:
    return launch(900, start, name="hipStreamBeginCapture", **more)


def end(start: float, **more: Any) -> dict[str, Any]:
    return launch(901, start, name="hipStreamEndCapture", **more)


def node(number: int, start: float, kernel_name: str = "", *, name: str = "hipLaunchKernel",
         thread: int = 1) -> dict[str, Any]:
    """A launch that becomes a node; ROCm's exports say of which kernel."""
    event = launch(number, start, name=name, thread=thread)
    if kernel_name:
        event["args"] |= {"kernel": kernel_name, "grid": [4, 1, 1], "block": [64, 1, 1]}
    return event


CAPTURE = [begin(100), op("aten::linear", 110, 50, [*MM, tensor("float", 3)]), op("aten::mm", 115, 20, MM),
           launch(99, 116, name="hipStreamGetCaptureInfo"), node(20, 120, "gemm"), op("aten::add", 140, 15, ADD),
           node(21, 145, "add"), end(200)]


def devices(result: Imported) -> list[str]:
    return [str(result.reader.devices[record.argument("self").meta.device]) for record in result.of("op")]


def test_what_is_captured_is_taken_though_nothing_ran(imported: Import) -> None:
    result = imported([*EAGER, annotation("capture_32_FULL", 90, 200), *CAPTURE], deviceProperties=[H100])
    assert result.ops == ["aten::relu.default", "aten::mm.default", "aten::add.Tensor"]
    assert devices(result) == ["cuda:0", "cuda:0", "cuda:0"], "what launches is on the device, whether it runs or not"
    assert any("1 graphs were captured in it, with 2 launches" in note and "leaf" in note
               for note in result.report.notes)
    assert [record.device_duration_ns for record in result.of("op")] == [5_000, None, None]
    assert [result.scope(record) for record in result.of("op")] == ["", "capture_32_FULL", "capture_32_FULL"]


def test_a_level_that_was_asked_for_is_kept(imported: Import) -> None:
    assert imported([*EAGER, *CAPTURE], level="launching").ops == ["aten::relu.default"]


def test_a_trace_of_nothing_but_a_capture_is_of_a_device(imported: Import) -> None:
    result = imported(CAPTURE, deviceProperties=[{**H100, "id": 3}])
    assert devices(result) == ["cuda:3", "cuda:3"]
    assert devices(imported(CAPTURE)) == ["cuda:0", "cuda:0"]


def test_what_ran_on_the_host_during_a_capture_stays_there(imported: Import) -> None:
    events = [*EAGER, *CAPTURE, op("aten::abs", 180, 5, RELU), op("aten::abs", 300, 5, RELU)]
    result = imported(events, deviceProperties=[H100])
    record, = (each for each in result.of("op") if result.name(each) == "aten::abs.default")
    assert str(result.reader.devices[record.argument("self").meta.device]) == "cpu"
    assert record.start_ns == 170_000, "the second one is outside of the capture, and launched nothing"


def test_launches_into_a_graph_outside_of_operators_are_unsupported_records(imported: Import) -> None:
    events = [*EAGER, *CAPTURE, node(30, 180, "triton_poi_fused_0"), node(31, 190),
              node(32, 195, name="hipMemsetAsync")]
    result = imported(events)
    assert [(each.argument("reason"), each.argument("op")) for each in result.of("unsupported")] == [
        ("triton_launch", "triton_poi_fused_0"), ("outside_operator", "hipLaunchKernel"),
        ("outside_operator", "hipMemsetAsync")]


def test_captures_are_told_apart_by_thread_and_reach_to_the_edges_of_a_trace(imported: Import) -> None:
    other = op("aten::abs", 150, 20, RELU, thread=2)
    result = imported([*EAGER, *CAPTURE, other, node(40, 155, thread=2)])
    assert result.ops == ["aten::relu.default", "aten::mm.default", "aten::add.Tensor"]
    open_ended = [event for event in CAPTURE if event["name"] != "hipStreamEndCapture"]
    assert imported([*EAGER, *open_ended]).ops == result.ops
    begun_before = [event for event in CAPTURE if event["name"] != "hipStreamBeginCapture"]
    assert imported(begun_before).ops == ["aten::mm.default", "aten::add.Tensor"]
