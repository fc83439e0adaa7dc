"""Profiler traces of other builds, of other times, and of damaged files: what is odd is read where that is certain, and
told where it is not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from .conftest import Import, Imported
from .test_kineto import LAUNCHED, LINEAR
from .traces import ADD, MM, NONE, annotation, kernel, launch, op, scalar, tensor

RELU = [tensor("float", 4, 3)]


def without(event: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in keys}


def told(result: Imported, *words: str) -> bool:
    """Whether one problem of the report has all these words."""
    return any(all(word in problem for word in words) for problem in result.report.problems)


# --------------------------------------------------------------------------------------------------------- what is read


def test_a_name_with_an_overload_is_that_overload(imported: Import) -> None:
    # As torch.profiler's capture_overload_names prints them; the values alone would fit `add.Scalar`, too.
    inputs = [tensor("float", 3), scalar("1"), scalar("1")]
    result = imported(
        [
            op("aten::add.Scalar", 10, 5, inputs),
            op("aten::mm", 20, 5, MM),
            op(
                "aten::sum.dim_IntList",
                30,
                5,
                [tensor("float", 3), ("ScalarList", [], [], "[0]"), scalar("False"), NONE],
            ),
        ]
    )
    assert result.ops == ["aten::add.Scalar", "aten::mm.default", "aten::sum.dim_IntList"]
    assert {row["status"] for row in result.report.rows() if row["kind"] == "op"} == {"exact"}
    unknown = imported([op("aten::add.Nothing", 10, 5, inputs)]).of("unsupported")[0]
    assert unknown.argument("detail") == "aten::add has no overload 'Nothing' here"


def test_pairs_of_begin_and_end_events_are_spans(imported: Import) -> None:
    spans = [*LINEAR[:1], op("aten::relu", 200, 10, RELU)]
    pairs = [without(event, "dur") | {"ph": "B"} for event in spans[:1] + LINEAR[1:]]
    ends = [{"ph": "E", "pid": 10, "tid": 1, "ts": event["ts"] + event["dur"]} for event in LINEAR]
    events = sorted([*pairs, *ends], key=lambda event: (event["ts"], event["ph"] == "B"))
    result = imported([*events, spans[1]])
    assert result.ops == [*imported(LINEAR).ops, "aten::relu.default"]
    assert not result.report.problems
    alone = imported([*events[:-1], spans[1], {"ph": "E", "pid": 99, "tid": 1, "ts": 5}])
    assert told(alone, "1 events begin", "never end") and told(alone, "1 events end", "never begin")


def test_operators_without_a_category_are_told_by_their_name(imported: Import) -> None:
    # As torch.autograd.profiler wrote them before Kineto.
    events = [without(op("aten::mm", 10, 5, MM), "cat"), without(op("enumerate", 0, 50), "cat")]
    result = imported(events)
    assert result.ops == ["aten::mm.default"] and told(result, "2 events have no category")


def test_an_xpu_trace_is_of_xpu_devices(imported: Import) -> None:
    events = [
        op("aten::mm", 10, 50, MM),
        {**launch(1, 20, name="urEnqueueKernelLaunch"), "cat": "xpu_runtime"},
        kernel(1, 100, 5),
    ]
    result = imported(events)
    (record,) = result.of("op")
    assert str(result.reader.devices[record.argument("self").meta.device]) == "xpu:0"


def test_kernels_at_time_zero_do_not_shift_the_clock(imported: Import) -> None:
    # Old Kineto wrote kernels with ts 0 and dur 0; other times were microseconds since 1970.
    base = 1_615_207_264_504_915
    result = imported(
        [
            op("aten::mm", base, 50, MM),
            launch(1, base + 5),
            {**kernel(1, 0, 0), "cat": "Kernel"},
            op("aten::mm", base + 100, 50, MM),
            launch(2, base + 105),
            kernel(2, base + 200, 9),
        ]
    )
    assert [record.start_ns for record in result.of("op")] == [0, 100_000]


@pytest.mark.parametrize("quote", ["", '"'])
def test_times_of_more_digits_than_a_double_has_are_exact(quote: str, imported: Import, tmp_path: Path) -> None:
    events = [op("aten::mm", 1, 2, MM), op("aten::relu", 3, 4, RELU)]
    text = json.dumps(events)
    for short, long in (
        ('"ts": 1,', f'"ts": {quote}1699999999999999.001{quote},'),
        ('"ts": 3,', f'"ts": {quote}1700000000000001.123{quote},'),
    ):
        assert short in text
        text = text.replace(short, long)
    path = tmp_path / "t.json"
    path.write_text(text)
    assert [record.start_ns for record in imported(path).of("op")] == [0, 2_122]


def test_a_trace_whose_later_times_need_more_digits_has_each_event_once(imported: Import) -> None:
    early, late = 8_796_093_022_200.5, 8_796_093_022_300.25  # 2**43 is in between
    events = [
        op("aten::mm", early, 2.5, MM),
        without(op("aten::relu", late, 0, RELU), "dur") | {"ph": "B"},
        {"ph": "E", "name": "aten::relu", "pid": 10, "tid": 1, "ts": late + 0.75},
    ]
    result = imported(events)
    assert result.ops == ["aten::mm.default", "aten::relu.default"] and result.report.counts["events"] == 2
    assert [record.start_ns for record in result.of("op")] == [0, 99_750]
    assert [record.duration_ns for record in result.of("op")] == [2500, 750]


def test_documents_that_follow_each_other_are_read_as_one_and_told(imported: Import, tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    one = json.dumps({"traceEvents": [op("aten::mm", 10, 5, MM)]})
    two = json.dumps({"traceEvents": [op("aten::relu", 20, 5, RELU)]})
    path.write_text(one + "\n" + two)
    result = imported(path)
    assert result.ops == ["aten::mm.default", "aten::relu.default"] and told(result, "another JSON document begins")
    path.write_text(one + "trailing words")
    assert told(imported(path), f"byte {len(one)}", "goes on after its JSON", "trailing words")


def test_a_member_that_is_no_json_does_not_hide_those_after_it(imported: Import, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"metadata": {"broken" "x"}, "traceEvents": ' + json.dumps(LINEAR) + "}")
    result = imported(path)
    assert result.ops == imported(LINEAR).ops and told(result, "an entry is not JSON")


# ----------------------------------------------------------------------------------------------------- what is left out


@pytest.mark.parametrize("duration", [None, -5])
def test_operators_without_a_duration_are_left_out_and_counted(duration: int | None, imported: Import) -> None:
    broken = op("aten::relu", 500, 5, RELU)
    broken = without(broken, "dur") if duration is None else {**broken, "dur": duration}
    result = imported([*LINEAR, broken])
    assert result.ops == imported(LINEAR).ops
    assert told(result, "1 events of category cpu_op have no duration", "left out")


@pytest.mark.parametrize("duration", [None, -5, True])
def test_device_work_of_unknown_duration_has_no_time(duration: int | None, imported: Import) -> None:
    broken = kernel(77, 200, 30)
    broken = without(broken, "dur") if duration is None else {**broken, "dur": duration}
    for unique in (False, True):
        result = imported([*LINEAR, launch(77, 50), broken], unique=unique)
        assert result.of("op")[0].device_duration_ns is None
        assert told(result, "1 events of category kernel have no duration", "not known")


@pytest.mark.parametrize("args", [[1], "x", 7])
def test_device_work_whose_args_are_no_object_is_work_without_them(args: object, imported: Import) -> None:
    result = imported([*LINEAR, launch(77, 50), kernel(77, 200, 9), {**kernel(78, 300, 30), "args": args}])
    assert [each.device_duration_ns for each in result.of("unsupported")] == [30_000]
    assert told(result, "1 events have args that are no object")


def test_events_of_unknown_categories_and_phases_are_counted(imported: Import) -> None:
    events = [
        *LINEAR,
        {"ph": "X", "cat": "Ascend", "name": "MatMul", "ts": 1, "dur": 2},
        {**op("aten::mm", 300, 5, MM), "ph": "i"},
        {"cat": "cpu_op", "name": "no phase"},
        {"ph": "X", "cat": "python_function", "name": "f", "ts": 1, "dur": 2},
        {"ph": "s", "cat": "ac2g"},
        {},
    ]
    result = imported(events)
    assert told(result, "1 events", "'Ascend'", "not known") and told(result, "1 events", "cpu_op", "phase 'i'")
    assert told(result, "1 events without the fields")
    assert result.report.counts["other events"] == 2
    assert "other events are not calls: 1 python_function, 1 ac2g" in result.report.notes
    assert len(result.report.problems) == 3


def test_tensors_without_strides_beside_others_are_not_taken_for_strided_ones(imported: Import) -> None:
    sparse = ("float", [4, 8], [], "")
    (record,) = imported([op("aten::mm", 10, 5, [sparse, MM[1]])]).of("unsupported")
    assert record.argument("reason") == "import_incomplete" and "without strides" in str(record.argument("detail"))


def test_whether_complex_tensors_are_conjugated_is_an_assumption(imported: Import) -> None:
    (record,) = imported(
        [op("aten::relu_", 10, 5, RELU), op("aten::abs", 20, 5, [tensor("c10::complex<float>", 3)])]
    ).of("op")[1:]
    assert record.annotation["assumed"] == ["complex tensors are assumed not conjugated: the trace does not say"]


def test_quantized_tensors_have_no_scale_in_a_trace(imported: Import) -> None:
    (record,) = imported([op("aten::dequantize", 10, 5, [tensor("c10::qint8", 5, 6)])]).of("unsupported")
    assert record.argument("reason") == "import_incomplete" and "scale" in str(record.argument("detail"))


def test_what_torch_compile_generated_for_the_host_is_a_record_of_its_own(imported: Import) -> None:
    region = op("Torch-Compiled Region: 0/0", 5, 200)
    graph = annotation("## Call CompiledFxGraph fabc ##", 8, 150)
    result = imported([region, graph, *LINEAR])
    (record,) = result.of("unsupported")
    assert record.argument("reason") == "compiled_region" and record.duration_ns == 150_000
    assert result.ops == imported(LINEAR).ops and result.report.calls()["incomplete"] == 1
    assert imported([region, *LINEAR]).of("unsupported")[0].argument("op") == "Torch-Compiled Region: 0/0"
    # On a device, what it generated are kernels that the trace shows.
    assert not imported([region, graph, *LAUNCHED], level="leaf").of("unsupported")
    assert not imported([region, graph, *LAUNCHED]).of("unsupported")


def test_unique_keeps_one_of_the_work_that_no_operator_stands_for(imported: Import) -> None:
    events = [*LAUNCHED]
    for each in range(3):
        events += [launch(200 + each, 300 + each), kernel(200 + each, 400 + each, 3 + each, "my_kernel")]
    (record,) = imported(events, unique=True).of("unsupported")
    assert record.annotation["count"] == 3 and record.device_duration_ns == 4_000
    result = imported(events)
    assert len(result.of("unsupported")) == 3 and "count" not in result.of("unsupported")[0].annotation
    assert result.report.calls()["incomplete"] == 3


def test_an_unknown_operator_that_only_allocates_stands_for_its_own_work(imported: Import) -> None:
    sizes = [("ScalarList", [], [], "[3]"), scalar("6"), scalar("0"), NONE, scalar("False"), NONE]
    events = [op("mylib::fused", 10, 90, RELU), op("aten::empty", 12, 3, sizes)]
    result = imported(events)
    assert not result.ops and [each.argument("op") for each in result.of("unsupported")] == ["mylib::fused"]
    result = imported([*events, op("aten::mm", 20, 30, MM)])
    assert result.ops == ["aten::empty.memory_format", "aten::mm.default"] and not result.of("unsupported")
    assert any("they are unknown here" in note and "mylib::fused (1 times)" in note for note in result.report.notes)


def test_what_an_operator_called_stands_for_it_where_no_trace_holds_its_arguments(imported: Import) -> None:
    packed = [tensor("float", 2, 3), ("", [], [], ""), scalar("False")]
    outer = op("quantized::linear_dynamic", 10, 90, packed)
    result = imported([outer, op("aten::mm", 20, 30, MM)])
    assert result.ops == ["aten::mm.default"] and not result.of("unsupported")
    assert any("quantized::linear_dynamic (1 times)" in note for note in result.report.notes)
    (record,) = imported([outer]).of("unsupported")
    assert record.argument("op") == "quantized::linear_dynamic", "it stands for itself where it called nothing"


def test_a_collective_says_its_sizes_also_where_its_name_is_all_else(imported: Import) -> None:
    (record,) = imported([op("c10d::allreduce_", 10, 100, [("TensorList", [[72]], [[1]], ""), NONE])]).of("unsupported")
    assert "[?[72]]" in str(record.argument("detail"))


# ------------------------------------------------------------------------------------------------- who called, launched


def test_ids_that_several_launches_have_mean_the_last_one_before_the_work(imported: Import) -> None:
    def merged(*kernels: dict[str, Any]) -> Imported:
        return imported(
            [
                op("aten::mm", 10, 20, MM),
                launch(1, 12),
                op("aten::relu", 100, 20, RELU, thread=2),
                launch(1, 105, thread=2),
                *kernels,
            ]
        )

    result = merged(kernel(1, 30, 5, "mm"), kernel(1, 150, 7, "relu"))
    assert [(each, record.device_duration_ns) for each, record in zip(result.ops, result.of("op"), strict=True)] == [
        ("aten::mm.default", 5_000),
        ("aten::relu.default", 7_000),
    ]
    assert told(result, "2 events of device work", "correlation id that several launches have")
    assert merged(kernel(1, 5, 5)).ops == ["aten::mm.default"], "the clocks of device and host differ: the first one"
    same = imported([op("aten::mm", 10, 20, MM), launch(1, 12), launch(1, 14), kernel(1, 30, 5)])
    assert same.ops == ["aten::mm.default"] and not same.report.problems


def test_external_ids_that_several_operators_have_mean_the_last_one_before_the_work(imported: Import) -> None:
    result = imported(
        [
            op("aten::mm", 10, 20, MM, external=4),
            op("aten::relu", 100, 20, RELU, external=4),
            kernel(1, 150, 5, **{"External id": 4}),
        ]
    )
    assert result.ops == ["aten::relu.default"]
    assert told(result, "1 events of device work", "external id that several operators have")


def test_calls_that_overlap_partly_are_both_taken_and_told(imported: Import) -> None:
    events = [
        op("aten::mm", 0, 100, MM),
        op("aten::relu", 50, 100, RELU),
        op("aten::add", 120, 10, ADD),
        op("aten::mm", 160, 10, MM),
    ]
    result = imported(events)
    assert result.ops == ["aten::mm.default", "aten::relu.default", "aten::mm.default"]
    assert told(result, "1 events begin inside another one", "end after it")


def test_what_ends_later_by_a_clocks_rounding_is_inside(imported: Import) -> None:
    # 1_699_999_999_999_999.3 and its like are rounded to a quarter of a microsecond.
    events = [op("aten::mm", 0, 100, MM), op("aten::relu", 50, 50.6, RELU), op("aten::add", 100.2, 10, ADD)]
    result = imported(events)
    assert result.ops == ["aten::mm.default", "aten::add.Tensor"] and not result.report.problems


def test_an_instant_before_an_event_of_the_same_moment_is_not_inside_it(imported: Import) -> None:
    events = [
        op("aten::relu", 10, 0, RELU, external=1),
        op("aten::mm", 10, 20, MM, external=2),
        op("aten::relu", 10, 0, RELU, external=3),
    ]
    assert imported(events).ops == ["aten::relu.default", "aten::mm.default"]


def test_a_clock_of_whole_microseconds_does_not_double_what_short_calls_called(imported: Import) -> None:
    # aten::zeros, 10.2 to 11.9, calls zero_ at 11.1 for half a microsecond, which ends with fill_.
    sizes = [("ScalarList", [], [], "[3]"), scalar("6"), scalar("0"), NONE, scalar("False")]
    events = [
        op("aten::zeros", 10, 1, sizes, external=1),
        op("aten::empty", 10, 0, [*sizes, NONE], external=2),
        op("aten::zero_", 11, 0, [tensor("float", 3)], external=3),
        op("aten::relu", 11, 2, RELU, external=4),
    ]
    result = imported(events)
    assert result.ops == ["aten::empty.memory_format", "aten::zero_.default", "aten::relu.default"]
    assert told(result, "1 events of no length", "treated as its calls")


def test_a_collective_that_outlasts_its_call_is_one_record(imported: Import) -> None:
    events = [
        op("c10d::allreduce_", 10, 50, [("TensorList", [[4]], [[1]], "")]),
        annotation("nccl:all_reduce", 20, 400),
        op("aten::mm", 100, 20, MM),
    ]
    result = imported(events)
    assert [str(each.argument("op")) for each in result.of("unsupported")] == ["c10d::allreduce_"]
    assert result.ops == ["aten::mm.default"] and not result.report.problems


@pytest.mark.slow
def test_overlaps_without_end_are_read_soon(imported: Import) -> None:
    events = [op("aten::relu", 2 * index, 10_000, RELU) for index in range(3000)]
    assert len(imported(events).ops) == 3000


# ------------------------------------------------------------------------------------------------------------- warnings


def test_an_import_does_not_pass_on_what_operators_warn_of(imported: Import) -> None:
    # The result's `out` of another size is made larger, with a warning each time.
    call = op("aten::abs", 10, 5, [tensor("float", 4), tensor("float", 3)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert imported([call]).ops == ["aten::abs.out"]
    assert not [str(each.message) for each in caught]
