"""Traces that were taken while a CUDA or HIP graph was captured: what ran there, though none of its kernels did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opreplay_tools.importer import main

from replayfmt.errors import UsageError
from replayfmt.format.reader import open_capture
from replayfmt.importers.common.options import ImportOptions
from replayfmt.importers.importing import import_trace
from replayfmt.importers.kineto.importer import import_kineto

from .conftest import Import, Imported
from .observed import RELU as RELU_SCHEMA
from .observed import Traced, Written
from .traces import ADD, H100, MM, NONE, annotation, kernel, launch, op, tensor, trace

RELU = [tensor("float", 4, 3)]
EAGER = [op("aten::relu", 10, 20, RELU), launch(1, 12), kernel(1, 50, 5), op("aten::add", 40, 10, ADD)]


def begin(start: float, **more: Any) -> dict[str, Any]:
    return launch(900, start, name="hipStreamBeginCapture", **more)


def end(start: float, **more: Any) -> dict[str, Any]:
    return launch(901, start, name="hipStreamEndCapture", **more)


def node(
    number: int, start: float, kernel_name: str = "", *, name: str = "hipLaunchKernel", thread: int = 1
) -> dict[str, Any]:
    """A launch that becomes a node; ROCm's exports say of which kernel."""
    event = launch(number, start, name=name, thread=thread)
    if kernel_name:
        event["args"] |= {"kernel": kernel_name, "grid": [4, 1, 1], "block": [64, 1, 1]}
    return event


CAPTURE = [
    begin(100),
    op("aten::linear", 110, 50, [*MM, tensor("float", 3)]),
    op("aten::mm", 115, 20, MM),
    launch(99, 116, name="hipStreamGetCaptureInfo"),
    node(20, 120, "gemm"),
    op("aten::add", 140, 15, ADD),
    node(21, 145, "add"),
    end(200),
]


def devices(result: Imported) -> list[str]:
    return [str(result.reader.devices[record.argument("self").meta.device]) for record in result.of("op")]


def test_what_is_captured_is_taken_though_nothing_ran(imported: Import) -> None:
    result = imported([*EAGER, annotation("capture_32_FULL", 90, 200), *CAPTURE], deviceProperties=[H100])
    assert result.ops == ["aten::relu.default", "aten::mm.default", "aten::add.Tensor"]
    assert devices(result) == ["cuda:0", "cuda:0", "cuda:0"], "what launches is on the device, whether it runs or not"
    assert any(
        "1 graphs were captured in it, with 2 launches" in note and "leaf" in note for note in result.report.notes
    )
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
    (record,) = (each for each in result.of("op") if result.name(each) == "aten::abs.default")
    assert str(result.reader.devices[record.argument("self").meta.device]) == "cpu"
    assert record.start_ns == 170_000, "the second one is outside of the capture, and launched nothing"


def test_launches_into_a_graph_outside_of_operators_are_unsupported_records(imported: Import) -> None:
    events = [
        *EAGER,
        *CAPTURE,
        node(30, 180, "triton_poi_fused_0"),
        node(31, 190),
        node(32, 195, name="hipMemsetAsync"),
    ]
    result = imported(events)
    assert [(each.argument("reason"), each.argument("op")) for each in result.of("unsupported")] == [
        ("triton_launch", "triton_poi_fused_0"),
        ("outside_operator", "hipLaunchKernel"),
        ("outside_operator", "hipMemsetAsync"),
    ]


def test_captures_are_told_apart_by_thread_and_reach_to_the_edges_of_a_trace(imported: Import) -> None:
    other = op("aten::abs", 150, 20, RELU, thread=2)
    result = imported([*EAGER, *CAPTURE, other, node(40, 155, thread=2)])
    assert result.ops == ["aten::relu.default", "aten::mm.default", "aten::add.Tensor"]
    open_ended = [event for event in CAPTURE if event["name"] != "hipStreamEndCapture"]
    assert imported([*EAGER, *open_ended]).ops == result.ops
    begun_before = [event for event in CAPTURE if event["name"] != "hipStreamBeginCapture"]
    assert imported(begun_before).ops == ["aten::mm.default", "aten::add.Tensor"]


# -------------------------------------------------------------------------------- with the trace of a graph's execution


Paired = Callable[..., Imported]


@pytest.fixture
def paired(tmp_path: Path) -> Iterator[Paired]:
    """Imports the execution of graphs with the traces of their captures."""
    readers = []

    def make(execution: list[dict[str, Any]], *captures: list[dict[str, Any]], **options: Any) -> Imported:
        files = [trace(tmp_path / f"capture {number}.json", events) for number, events in enumerate(captures)]
        out = tmp_path / "out.opreplay"
        report = import_kineto(
            trace(tmp_path / "execution.json", execution),
            out,
            force=True,
            options=ImportOptions(graph_captures=files, **options),
        )
        readers.append(open_capture(out))
        records = [readers[-1].record(ordinal) for ordinal in range(readers[-1].record_count)]
        return Imported(report, readers[-1], [each for each in records if not each.kind.name.startswith("storage_")])

    yield make
    for reader in readers:
        reader.close()


def launched(number: int, start: float, *kernels: str, streams: tuple[int, ...] = (7,)) -> list[dict[str, Any]]:
    """A graph launch and its kernels, of 1, 2, 3... us."""
    return [
        launch(number, start, name="hipGraphLaunch"),
        *(
            kernel(number, start + 50 + 5 * place, place + 1, name, stream=streams[place % len(streams)])
            for place, name in enumerate(kernels)
        ),
    ]


def times(result: Imported) -> list[tuple[str, int | None]]:
    return [
        (name.split(".")[0], record.device_duration_ns)
        for name, record in zip(result.ops, result.of("op"), strict=True)
    ]


def told(result: Imported, *words: str) -> bool:
    return any(all(word in note for word in words) for note in result.report.notes)


def test_each_graph_launchs_kernels_get_their_operators(paired: Paired) -> None:
    execution = [
        annotation("step", 0, 900),
        op("aten::relu", 10, 20, RELU),
        launch(1, 12),
        kernel(1, 50, 5),
        *launched(2, 100, "gemm", "add"),
        op("aten::abs", 200, 9, RELU),
        launch(3, 201),
        kernel(3, 400, 4),
        *launched(4, 300, "gemm", "add"),
    ]
    result = paired(execution, CAPTURE)
    assert times(result) == [
        ("aten::relu", 5_000),
        ("aten::mm", 1_000),
        ("aten::add", 2_000),
        ("aten::abs", 4_000),
        ("aten::mm", 1_000),
        ("aten::add", 2_000),
    ]
    assert not result.of("unsupported") and told(result, "4 kernels of 2 graph launches", "capture 0.json", "by name")
    inside = result.of("op")[1]
    assert inside.duration_ns == 20_000, "of the capture"
    assert inside.annotation is not None and 100_000 < (inside.start_ns or 0) < 101_000
    assert inside.annotation["within"] == ["graph launch"] and result.scope(inside) == "step"
    assert [each["name"] for each in inside.annotation["device_kernels"]] == ["gemm"]
    assert {record.thread for record in result.of("op")} == {0}, "a graph launch is no thread of its own"


def test_the_attention_of_an_engine_has_as_many_keys_as_the_step_that_launched_it_says(paired: Paired) -> None:
    """The capture shows the call, with neither its cache nor a batch; the launch is inside of the step."""
    query, own = tensor("float", 4, 4, 8), tensor("float", 4, 2, 8)
    attention = op("vllm::unified_attention_with_output", 110, 30, [query, own, own, query, NONE])
    execution = [
        annotation("execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk40sqsq4sqsk40)", 90, 300),
        *launched(2, 100, "unified_attention"),
        *launched(3, 600, "unified_attention"),
    ]
    capture = [begin(100), attention, node(20, 120, "unified_attention"), end(200)]
    result = paired(execution, capture, rewrite="portable")
    keys = [
        each.argument("key").meta.sizes
        for each in result.of("op")
        if result.name(each).startswith("aten::scaled_dot_product_attention")
    ]
    assert keys == [(4, 2, 10, 8)], "of the launch in the step; the other one is in none"
    text = "\n".join(result.report.lines())
    assert "1.0 us (50.0%) by replacements" in text
    (left,) = [line for line in text.splitlines() if line.startswith("incomplete    vllm")]
    assert "1 time, 1.0 us (50.0%) on the device: no_schema" in left and "no annotation says how many keys" in left


def test_alike_calls_of_several_launches_are_one_with_their_count(paired: Paired) -> None:
    result = paired([*launched(2, 100, "gemm", "add"), *launched(4, 300, "gemm", "add")], CAPTURE, unique=True)
    assert times(result) == [("aten::mm", 1_000), ("aten::add", 2_000)]
    assert [record.annotation["count"] for record in result.of("op") if record.annotation] == [2, 2]


def test_a_graph_that_no_capture_fits_stays_unsupported(paired: Paired) -> None:
    result = paired([*EAGER, *launched(2, 100, "gemm", "softmax"), *launched(4, 300, "gemm", "add", "add")], CAPTURE)
    assert [record.argument("reason") for record in result.of("unsupported")] == ["cuda_graph", "cuda_graph"]
    assert told(result, "2 graph launches fit none of the captures")
    assert told(paired(EAGER, CAPTURE), "no graph is launched in the trace")
    assert told(paired([*EAGER, *launched(2, 100, "gemm")], EAGER), "capture 0.json: no graph was captured in it")


def test_captures_that_differ_and_fit_alike_are_not_guessed_from(paired: Paired) -> None:
    smaller = [begin(100), op("aten::mm", 115, 20, [tensor("float", 2, 8), MM[1]]), node(20, 120, "gemm"), end(200)]
    larger = [begin(100), op("aten::mm", 115, 20, MM), node(20, 120, "gemm"), end(200)]
    result = paired([*EAGER, *launched(2, 100, "gemm")], smaller, larger)
    assert [record.argument("reason") for record in result.of("unsupported")] == ["cuda_graph"]
    result = paired([*EAGER, *launched(2, 100, "gemm")], larger)
    assert not result.of("unsupported")


def test_captures_are_launched_in_the_order_in_which_they_were_made(paired: Paired) -> None:
    # Parts of one model: the layers between have other sizes and the same kernels.
    layers = []
    for place, (rows, names) in enumerate([(2, ("embed",)), (3, ("gemm",)), (5, ("gemm",)), (7, ("head",))]):
        start = 1000 * place
        layers += [
            begin(start),
            op("aten::mm", start + 10, 50, [tensor("float", rows, 8), MM[1]]),
            *(node(20 + place, start + 20, name) for name in names),
            end(start + 100),
        ]
    execution = [
        event
        for step in (0, 1)
        for place, name in enumerate(["embed", "gemm", "gemm", "head"])
        for event in launched(10 * step + place + 1, 5000 * step + 200 * place, name)
    ]
    result = paired(execution, layers)
    assert [record.argument("self").meta.sizes[0] for record in result.of("op")] == [2, 3, 5, 7, 2, 3, 5, 7]


@pytest.mark.slow
def test_kernels_that_overtake_each_other_are_told_by_name_and_some_may_be_missing(paired: Paired) -> None:
    many = [
        begin(0),
        *(
            event
            for place in range(120)
            for event in (
                op("aten::mm" if place % 2 else "aten::relu", 10 * place + 1, 8, MM if place % 2 else RELU),
                node(100 + place, 10 * place + 3, "gemm" if place % 2 else "relu"),
            )
        ),
        end(5000),
    ]
    names = ["gemm" if place % 2 else "relu" for place in range(120)]
    result = paired(launched(2, 100, *sorted(names), streams=(7, 8)), many)
    assert [name for name, _time in times(result)] == ["aten::relu", "aten::mm"] * 60
    assert times(result)[1] == ("aten::mm", 1_000) and times(result)[0] == ("aten::relu", 61_000)
    result = paired(launched(2, 100, *names[:-1]), many)
    assert len(result.ops) == 119 and told(result, "1 nodes of these graphs have no kernel")
    assert len(paired([*EAGER, *launched(2, 100, *names[:-5])], many).of("unsupported")) == 1


def test_launches_that_name_no_kernel_are_told_by_their_order_and_kind(paired: Paired) -> None:
    def copied(name: str) -> dict[str, Any]:
        return {**kernel(2, 160, 3, name, category="gpu_memcpy")}

    capture = [
        begin(0),
        op("aten::mm", 10, 20, MM),
        node(20, 15),
        op("aten::relu", 40, 20, RELU),
        node(21, 45, name="cudaMemcpyAsync"),
        end(100),
    ]
    result = paired([launch(2, 100, name="cudaGraphLaunch"), kernel(2, 150, 2, "gemm"), copied("Memcpy DtoD")], capture)
    assert times(result) == [("aten::mm", 2_000), ("aten::relu", 3_000)] and told(result, "by their order alone")
    result = paired(
        [*EAGER, launch(2, 100, name="cudaGraphLaunch"), kernel(2, 150, 2, "gemm"), kernel(2, 160, 2, "x")], capture
    )
    assert [record.argument("reason") for record in result.of("unsupported")] == ["cuda_graph"]


def test_work_of_a_graph_outside_of_operators_is_told_with_its_time(paired: Paired) -> None:
    capture = [*CAPTURE[:-1], node(30, 180, "triton_poi_fused_0"), end(200)]
    result = paired(launched(2, 100, "gemm", "add", "triton_poi_fused_0"), capture)
    (record,) = result.of("unsupported")
    assert (record.argument("reason"), record.device_duration_ns) == ("triton_launch", 3_000)


def test_the_tool_takes_graph_captures_for_profiler_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = trace(tmp_path / "capture.json", CAPTURE)
    execution = trace(tmp_path / "execution.json", launched(2, 100, "gemm", "add"))
    monkeypatch.setattr(
        "sys.argv",
        ["opreplay-import", str(execution), "-o", str(tmp_path / "a.opreplay"), f"--graph-capture={capture}"],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "2 kernels of 1 graph launches were given" in capsys.readouterr().out
    made = Written()
    made.node("aten::relu", RELU_SCHEMA, [Traced(1, 2, [3])], [Traced(4, 5, [3])])
    with pytest.raises(UsageError, match="--graph-capture is for profiler traces"):
        import_trace(made.save(tmp_path / "et.json"), tmp_path / "b.opreplay", graph_captures=[capture])
