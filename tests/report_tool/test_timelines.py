"""The timelines: a replay as its trace has it, and isolated calls in capture order, beside the capture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump.captures import SESSION, STRIDED, Builder
from in_process import Tools

import replayfmt
from replayfmt.errors import UsageError
from replayfmt.format.codes import DType, OpStatus, RecordKind, ValueKind
from replayfmt.format.model import Device, Kernel, Node, Signature, TensorMeta
from replayfmt.format.reader import CaptureReader, open_capture
from replayfmt.importers.importing import import_trace
from replayfmt.report.measurements import IsolatedTimes, MeasuredCalls, Measurements, read_isolated
from replayfmt.report.ops import captured_ops
from replayfmt.report.timelines import (
    Lane,
    NameTable,
    ReplayedTrace,
    captured_lanes,
    isolated_lanes,
    replayed_lanes,
    timeline_of,
)

from .conftest import Measured, tool

Event = dict[str, Any]


def op(name: str, start: float, duration: float, tid: object = 7, kind: str = "cpu_op", **args: object) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


def traced(reader: CaptureReader, path: Path, *events: Event) -> tuple[list[Lane], list[str]]:
    path.write_text(json.dumps({"traceEvents": events}))
    names = NameTable()
    return replayed_lanes(ReplayedTrace(str(path), reader), reader, names), names.all()


def bars(lane: Lane, names: list[str]) -> list[tuple[str, int, int]]:
    return [
        (names[name], start, taken)
        for name, start, taken in zip(lane.name.tolist(), lane.start.tolist(), lane.taken.tolist(), strict=True)
    ]


def test_a_replays_timeline_has_its_scopes_and_each_op_once_however_many_operators_it_calls(measured: Measured) -> None:
    with open_capture(measured.capture) as reader:
        names = NameTable()
        lanes = {each.label: each for each in replayed_lanes(ReplayedTrace(str(measured.trace), reader), reader, names)}
        ops = captured_ops(reader)
        captured = [reader.kernels[kernel].qualified_name for kernel in ops.kernel.tolist()]
    assert list(lanes) == ["thread 0, scopes", "thread 0, scopes inside, 1", "thread 0, host"]
    assert [name for name, _start, _taken in bars(lanes["thread 0, scopes"], names.all())] == ["step"] * 3
    host = sorted(bars(lanes["thread 0, host"], names.all()), key=lambda each: each[1])
    assert [name for name, _start, _taken in host] == captured
    begin = lanes["thread 0, scopes"].start
    ends = begin + lanes["thread 0, scopes"].taken
    for _name, start, taken in host:
        assert any(first <= start and start + taken <= last for first, last in zip(begin, ends, strict=True))


def test_threads_streams_and_what_is_inside_what_are_told_apart_in_a_trace(measured: Measured, tmp_path: Path) -> None:
    with open_capture(measured.capture) as reader:
        lanes, names = traced(
            reader,
            tmp_path / "trace.json",
            op("aten::mm", 10, 5),
            op("aten::empty", 11, 1),  # called by the product
            op("aten::add", 20, 2, tid=9),
            op("step", 9, 30, kind="user_annotation"),
            op("step/forward", 9, 7, kind="user_annotation"),
            op("gemm", 40, 8, tid=20, kind="kernel", device=0, stream=20),
            op("Memcpy HtoD", 41, 3, tid=21, kind="gpu_memcpy", device=0, stream=21),
            op("cudaLaunchKernel", 12, 1, kind="cuda_runtime"),
            {"ph": "X", "cat": "cpu_op", "name": "without a time", "ts": "x", "dur": 1},
            op("too late for 64 bits", 5e17, 1),
            op("lasts too long for them", 12, 10**400),
        )
    assert {lane.label: bars(lane, names) for lane in lanes} == {
        "thread 0, scopes": [("step", 9000, 30000)],
        "thread 0, scopes inside, 1": [("step/forward", 9000, 7000)],
        "thread 0, host": [("aten::mm.default", 10000, 5000)],
        "thread 1, host": [("aten::add.Tensor", 20000, 2000)],
        "device 0, stream 20": [("gemm", 40000, 8000)],
        "device 0, stream 21": [("Memcpy HtoD", 41000, 3000)],
    }
    assert all(not lane.site.any() and (lane.ordinal == -1).all() for lane in lanes), "the trace names no records"


def test_isolated_calls_follow_each_other_and_take_what_the_benchmark_says(measured: Measured) -> None:
    document = json.loads(measured.per_op.read_text())
    with open_capture(measured.capture) as reader:
        ops, names = captured_ops(reader), NameTable()
        times = read_isolated("x", document)
        lanes, without = isolated_lanes(ops, np.arange(len(ops)), reader, names, times)
    assert not without and [each.label for each in lanes] == [
        "thread 0, scopes", "thread 0, scopes inside, 1", "thread 0, host",
    ]  # fmt: skip
    outer, _inner, host = lanes
    assert host.ordinal.tolist() == ops.ordinal.tolist() and host.start[0] == 0
    assert (host.start[1:] == (host.start + host.taken)[:-1]).all()
    total = sum(row["estimated_us"] for row in document["benchmarks"]) * 1e3
    assert (host.start + host.taken)[-1] == pytest.approx(total, abs=1)
    assert outer.taken.sum() == (host.start + host.taken)[-1], "all ops are in scopes, and scopes hold nothing else"


def test_an_op_that_nobody_measured_takes_no_room_among_isolated_calls_and_is_counted(measured: Measured) -> None:
    with open_capture(measured.capture) as reader:
        ops, names = captured_ops(reader), NameTable()
        known = Measurements(by_kernel={"aten::mm.default": MeasuredCalls(calls=3, total_ns=3000.0)})
        lanes, without = isolated_lanes(ops, np.zeros(len(ops), np.int64), reader, names, IsolatedTimes(known))
    assert bars(lanes[-1], names.all()) == [("aten::mm.default", 1000 * place, 1000) for place in range(3)]
    assert without == len(ops) - 3


def test_isolated_calls_are_in_the_lanes_of_their_devices_and_stand_for_all_calls_of_a_record(tmp_path: Path) -> None:
    b = Builder(tmp_path / "a.opreplay", SESSION)
    devices = [b.writer.device(Device("cpu")), b.writer.device(Device("cuda", 0))]
    metas = [b.writer.meta(TensorMeta(DType.float32, STRIDED, each, (4,), (1,))) for each in devices]
    kernel = b.writer.kernel(Kernel("a::b", "default", "a::b() -> Tensor"))
    call = Signature(RecordKind.op, (), (Node(ValueKind.tensor, "out"),), kernel, OpStatus.ok)
    for device, meta in zip(devices, metas, strict=True):
        b.record(call, [b.tensor(b.storage(16, device), meta)])
    b.frame()
    path = b.close()
    known = Measurements(by_kernel={"a::b.default": MeasuredCalls(calls=6, total_ns=420.0)})
    with open_capture(path) as reader:
        ops, names = captured_ops(reader), NameTable()
        ops.calls[1] = 5
        host, device = isolated_lanes(ops, np.zeros(2, np.int64), reader, names, IsolatedTimes(known))[0]
        assert all("cuda" not in each.label for each in captured_lanes(ops, np.zeros(2, np.int64), reader, names))
    assert (host.label, bars(host, names.all())) == ("thread 0, host", [("a::b.default", 0, 70)])
    assert (device.label, bars(device, names.all())) == ("cuda:0, default stream", [("a::b.default", 70, 350)])


def test_a_trace_without_work_and_that_of_another_capture_are_refused_in_one_line(
    measured: Measured, tmp_path: Path, tools: Tools
) -> None:
    (nothing := tmp_path / "nothing.json").write_text(json.dumps({"traceEvents": [op("x", 1, 1, kind="Trace")]}))
    (other := tmp_path / "other.json").write_text(
        json.dumps({"opreplay_capture_session": "other", "traceEvents": [op("x", 1, 1)]})
    )
    (broken := tmp_path / "broken.json").write_text("no JSON")
    with open_capture(measured.capture) as reader, pytest.raises(UsageError, match="no operators, scopes or kernels"):
        traced(reader, nothing, op("x", 1, 1, kind="Trace"))
    for path, said in (
        (nothing, "no operators, scopes or kernels"), (other, "another capture"), (broken, "not JSON"),
        (tmp_path / "none.json", "none.json"),
    ):  # fmt: skip
        done = tools("report", f"--replayed={path}", "-o", tmp_path / "r.html", measured.capture)
        assert done.code in (2, 3) and said in done.err and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "r.html").exists()
    assert tool("report", f"--replayed={measured.trace}", "-o", tmp_path / "r.html", measured.capture) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_a_gpu_are_in_the_lanes_of_their_streams(tmp_path: Path, tools: Tools) -> None:
    path, trace, results = tmp_path / "a.opreplay", tmp_path / "trace.json", tmp_path / "per_op.json"
    weight = torch.ones(512, 512, device="cuda")
    with replayfmt.capture(path), replayfmt.scope("step"):
        _kept = (weight @ weight).relu()
    traced_with = ("--device-profiling-mode=host-ops,device-kernels", f"--device-profiling-output={trace}")
    assert tools("run", *traced_with, path).code == 0
    assert tools("benchmark", "--per-op", f"--benchmark-out={results}", path).code == 0
    with open_capture(path) as reader:
        ops, names = captured_ops(reader), NameTable()
        replayed = replayed_lanes(ReplayedTrace(str(trace), reader), reader, names)
        times = read_isolated("x", json.loads(results.read_text()))
        isolated, without = isolated_lanes(ops, np.zeros(len(ops), np.int64), reader, names, times)
    (stream,) = (lane for lane in replayed if lane.label.startswith("device 0, stream "))
    assert len(stream.start) >= 2 and (stream.taken > 0).all()
    assert not without and [lane.label for lane in isolated] == ["thread 0, scopes", "cuda:0, default stream"]
    page = ("report", f"--replayed={trace}", f"--benchmark={results}", "-o", tmp_path / "report.html", path)
    assert tools(*page).code == 0


def test_queued_kernels_are_drawn_from_when_the_device_began_with_them(tmp_path: Path) -> None:
    factors = {"Input Dims": [[4, 8], [8, 3]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
    host, device = {"ph": "X", "pid": 1, "tid": 1, "dur": 5}, {"ph": "X", "pid": 0, "tid": 7, "dur": 1500}
    events = []
    for place in range(4):
        about = {"correlation": place + 1}
        events += [
            {**host, "cat": "cpu_op", "name": "aten::mm", "ts": 10 * place, "args": {**factors}},
            {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 10 * place + 1, "dur": 1, "args": about},
            {
                **device,
                "cat": "kernel",
                "name": "k",
                "ts": 100 + 1500 * place,
                "args": {**about, "stream": 7, "device": 0},
            },
        ]
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    import_trace(tmp_path / "trace.json", tmp_path / "out.opreplay")
    with open_capture(tmp_path / "out.opreplay") as reader:
        ops, names = captured_ops(reader), NameTable()
        lanes = captured_lanes(ops, np.zeros(len(ops), np.int64), reader, names)
    (lane,) = [each for each in lanes if each.label.startswith("cuda:0")]
    assert lane.label == "cuda:0, stream 7"
    assert bars(lane, names.all()) == [
        ("aten::mm.default", (100 + 1500 * place) * 1000, 1_500_000) for place in range(4)
    ]
    assert len(ops.only(ops.ordinal[:1]).kernels) == 1


# -------------------------------------------------------------------------------------------------------------- pauses


def lane(*bars: tuple[int, int], scopes: bool = False) -> Lane:
    start, taken = np.array(bars, np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(start), np.int64)
    return Lane("scopes" if scopes else "ops", scopes, start, taken, zeros, zeros, zeros)


def test_a_long_time_without_an_op_has_little_room_and_all_else_the_room_of_its_time() -> None:
    second = 10**9
    ops = lane((5, 100), (105, 50), (20 * second, 100), (20 * second + 130, 20))
    timeline = timeline_of([lane((5, 30 * second), scopes=True), ops], NameTable())
    assert [each.taken_ns for each in timeline.pauses] == [20 * second - 155, 10 * second + 5 - 150]
    assert timeline.bars.start.tolist()[:2] == [0, 100], "and short times between ops stay"
    (first, last) = timeline.pauses
    assert first.start == 150 and 150 < first.end < 200
    assert (timeline.bars.start - first.end).tolist()[2:] == [0, 130]
    assert (timeline.bars.end - timeline.bars.start).tolist() == [100, 50, 100, 20]
    assert (last.start, last.end) == (first.end + 150, int(timeline.scopes.end[0]))
    assert last.end < 2 * 270, "most of the picture is ops"


def test_ops_without_long_pauses_stand_as_they_ran() -> None:
    timeline = timeline_of([lane((0, 10), (11, 10), (22, 10)), lane((0, 34), scopes=True)], NameTable())
    assert timeline.pauses == [] and timeline.bars.start.tolist() == [0, 11, 22]
    assert timeline_of([lane((7, 0), (90, 0))], NameTable()).bars.start.tolist() == [0, 83], "no op takes any time"


@pytest.mark.parametrize("steps", [2, 100])
def test_steps_between_which_a_program_waits_are_half_of_the_picture_at_least(steps: int) -> None:
    ops = lane(*[(step * 10**6 + each * 10, 10) for step in range(steps) for each in range(8)])
    timeline = timeline_of([ops], NameTable())
    assert len(timeline.pauses) == steps - 1
    assert int(timeline.bars.end[-1]) <= 2 * 80 * steps
    ends, starts = timeline.bars.end.tolist()[:-1], timeline.bars.start.tolist()[1:]
    assert sum(start > end for end, start in zip(ends, starts, strict=True)) == steps - 1


def test_the_longest_of_very_many_pauses_have_little_room() -> None:
    ops = lane(*[(step * 10**6 + (step >= 500) * 10**9, 1000) for step in range(2000)])
    timeline = timeline_of([ops], NameTable())
    assert len(timeline.pauses) == 200 and max(each.taken_ns for each in timeline.pauses) > 10**9
    assert (np.diff(timeline.bars.start) > 0).all()
