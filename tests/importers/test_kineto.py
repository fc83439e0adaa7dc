"""Hand-made profiler traces: which operators stand for the work, what they launched, and where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import InvalidCapture
from replayfmt.format.codes import StorageOrigin
from replayfmt.format.model import TensorValue

from .conftest import Import
from .traces import ADD, H100, MM, NONE, annotation, kernel, launch, numbers, op, scalar, tensor, trace

# aten::linear → aten::t → aten::transpose, and aten::addmm, which launches the kernel.
LINEAR = [
    op("aten::linear", 10, 100, [tensor("float", 4, 8), tensor("float", 3, 8), tensor("float", 3)], external=1),
    op("aten::t", 12, 20, [tensor("float", 3, 8)], external=2),
    op("aten::transpose", 14, 10, [tensor("float", 3, 8), scalar("0"), scalar("1")], external=3),
    op(
        "aten::addmm",
        40,
        60,
        [tensor("float", 3), tensor("float", 4, 8), tensor("float", 8, 3, strides=[1, 8]), scalar("1"), scalar("1")],
        external=4,
    ),
]
LAUNCHED = [*LINEAR, launch(77, 50), kernel(77, 200, 30, external_id=4)]


def test_with_device_work_the_operators_that_launched_it_stand_for_it(imported: Import) -> None:
    result = imported(LAUNCHED, deviceProperties=[H100])
    assert result.ops == ["aten::addmm.default"]
    record = result.of("op")[0]
    assert record.device_duration_ns == 30_000 and record.duration_ns == 60_000
    assert record.annotation == {
        "import": "exact",
        "stream": 7,
        "device_kernels": [
            {
                "name": "gemm",
                "grid": [4, 1, 1],
                "block": [128, 1, 1],
                "stream": 7,
                "device": "cuda:0",
                "start_ns": 190_000,
                "duration_ns": 30_000,
            }
        ],
    }
    mat2 = record.argument("mat2")
    assert isinstance(mat2, TensorValue) and mat2.meta.strides == (1, 8)
    assert str(result.reader.devices[mat2.meta.device]) == "cuda:0"


def test_levels_choose_among_callers_and_called(imported: Import) -> None:
    assert imported(LAUNCHED, level="root").ops == ["aten::linear.default"]
    assert imported(LAUNCHED, level="leaf").ops == ["aten::t.default", "aten::addmm.default"]
    assert imported(LINEAR).ops == ["aten::t.default", "aten::addmm.default"]
    root = imported(LAUNCHED, level="root").of("op")[0]
    assert root.device_duration_ns == 30_000, "it has the work of what it called"


def test_a_composite_that_works_itself_stands_for_its_own_work(imported: Import) -> None:
    # addmm has a kernel of its own: what it called on the way is part of it.
    events = [
        op(
            "aten::addmm",
            10,
            100,
            [tensor("float", 4, 3), tensor("float", 4, 8), tensor("float", 8, 3), scalar("1"), scalar("1")],
        ),
        op("aten::copy_", 20, 10, [tensor("float", 4, 3), tensor("float", 4, 3), scalar("False")]),
    ]
    assert imported(events).ops == ["aten::addmm.default"]
    # clone only calls others here, contiguous only clone.
    events = [
        op("aten::contiguous", 10, 100, [tensor("float", 4, 3), scalar("0")]),
        op("aten::clone", 12, 90, [tensor("float", 4, 3), scalar("0")]),
        op("aten::copy_", 20, 10, [tensor("float", 4, 3), tensor("float", 4, 3), scalar("False")]),
    ]
    assert imported(events).ops == ["aten::copy_.default"]


def test_an_operator_that_launched_work_is_not_taken_apart_by_those_inside_it(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 100, MM),
        op("aten::fill_", 20, 10, [tensor("float", 4, 3), scalar("0")]),
        launch(1, 25),
        launch(2, 50),
        kernel(1, 200, 5, "fill"),
        kernel(2, 210, 7, "gemm"),
    ]
    result = imported(events)
    assert result.ops == ["aten::mm.default"]
    assert result.of("op")[0].device_duration_ns == 12_000
    assert [each["name"] for each in result.of("op")[0].annotation["device_kernels"]] == ["fill", "gemm"]


def test_work_is_attributed_by_external_id_where_launches_are_missing(imported: Import) -> None:
    result = imported([*LINEAR, kernel(77, 200, 30, **{"External id": 4})])
    assert result.ops == ["aten::addmm.default"] and result.of("op")[0].device_duration_ns == 30_000


def test_rocm_names_are_known(imported: Import) -> None:
    events = [
        *LINEAR,
        launch(5, 50, name="hipExtModuleLaunchKernel"),
        kernel(5, 200, 30, device=2),
        {"ph": "i", "name": "[memory]", "pid": 10, "tid": 1, "ts": 1, "args": {"Device Type": 6, "Device Id": 0}},
    ]
    for event in events:
        if event.get("cat") == "cuda_runtime":
            event["cat"] = "hip_runtime"
    result = imported(events, hip_runtime_version=60443483, deviceProperties=[{**H100, "name": "AMD Instinct MI300X"}])
    assert result.ops == ["aten::addmm.default"]
    device = next(each for each in result.reader.devices if each is not None)
    assert (str(device), device.name) == ("cuda:0", "AMD Instinct MI300X")
    assert result.reader.session.libraries["hip_runtime_version"] == 60443483


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"),
        ("CopyHostToDevice", "CopyDeviceToHost"),
        ("zeCommandListAppendMemoryCopy(M2D)", "Memcpy D2M"),
    ],
)
def test_copies_between_host_and_device_have_their_tensors_there(up: str, down: str, imported: Import) -> None:
    copy = [tensor("float", 4), tensor("float", 4), scalar("False")]
    events = [
        op("aten::copy_", 10, 10, copy),
        launch(1, 12),
        kernel(1, 100, 5, up, category="gpu_memcpy"),
        op("aten::copy_", 30, 10, copy),
        launch(2, 32),
        kernel(2, 120, 5, down, category="gpu_memcpy"),
    ]
    result = imported(events)
    devices = [
        [str(result.reader.devices[record.argument(name).meta.device]) for name in ("self", "src")]
        for record in result.of("op")
    ]
    assert devices == [["cuda:0", "cpu"], ["cpu", "cuda:0"]]


def test_numbers_that_python_passed_as_tensors_are_in_host_memory(imported: Import) -> None:
    events = [
        op("aten::mul", 10, 10, [tensor("c10::BFloat16", 4), ("double", [], [], "")]),
        launch(1, 12),
        kernel(1, 100, 5),
    ]
    record = imported(events).of("op")[0]
    assert record.annotation["import"] == "inferred" and "Python numbers" in record.annotation["assumed"][0]
    assert record.argument("other").meta.device != record.argument("self").meta.device


def test_annotations_are_scopes_on_every_thread(imported: Import) -> None:
    events = [
        annotation("ProfilerStep#6", 0, 1000),
        op("aten::mm", 10, 10, MM, external=1),
        launch(1, 12),
        annotation("backward", 300, 200),
        op("aten::mm", 310, 10, MM, thread=2, external=2),
        launch(2, 315, thread=2),
        annotation("inner", 330, 50, thread=2),
        op("aten::mm", 340, 10, MM, thread=2, external=3),
        launch(3, 345, thread=2),
        kernel(1, 400, 5),
        kernel(2, 410, 5),
        kernel(3, 420, 5, stream=20),
    ]
    result = imported(events)
    ops = result.of("op")
    assert [result.scope(each) for each in ops] == [
        "ProfilerStep#6",
        "ProfilerStep#6/backward",
        "ProfilerStep#6/backward/inner",
    ]
    assert [each.thread for each in ops][0] != ops[1].thread == ops[2].thread
    assert [each.annotation["stream"] for each in ops] == [7, 7, 20]
    marks = [(each.kind.name, result.scope(each)) for each in result.records if each.kind.name.startswith("scope_")]
    assert marks == [
        ("scope_begin", "ProfilerStep#6"),
        ("scope_begin", "ProfilerStep#6/backward"),
        ("scope_begin", "ProfilerStep#6/backward/inner"),
        ("scope_end", "ProfilerStep#6/backward/inner"),
        ("scope_end", "ProfilerStep#6/backward"),
        ("scope_end", "ProfilerStep#6"),
    ]
    assert [each.start_ns for each in ops] == [10_000, 310_000, 340_000]


def test_a_serving_engines_step_is_a_scope_with_its_batch(imported: Import) -> None:
    name = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)"
    result = imported([annotation(name, 0, 100), *LINEAR])
    begin = result.of("scope_begin")[0]
    assert result.scope(begin) == name
    assert begin.annotation["iteration"]["phase"] == "decode"
    assert begin.annotation["iteration"]["decode"] == {
        "requests": 32,
        "query_tokens": 32,
        "key_tokens": 55086,
        "query_squared": 32,
        "query_times_key": 55086,
    }


def test_the_autograd_engines_wrappers_are_annotations_not_ops(imported: Import) -> None:
    events = [
        op("autograd::engine::evaluate_function: MmBackward0", 0, 100),
        op("MmBackward0", 5, 90),
        op("aten::mm", 10, 10, MM),
        op("torch::autograd::AccumulateGrad", 200, 20),
        op("aten::add_", 205, 10, ADD),
    ]
    result = imported(events)
    assert result.ops == ["aten::mm.default", "aten::add_.Tensor"]
    assert result.of("op")[0].annotation["within"] == [
        "autograd::engine::evaluate_function: MmBackward0",
        "MmBackward0",
    ]
    assert result.report.counts["wrappers"] == 3


def test_a_collective_is_one_unsupported_record_with_sizes_and_group(imported: Import) -> None:
    about = {
        "Collective name": "allreduce",
        "dtype": "BFloat16",
        "In msg nelems": 2873320,
        "Group size": 8,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    events = [
        op("c10d::allreduce_", 10, 100, [("TensorList", [[2873320]], [[1]], ""), NONE, NONE, NONE, scalar("-1")]),
        op("record_param_comms", 20, 50, [("TensorList", [[2873320]], [[1]], "")], **about),
        annotation("nccl:all_reduce", 25, 40),
        launch(1, 30),
        kernel(1, 200, 90, "ncclDevKernel_AllReduce"),
    ]
    result = imported(events)
    assert result.ops == []
    (record,) = result.of("unsupported")
    assert record.argument("reason") == "collective" and record.argument("op") == "c10d::allreduce_"
    for told in ("In msg nelems: 2873320", "Group size: 8", "dtype: BFloat16", "Ranks: [0, 1]"):
        assert told in str(record.argument("detail"))
    assert record.device_duration_ns == 90_000


def test_a_graph_launch_is_an_unsupported_record_with_its_kernels(imported: Import) -> None:
    events = [*LAUNCHED, launch(9, 300, name="cudaGraphLaunch"), kernel(9, 400, 5, "a"), kernel(9, 410, 6, "b")]
    result = imported(events)
    (record,) = result.of("unsupported")
    assert record.argument("reason") == "cuda_graph" and "2 kernels" in str(record.argument("detail"))
    assert record.device_duration_ns == 11_000
    assert [each["name"] for each in record.annotation["device_kernels"]] == ["a", "b"]


def test_kernels_that_no_operator_launched_are_unsupported_records(imported: Import) -> None:
    events = [
        *LAUNCHED,
        launch(9, 300),
        kernel(9, 400, 5, "my_extension_kernel"),
        op("triton_poi_fused_add_0", 500, 10),
        launch(10, 505),
        kernel(10, 600, 5, "triton_poi_fused_add_0"),
        kernel(1000, 1, 5, "before the trace"),
    ]
    result = imported(events)
    assert [(str(each.argument("reason")), str(each.argument("op"))) for each in result.of("unsupported")] == [
        ("outside_operator", "my_extension_kernel"),
        ("triton_launch", "triton_poi_fused_add_0"),
    ]
    assert any("1 pieces of device work were launched before the trace" in note for note in result.report.notes)


def test_an_operator_of_an_absent_library_is_unsupported_and_says_how_to_get_it(imported: Import) -> None:
    events = [op("vllm::rocm_unquantized_gemm", 10, 50, MM), launch(1, 20), kernel(1, 100, 5)]
    (record,) = imported(events).of("unsupported")
    assert record.argument("reason") == "no_schema" and "--allow-import vllm" in str(record.argument("detail"))
    assert record.annotation["arguments"] == "float32[4,8], float32[8,3]"
    row = next(row for row in imported(events).report.rows() if row["kind"] == "op")
    assert row["status"] == "incomplete" and row["reason"] == "no_schema" and row["device_ns"] == 5000


def test_unique_keeps_one_of_each_call_with_its_count_and_mean_times(imported: Import) -> None:
    events = []
    for i in range(5):
        events += [op("aten::mm", 100 * i, 10 + i, MM), launch(i, 100 * i + 2), kernel(i, 1000 + 10 * i, 2 + i)]
    events += [
        op("aten::mm", 900, 10, [tensor("float", 5, 8), tensor("float", 8, 3)]),
        launch(9, 905),
        kernel(9, 2000, 50),
    ]
    result = imported([annotation("step", 0, 950), *events], unique=True)
    assert [each.annotation["count"] for each in result.of("op")] == [5, 1]
    assert [each.duration_ns for each in result.of("op")] == [12_000, 10_000]
    assert [each.device_duration_ns for each in result.of("op")] == [4_000, 50_000]
    assert not result.of("scope_begin") and result.scope(result.of("op")[0]) == "step"
    assert len(imported(events).of("op")) == 6


def test_without_recorded_shapes_calls_are_incomplete_and_say_what_to_do(imported: Import) -> None:
    result = imported([op("aten::mm", 10, 50)])
    (record,) = result.of("unsupported")
    assert record.argument("reason") == "import_incomplete"
    assert "record_shapes=True" in str(record.argument("detail"))


def test_missing_strides_are_contiguous_and_noted(imported: Import) -> None:
    event = op("aten::mm", 10, 50, MM)
    del event["args"]["Input Strides"]
    record = imported([event]).of("op")[0]
    assert record.argument("self").meta.strides == (8, 1)
    assert record.annotation["assumed"] == ["strides: the trace has none, contiguous ones are used"]


def test_missing_values_leave_defaults_to_the_schema_and_the_rest_incomplete(imported: Import) -> None:
    events = [op("aten::add", 10, 10, ADD), op("aten::view", 30, 10, [tensor("float", 4, 3), numbers("[12]")])]
    for event in events:
        del event["args"]["Concrete Inputs"]
    result = imported(events)
    assert result.of("op")[0].annotation["assumed"] == [
        "alpha=1: the trace does not record the values of numbers; the schema's default"
    ]
    assert "does not record the values of numbers" in str(result.of("unsupported")[0].argument("detail"))


def test_names_of_fields_before_the_current_ones_are_read(imported: Import) -> None:
    event = op("aten::mm", 10, 50, MM, category="Operator")
    event["args"] = {"Input dims": [[4, 8], [8, 3]], "Input types": ["float", "float"]}
    assert imported([event]).ops == ["aten::mm.default"]


def test_the_dtypes_of_a_lists_tensors_are_learned_from_the_trace(imported: Import) -> None:
    cat = op("aten::cat", 50, 10, [("TensorList", [[4, 8], [2, 8]], [[8, 1], [8, 1]], ""), scalar("0")])
    alone = imported([cat]).of("unsupported")[0]
    assert "dtype is not recorded" in str(alone.argument("detail"))
    known = op("aten::relu", 10, 10, [tensor("c10::BFloat16", 4, 8)])
    record = imported([known, cat]).of("op")[1]
    assert [each.meta.dtype.name for each in record.argument("tensors")] == ["bfloat16", "bfloat16"]
    assert "the others are" in " ".join(record.annotation["assumed"])


def test_results_are_computed_without_memory_and_in_place_results_are_their_arguments(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 10, MM),
        op("aten::add_", 30, 10, ADD),
        op("aten::t", 50, 10, [tensor("float", 3, 8)]),
        op("aten::nonzero", 70, 10, [tensor("float", 4)]),
    ]
    mm, add, transposed, nonzero = imported(events).of("op")
    assert mm.results[0].meta.sizes == (4, 3) and mm.results[0].storage not in {each.storage for each in mm.args}
    assert add.results[0] == add.argument("self")
    assert transposed.results[0].storage == transposed.args[0].storage
    assert transposed.results[0].meta.strides == (1, 8)
    assert nonzero.results == () and "not known" in nonzero.annotation["results"]


def test_every_input_is_a_storage_of_its_own_without_content(imported: Import) -> None:
    result = imported([op("aten::mm", 10, 10, MM), op("aten::mm", 30, 10, MM)])
    storages = [each.storage for record in result.of("op") for each in record.args]
    assert len(set(storages)) == 4
    assert {result.reader.storage(each).origin for each in storages} == {StorageOrigin.absent}
    assert [result.reader.storage(each).bytes for each in storages[:2]] == [128, 96]


def test_the_session_says_where_it_came_from(imported: Import) -> None:
    session = imported(
        LAUNCHED, deviceProperties=[H100], cuda_runtime_version=12040, distributedInfo={"rank": 3, "world_size": 8}
    ).reader.session
    assert session.producer == "opreplay-import" and (session.rank, session.world_size) == (3, 8)
    assert session.policies["import"] == "kineto" and session.policies["source"] == "trace.json"
    assert session.host is None and session.argv == ()
    assert session.libraries["cuda_runtime_version"] == 12040


@pytest.mark.parametrize(
    "wrong",
    [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm"},
        {"ph": "X", "cat": "cpu_op", "ts": "soon", "name": "aten::mm"},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1e300, "dur": 1},
        [],
        "text",
        None,
        3,
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "args": [1]},
    ],
)
def test_events_that_are_none_are_left_out_and_counted(wrong: Any, imported: Import) -> None:
    result = imported([wrong, op("aten::mm", 10, 50, MM)])
    assert result.ops == ["aten::mm.default"]
    assert any("1 events" in problem for problem in result.report.problems)


@pytest.mark.parametrize(
    "inputs",
    [
        [("float", [1 << 62, 1 << 62], [1, 1], ""), tensor("float", 8, 3)],
        [("float", [4, 8], [-8, 1], ""), MM[1]],
        [("float", [-4, 8], [8, 1], ""), MM[1]],
        [("float", "4,8", [8, 1], ""), MM[1]],
        [("float", [4, 8.5], [8, 1], ""), MM[1]],
        [("float", None, None, ""), MM[1]],
    ],
)
def test_impossible_tensors_make_the_call_incomplete(inputs: list[tuple[Any, ...]], imported: Import) -> None:
    (record,) = imported([op("aten::mm", 10, 50, inputs)]).of("unsupported")
    assert record.argument("reason") == "import_incomplete"


def test_a_file_without_operators_or_device_work_is_refused(imported: Import, tmp_path: Path) -> None:
    with pytest.raises(InvalidCapture, match="no operators and no device work"):
        imported(trace(tmp_path / "empty.json", [annotation("step", 0, 1)][:0]))


def test_events_that_no_run_can_span_are_refused(imported: Import, tmp_path: Path) -> None:
    with pytest.raises(InvalidCapture, match="56 years apart; expected one run"):
        imported([op("aten::add", 1, 10, ADD), op("aten::add", 1_764_540_000_000_000, 10, ADD)])
    assert not list(tmp_path.glob("*.opreplay*"))


def test_events_may_be_the_outermost_array(imported: Import, tmp_path: Path) -> None:
    import json

    path = tmp_path / "array.json"
    path.write_text(json.dumps(LINEAR))
    assert imported(path).ops == ["aten::t.default", "aten::addmm.default"]


def test_a_composite_that_spent_its_time_itself_is_named_in_a_note(imported: Import) -> None:
    events = [
        op("aten::clone", 12, 90, [tensor("float", 4, 3), scalar("0")]),
        op("aten::copy_", 20, 10, [tensor("float", 4, 3), tensor("float", 4, 3), scalar("False")]),
    ]
    result = imported(events)
    assert result.ops == ["aten::copy_.default"]
    assert any("aten::clone (80.0 of 90.0 us)" in note for note in result.report.notes), result.report.notes
    assert not any("aten::linear" in note for note in imported(LINEAR).report.notes)


@pytest.mark.parametrize(
    ("arguments", "overload", "status"),
    [
        ([scalar("4"), scalar("False"), scalar("False"), NONE], "dtype", "exact"),
        ([NONE, scalar("4"), scalar("False"), scalar("False"), NONE], "device", "inferred"),
    ],
)
def test_a_conversions_device_is_never_none_where_one_is_required(
    arguments: list[tuple[Any, ...]], overload: str, status: str, imported: Import
) -> None:
    result = imported([op("aten::to", 10, 5, [tensor("long int", 3), *arguments])], level="root")
    record = result.of("op")[0]
    assert result.ops == [f"aten::to.{overload}"] and record.annotation["import"] == status
    if overload == "device":
        assert record.argument("device") is not None
        assert "device=cpu" in record.annotation["assumed"][0]


@pytest.mark.parametrize(
    ("other", "result_types"), [("long int", "torch.float64, a number in torch.float32"), ("float", "")]
)
def test_on_the_host_a_number_may_be_a_python_number(other: str, result_types: str, imported: Import) -> None:
    events = [op("aten::add", 10, 10, [tensor(other, 3), ("double", [], [], ""), scalar("1")])]
    annotation = imported(events).of("op")[0].annotation
    assert annotation["import"] == "inferred"
    assert "Python numbers" in annotation["assumed"][0] and annotation["assumed"][0].endswith(result_types or "which")
    events = [op("aten::add", 10, 10, [tensor(other, 3), tensor(other, 3), scalar("1")])]
    assert imported(events).of("op")[0].annotation["import"] == "exact"


def test_beside_a_tensor_without_dimensions_a_number_may_be_one_too(imported: Import) -> None:
    def assumed(first: str, second: str, *device: dict[str, Any]) -> list[str]:
        (record,) = imported([op("aten::mul", 10, 10, [(first, [], [], ""), (second, [], [], "")]), *device]).of("op")
        return record.annotation.get("assumed", [])

    on_device = launch(1, 12), kernel(1, 100, 5)
    assert "a tensor makes it compute in torch.float64, a number in torch.float32" in assumed("float", "double")[0]
    assert len(assumed("double", "double")) == len(assumed("long int", "double")) == 1
    assert assumed("double", "float") == [], "no number is passed as a float32"
    assert "host memory" in assumed("float", "double", *on_device)[0]
    assert "treated as a tensor" in assumed("long int", "long int", *on_device)[0]


def test_an_argument_that_the_trace_has_no_numbers_of_is_no_list_of_numbers(imported: Import) -> None:
    # conv1d(padding="same"): with the values of numbers recorded, what is not there is the string.
    inputs = [
        tensor("float", 1, 4, 5),
        tensor("float", 1, 4, 3),
        NONE,
        numbers("[2]"),
        NONE,
        numbers("[1]"),
        scalar("1"),
    ]
    result = imported([op("aten::conv1d", 10, 5, inputs)], level="root")
    assert result.ops == ["aten::conv1d.padding"]
    assert "drops strings" in result.of("op")[0].annotation["assumed"][0]
