"""Calls that a trace records wrongly or in part: they are never exact, and nothing is dropped for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from replayfmt.errors import UsageError
from replayfmt.format.memory import memory_by_device
from replayfmt.format.reader import open_capture
from replayfmt.importers.importing import import_trace
from replayfmt.pytorch.traced_names import parsed

from .conftest import Import
from .observed import MM, RELU, Traced, Written
from .test_execution_trace_graph import graph
from .traces import ADD, NONE, kernel, launch, op, scalar, tensor, trace
from .traces import MM as FACTORS


def test_a_call_that_its_operator_refuses_without_data_is_incomplete_and_says_why(imported: Import) -> None:
    result = imported([op("aten::mm", 10, 20, [tensor("float", 4, 8), tensor("float", 9, 16)])])
    (record,) = result.of("unsupported")
    assert "does not take these arguments" in str(record.argument("detail"))
    assert "reduction dim" in str(record.argument("detail"))


def test_a_call_whose_results_depend_on_content_is_still_exact(imported: Import) -> None:
    result = imported([op("aten::nonzero", 10, 20, [tensor("float", 4, 8)])])
    assert result.of("op")[0].annotation["import"] == "exact"
    assert "not known" in result.of("op")[0].annotation["results"]


def test_a_call_that_its_operator_refuses_only_for_want_of_a_device_is_exact(imported: Import) -> None:
    numbers = [("ScalarList", [], [], text) for text in ("[0, 0]", "[1, 1]", "[1, 1]")]
    data, weight = tensor("float", 2, 3, 8, 8), tensor("float", 4, 3, 3, 3)
    result = imported([op("aten::mkldnn_convolution", 10, 20, [data, weight, NONE, *numbers, scalar("1")])])
    assert result.ops == ["aten::mkldnn_convolution.default"]


def test_an_execution_traces_call_that_its_operator_refuses_is_incomplete_too(tmp_path: Path) -> None:
    written = Written()
    written.node("aten::mm", MM, [Traced(1, 1, [4, 8]), Traced(2, 2, [9, 16])], [Traced(3, 3, [4, 16])])
    assert graph(tmp_path, written).names == ["import_incomplete: aten::mm"]


@pytest.mark.parametrize("concrete", [True, False])
def test_a_number_that_was_given_is_never_taken_for_none(concrete: bool, imported: Import) -> None:
    event = op("aten::clamp", 10, 20, [tensor("float", 4), scalar(""), NONE])
    if not concrete:
        del event["args"]["Concrete Inputs"]
    (record,) = imported([event]).of("unsupported")
    assert "--number-default=aten::clamp.min=VALUE" in str(record.argument("detail"))


def test_clamp_without_any_bound_cannot_run_and_is_incomplete(imported: Import) -> None:
    (record,) = imported([op("aten::clamp", 10, 20, [tensor("float", 4), NONE, NONE])]).of("unsupported")
    assert "does not take these arguments" in str(record.argument("detail"))


def test_numbers_that_a_trace_lacks_are_those_that_the_user_says(tmp_path: Path) -> None:
    view = op("aten::view", 40, 10, [tensor("float", 4, 3), ("ScalarList", [], [], "")])
    clamp = op("aten::clamp", 10, 20, [tensor("float", 4), scalar(""), NONE])
    path = trace(tmp_path / "trace.json", [clamp, view])
    names = parsed((), (), ["aten::clamp.min=0.25", "*.size=[12]", "aten::add.alpha=2"])
    report = import_trace(path, tmp_path / "out.opreplay", names=names)
    with open_capture(tmp_path / "out.opreplay") as reader:
        (first, second) = [each for each in reader.records() if each.kind.name == "op"]
    assert first.argument("min") == 0.25 and second.argument("size") == [12]
    told = "\n".join(report.warnings())
    assert "min=0.25: the trace does not record the values of numbers; as you said" in told
    assert "--number-default aten::add.alpha=2: no call lacks that number" in told


@pytest.mark.parametrize("text", ["aten::clamp.min", "aten::clamp.min=big", "clamp.min=1", "aten::view.size=[1,x]"])
def test_a_number_default_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected OPERATOR.ARGUMENT=NUMBER"):
        parsed((), (), [text])


def test_the_tool_takes_number_defaults(tools: Tools, tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.json", [op("aten::clamp", 10, 20, [tensor("float", 4), scalar(""), NONE])])
    code, _out, err = tools("import", path, "-o", tmp_path / "out.opreplay", "--number-default=aten::clamp.min=1")
    assert code == 0 and "min=1" in err


def test_impossible_strides_are_said_to_be_replaced(tmp_path: Path) -> None:
    written = Written()
    a, b = Traced(1, 1, [4, 8], strides=[8, -1]), Traced(2, 2, [8, 16])
    written.node("aten::mm", MM, [a, b], [Traced(3, 3, [4, 16])])
    (entry,) = graph(tmp_path, written).report.entries.values()
    assert entry.status == "inferred"
    assert entry.assumed == ("strides of self: the execution trace has impossible ones; contiguous",)


@pytest.mark.parametrize("wrong", [{"dur": float("nan")}, {"dur": "soon"}, {"ts": float("nan")}, {"ts": None}])
def test_a_kernel_without_a_time_keeps_its_operator(wrong: dict[str, Any], imported: Import) -> None:
    work = kernel(1, 30, 6) | wrong
    result = imported([op("aten::add", 10, 20, ADD), launch(1, 12), work])
    (record,) = result.of("op")
    (row,) = record.annotation["device_kernels"]
    assert row["name"] == "gemm" and (row["start_ns"] is None or row["duration_ns"] is None)
    assert any("not known" in problem for problem in result.report.problems)


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("sage_fwd_1", "did not generate"),
        ("triton_softmax", "did not generate"),
        ("triton_poi_fused_add_0", "a kernel that torch.compile generated"),
        ("triton_tem_fused_mm_3", "a kernel that torch.compile generated"),
    ],
)
def test_whose_triton_kernel_it_is_is_said(name: str, whose: str, imported: Import) -> None:
    events = [
        op(name, 10, 20, [tensor("c10::BFloat16", 8, 8)], kernel_backend="triton", kernel_hash="abc"),
        launch(1, 12),
        kernel(1, 30, 6, name),
    ]
    (record,) = imported(events).of("unsupported")
    assert record.argument("reason") == "triton_launch" and whose in str(record.argument("detail"))


def test_a_chain_of_an_execution_trace_needs_the_memory_of_two_links(tmp_path: Path) -> None:
    written = Written()
    links = [Traced(number, number, [1024]) for number in range(10, 31)]
    for one, other in zip(links, links[1:], strict=False):
        written.node("aten::relu", RELU, [one], [other])
    import_trace(written.save(tmp_path / "trace.json"), tmp_path / "out.opreplay")
    with open_capture(tmp_path / "out.opreplay") as reader:
        (memory,) = memory_by_device(reader)
    assert memory.peak_bytes == 2 * 4096


def test_memory_that_is_used_again_later_is_kept_until_then(tools: Tools, tmp_path: Path) -> None:
    written = Written()
    first, second, third, fourth = (Traced(number, number, [64]) for number in range(4))
    for given, made in ((first, second), (second, third), (first, fourth)):
        written.node("aten::relu", RELU, [given], [made])
    import_trace(written.save(tmp_path / "trace.json"), tmp_path / "out.opreplay")
    with open_capture(tmp_path / "out.opreplay") as reader:
        kinds = [each.kind.name for each in reader.records()]
    assert kinds.count("storage_import") == 1 and kinds.count("storage_release") == 4
    assert tools("run", tmp_path / "out.opreplay")[0] == 0


def test_factors_that_fit_are_exact(imported: Import) -> None:
    assert imported([op("aten::mm", 10, 20, FACTORS)]).report.calls()["exact"] == 1


def test_threads_that_a_trace_numbers_as_the_system_does_are_told_apart(tmp_path: Path) -> None:
    written = Written()
    for thread in (140_245_123, 1, 140_245_999, 140_245_123):
        written.node("aten::relu", RELU, [Traced(1, 1, [4])], [Traced(3, 3, [4])], thread=thread)
    written.save(tmp_path / "et.json")
    import_trace(tmp_path / "et.json", tmp_path / "out.opreplay")
    with open_capture(tmp_path / "out.opreplay") as reader:
        threads = [record.thread for record in reader.records() if record.kind.name == "op"]
    assert threads == [32768, 1, 32769, 32768]
