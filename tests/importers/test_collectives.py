"""What is below a collective of a trace: its own preparations, or what the program did before it was over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Import
from .observed import MM, RELU, Traced, Written
from .test_execution_trace_graph import ALLREDUCE, graph
from .traces import ADD, kernel, launch, op, tensor
from .traces import MM as FACTORS

SEND = (
    "c10d::send(Tensor[] tensors, __torch__.torch.classes.c10d.ProcessGroup process_group, int dst, int tag) -> "
    "__torch__.torch.classes.c10d.Work"
)
RECEIVE = SEND.replace("send", "recv_").replace("dst", "src")
COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"


def test_operators_below_a_collective_that_was_still_going_on_are_calls_of_their_own(tmp_path: Path) -> None:
    written = Written()
    a, b, c, d = (Traced(number, number, [4, 4]) for number in (10, 11, 12, 13))
    send = written.node("c10d::send", SEND, [[a], "<Object>", 1, 0], ["<Object>"])
    receive = written.node("c10d::recv_", RECEIVE, [[b], "<Object>", 1, 0], ["<Object>"], parent=send)
    written.node("aten::mm", MM, [a, a], [c], parent=receive)
    written.node("aten::relu", RELU, [c], [d], parent=send)
    written.node("gloo:recv", inputs=[b], parent=receive)
    found = graph(tmp_path, written)
    assert found.names == ["collective: c10d::send", "collective: c10d::recv_", "aten::mm", "aten::relu"]
    assert found.report.counts["taken"] == 4


def test_what_a_collective_does_to_its_buffers_is_a_part_of_it_and_named(tmp_path: Path) -> None:
    written = Written()
    a, b = Traced(10, 10, [4]), Traced(11, 11, [4])
    outer = written.node("c10d::allreduce_", ALLREDUCE, [[a], "<Object>", "<Object>", None, False, -1], [])
    written.node("aten::copy_", COPY, [b, a, False], [b], parent=outer)
    inner = written.node("record_param_comms", inputs=[a], parent=outer)
    written.node("nccl:all_reduce", inputs=[a], parent=inner)
    found = graph(tmp_path, written)
    assert found.names == ["collective: c10d::allreduce_"]
    assert "inside collectives, as parts of them: 1 aten::copy_" in found.report.notes


def test_a_functional_collective_is_one_call_with_all_that_it_calls(tmp_path: Path) -> None:
    written = Written()
    a = Traced(10, 10, [4])
    name = "_c10d_functional::all_reduce"
    outer = written.node(name, f"{name}(Tensor input, str reduce_op, str group_name) -> Tensor", [a, "sum", "0"], [a])
    inner = written.node(
        f"{name}_",
        f"{name}_(Tensor input, str reduce_op, str group_name) -> Tensor",
        [a, "sum", "0"],
        [a],
        parent=outer,
    )
    written.node("c10d::allreduce_", ALLREDUCE, [[a], "<Object>", "<Object>", None, True, -1], [], parent=inner)
    assert graph(tmp_path, written).names == [f"collective: {name}"]


@pytest.mark.parametrize("level", ["launching", "leaf", "root"])
def test_a_profiler_traces_operators_inside_a_collective_that_goes_on_are_calls_too(
    level: str, imported: Import
) -> None:
    events: list[dict[str, Any]] = [
        op("c10d::send", 10, 200, [("TensorList", [[4]], [[1]], "")]),
        op("record_param_comms", 12, 10, [("TensorList", [[4]], [[1]], "")]),
        launch(1, 14),
        kernel(1, 300, 9, "ncclDevKernel_SendRecv"),
        op("c10d::recv_", 40, 150, [("TensorList", [[4]], [[1]], "")]),
        op("aten::mm", 50, 20, FACTORS),
        launch(2, 55),
        kernel(2, 400, 5),
        op("aten::add", 80, 20, ADD),
        launch(3, 85),
        kernel(3, 410, 7),
    ]
    result = imported(events, level=level)
    assert result.ops == ["aten::mm.default", "aten::add.Tensor"]
    found = [str(each.argument("op")) for each in result.of("unsupported")]
    assert found == (["c10d::send", "c10d::recv_"])
    assert [each.device_duration_ns for each in result.of("unsupported")] == [9000, None]
    assert [each.device_duration_ns for each in result.of("op")] == [5000, 7000]


def test_a_profiler_traces_collective_keeps_its_own_copies_and_names_them(imported: Import) -> None:
    pair = [tensor("float", 4), tensor("float", 4), ("Scalar", [], [], "False")]
    events = [
        op("c10d::_allgather_base_", 10, 100, [tensor("float", 8), tensor("float", 4)]),
        op("aten::copy_", 20, 10, pair),
        launch(1, 22),
        kernel(1, 300, 4, "Memcpy DtoD", category="gpu_memcpy"),
    ]
    result = imported(events)
    (record,) = result.of("unsupported")
    assert not result.ops and record.device_duration_ns == 4000
    assert "inside collectives, as parts of them: 1 aten::copy_" in result.report.notes
