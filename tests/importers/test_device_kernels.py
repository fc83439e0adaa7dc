"""The device kernels of a replay beside those of the trace: MATCH or DIFFERENT for each op."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from opreplay_tools.command import run_tool
from opreplay_tools.run import cli as run
from torch.profiler import ProfilerActivity, profile

from replayfmt.benchmark import profiling
from replayfmt.benchmark.profiling import (
    Launched,
    captured_kernels,
    check_device,
    compare_kernels,
    judge,
    kernels_of,
    replayed_kernels,
)
from replayfmt.errors import UsageError
from replayfmt.importers.kineto.importer import import_kineto
from replayfmt.replay.plan import Plan

from .conftest import Import
from .traces import ADD, MM, annotation, kernel, launch, op, trace

EVENTS = [
    op("aten::mm", 10, 10, MM),
    launch(1, 12),
    kernel(1, 100, 5, "gemm_a", grid=[4, 1, 1]),
    op("aten::add_", 30, 10, ADD),
    launch(2, 32),
    kernel(2, 110, 5, "add", grid=[1, 1, 1]),
    op("aten::_cudnn_init_dropout_state", 50, 10),
    launch(3, 52),
    kernel(3, 120, 5, "dropout"),
]


def stand_in(kernels: dict[str, list[str]], ordinals: dict[str, int]) -> Any:
    """A profiler that saw these kernels launched by the marked ops."""

    @contextmanager
    def tracing(path: str) -> Iterator[None]:
        yield
        events = []
        for place, (name, launched) in enumerate(kernels.items()):
            events.append(annotation(f"opreplay op {ordinals[name]}", 100 * place, 50))
            for number, each in enumerate(launched):
                events += [
                    launch(10 * place + number, 100 * place + 5 + number),
                    kernel(10 * place + number, 1000 + place, 2, each, grid=[4, 1, 1]),
                ]
        trace(Path(path), events)

    return tracing


def test_each_op_is_a_match_or_different_and_says_how(imported: Import) -> None:
    result = imported(EVENTS)
    ordinals = {result.name(each): each.ordinal for each in result.of("op")}
    with Plan(result.reader.path, ["cpu"], keep_going=True) as plan:
        verdicts = compare_kernels(
            plan, kernels_of(plan), stand_in({"aten::mm.default": ["gemm_a"], "aten::add_.Tensor": ["add"]}, ordinals)
        )
    assert [(each.op, each.verdict) for each in verdicts] == [
        ("aten::mm.default", "MATCH"),
        ("aten::add_.Tensor", "DIFFERENT"),
    ]
    assert str(verdicts[1]).startswith("DIFFERENT ordinal")
    assert "captured add grid [1, 1, 1]" in str(verdicts[1]) and "replayed add grid [4, 1, 1]" in str(verdicts[1])
    row = json.loads(json.dumps(verdicts[1].row()))
    assert row["verdict"] == "DIFFERENT" and row["captured"][0]["grid"] == [1, 1, 1]


def test_an_op_that_cannot_run_is_unknown_with_the_reason(imported: Import) -> None:
    result = imported(
        [
            op(
                "aten::miopen_convolution",
                10,
                10,
                [
                    ("float", [1, 3, 8, 8], [192, 64, 8, 1], ""),
                    ("float", [4, 3, 3, 3], [27, 9, 3, 1], ""),
                    ("", [], [], ""),
                    *(("ScalarList", [], [], "[1, 1]") for _ in range(3)),
                    *(("Scalar", [], [], text) for text in ("1", "False", "False")),
                ],
            ),
            launch(1, 12),
            kernel(1, 100, 5, "conv"),
        ]
    )
    with Plan(result.reader.path, ["cpu"], keep_going=True) as plan:
        (verdict,) = compare_kernels(plan, kernels_of(plan), stand_in({}, {}))
    assert verdict.verdict == "UNKNOWN" and "no kernel for cpu" in verdict.reason


def test_kernels_are_compared_as_often_as_they_ran_in_whatever_order() -> None:
    a, b = Launched("a", (1, 1, 1), (32, 1, 1)), Launched("b", (2, 1, 1))
    assert judge([a, b], [b, a]) == "MATCH"
    assert judge([a, b], [a]) == judge([a], [a, a]) == judge([a], [Launched("a", (2, 1, 1), (32, 1, 1))]) == "DIFFERENT"


def test_an_annotation_without_all_kernels_tells_nothing() -> None:
    assert captured_kernels(None) is None and captured_kernels({"import": "exact"}) is None
    assert captured_kernels({"device_kernels": [], "device_kernels_left_out": 3}) is None
    assert captured_kernels({"device_kernels": [{"name": "k", "grid": None, "block": None}]}) == (Launched("k"),)


def test_work_without_a_mark_belongs_to_no_op(tmp_path: Path) -> None:
    events = [annotation("opreplay op 7", 100, 50), launch(1, 10), kernel(1, 20, 2), launch(2, 110), kernel(2, 120, 2)]
    assert list(replayed_kernels(trace(tmp_path / "t.json", events))) == [7]


def test_a_replay_without_a_device_and_a_capture_without_kernels_are_refused(imported: Import) -> None:
    with (
        Plan(imported(EVENTS).reader.path, ["cpu"], keep_going=True) as plan,
        pytest.raises(UsageError, match="no accelerator"),
    ):
        check_device(plan)
    with (
        Plan(imported([op("aten::mm", 10, 10, MM)]).reader.path, keep_going=True) as plan,
        pytest.raises(UsageError, match="has no device kernels"),
    ):
        kernels_of(plan)


def test_run_has_a_flag_for_it_that_needs_a_device(
    imported: Import, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = imported(EVENTS)
    ordinals = {result.name(each): each.ordinal for each in result.of("op")}
    tracing = stand_in({"aten::mm.default": ["gemm_a"], "aten::add_.Tensor": ["add"]}, ordinals)
    monkeypatch.setattr(sys, "argv", ["opreplay-run", "--compare-kernels", "--device=cpu", result.reader.path])
    with pytest.raises(SystemExit) as refused:
        run_tool(run)
    said = capsys.readouterr()
    assert refused.value.code == 2 and "no accelerator" in said.err and not said.out, "before anything runs"
    monkeypatch.setattr(profiling, "check_device", lambda _plan: None)
    compare = profiling.compare_kernels
    monkeypatch.setattr(profiling, "compare_kernels", lambda plan, captured: compare(plan, captured, tracing))
    with pytest.raises(SystemExit):
        run_tool(run)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:9].strip() for line in printed if "ordinal" in line and "finding" not in line][-2:] == [
        "MATCH",
        "DIFFERENT",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trace_made_here_matches_its_replay_here(tmp_path: Path) -> None:
    x, weight = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    torch.mm(x, weight).relu_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        torch.mm(x, weight).relu_()
        torch.cuda.synchronize()
    source, out = tmp_path / "trace.json", tmp_path / "out.opreplay"
    profiler.export_chrome_trace(str(source))
    import_kineto(source, out)
    with Plan(out, keep_going=True) as plan:
        verdicts = compare_kernels(plan, kernels_of(plan))
    assert [each.verdict for each in verdicts] == ["MATCH", "MATCH"], [str(each) for each in verdicts]
    assert profiling.FLAG == "--compare-kernels"
