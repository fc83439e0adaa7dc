"""How much of a trace's device time its calls stand for, and what the rest is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import Tools

from replayfmt.importers.importing import import_trace

from .conftest import Import
from .traces import ADD, MM, SHARED, annotation, kernel, launch, op, trace

EVENTS = [
    annotation("ProfilerStep#0", 0, 200),
    op("aten::mm", 10, 10, MM),
    launch(1, 12),
    kernel(1, 30, 40),
    op("aten::mm", 30, 10, MM),
    launch(2, 32),
    kernel(2, 80, 60),
    op("gone::nowhere", 50, 5, MM),
    launch(3, 52),
    kernel(3, 150, 7),
    launch(4, 70, name="cudaGraphLaunch"),
    kernel(4, 200, 11),
    kernel(4, 212, 12),
    launch(5, 80),
    kernel(5, 230, 5, "memset"),
    kernel(999, 300, 100, "from before"),
]


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("level", ["launching", "root", "leaf"])
def test_the_calls_share_of_the_device_time_and_the_rest_by_reason(unique: bool, level: str, imported: Import) -> None:
    report = imported(EVENTS, level=level, unique=unique).report
    (row, *_ops) = report.rows()
    assert row["device_time"] == {
        "total_ns": 235_000,
        "rewritten_ns": 0,
        "calls_ns": 100_000,
        "untimed": 0,
        "rest_ns": {"lost": 100_000, "cuda_graph": 23_000, "no_schema": 7_000, "outside_operator": 5_000},
    }
    lines = [line for line in report.lines() if line.startswith("device ") and "work" not in line]
    assert lines == [
        "device time   235.0 us in the trace; the calls account for 100.0 us (42.6%)",
        "device rest   100.0 us (42.6%): launches that the trace does not show",
        "device rest   23.0 us (9.8%): graph launches",
        "device rest   7.0 us (3.0%): operators unknown here",
        "device rest   5.0 us (2.1%): kernels without an operator",
    ]


def test_work_without_a_duration_is_said_and_counted_nowhere(imported: Import) -> None:
    untimed: dict[str, Any] = kernel(1, 60, 5)
    del untimed["dur"]
    report = imported(
        [
            op("aten::mm", 10, 10, MM),
            launch(1, 12),
            kernel(1, 30, 40),
            untimed,
            op("aten::add_", 30, 10, ADD),
            launch(2, 32),
            kernel(2, 80, 10),
        ]
    ).report
    (row, *_ops) = report.rows()
    assert row["device_time"] == {
        "total_ns": 50_000,
        "rewritten_ns": 0,
        "calls_ns": 10_000,
        "untimed": 1,
        "rest_ns": {"untimed": 40_000},
    }
    assert "device rest   1 kernels and copies without a duration, counted nowhere" in list(report.lines())


def test_a_trace_without_device_work_says_so(imported: Import, tmp_path: Path) -> None:
    report = imported([op("aten::mm", 10, 10, MM)]).report
    assert next(report.rows())["device_time"] is None
    assert "device time   the trace has none" in list(report.lines())


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="the traces of other tools are not here")
@pytest.mark.parametrize(
    ("name", "share", "rest"),
    [
        ("h100_bert_small_inference", 1.0, None),
        ("mi300_vllm_decode", 0.03, "cuda_graph"),
        ("torch_compile_triton", 0.933, "triton_launch"),
        ("mi300_resnet_ddp_checkpoint_train", 0.21, "collective"),
    ],
)
def test_the_parts_of_real_traces_add_up(name: str, share: float, rest: str | None, tmp_path: Path) -> None:
    report = import_trace(SHARED / "kineto" / f"{name}.json.gz", tmp_path / "t.opreplay", unique=True)
    calls, others = report.device_shares()
    assert report.device_time is not None
    assert calls + sum(others.values()) == report.device_time.total_ns
    assert calls / report.device_time.total_ns == pytest.approx(share, abs=0.01)
    assert next(iter(others), None) == rest


def test_a_benchmark_says_how_much_of_the_whole_traces_device_time_it_measured(tools: Tools, tmp_path: Path) -> None:
    path, out = trace(tmp_path / "trace.json", EVENTS), tmp_path / "out.opreplay"
    assert tools("import", path, "-o", out)[0] == 0
    _code, printed, _err = tools(
        "benchmark", "--per-op", "--device=cpu", "--benchmark-min-time=1x", "--benchmark-format=json", out
    )
    context = json.loads(printed)["context"]
    assert context["traced_device_us"] == 235.0 and context["measured_captured_device_us"] == 100.0
    _code, printed, _err = tools("benchmark", "--per-op", "--device=cpu", "--benchmark-min-time=1x", out)
    assert "42.6% of the" in printed and "of the whole trace" in printed
