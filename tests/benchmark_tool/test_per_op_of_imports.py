"""--per-op of imported traces: it begins at once, makes contents op by op, and lets go of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Tools

import replayfmt
from replayfmt.benchmark.per_op.measuring import measure_ops
from replayfmt.benchmark.per_op.op_report import describe
from replayfmt.benchmark.per_op.results import MeasuredOp, OpOptions, PerOpRun
from replayfmt.benchmark.statistics import parse_min_time
from replayfmt.importers.importing import import_trace
from replayfmt.replay.plan import Plan
from replayfmt.replay.planning.synthesis import Synthesis


def call(name: str, start: int, *sizes: list[int]) -> dict[str, Any]:
    strides = [[size[1], 1] for size in sizes]
    args = {
        "Input type": ["float"] * len(sizes),
        "Input Dims": list(sizes),
        "Input Strides": strides,
        "Concrete Inputs": [""] * len(sizes),
    }
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 5, "args": args}


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    events = []
    for step in range(20):
        events += [
            call("aten::mm", 30 * step, [4, 8], [8, 3]),
            call("aten::relu", 30 * step + 10, [4, 6]),
            call("aten::mm", 30 * step + 20, [5, 8], [8, 3]),
        ]
    source = tmp_path / "trace.json"
    source.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    import_trace(source, tmp_path / "t.opreplay", level="leaf")
    return tmp_path / "t.opreplay"


def measured(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[PerOpRun, list[int], Plan]:
    """The run, how many storages were filled by the time each op was measured, and the plan."""
    filled: list[int] = []
    at: list[int] = []
    fill = Synthesis.fill

    def count(self: Synthesis, storage: int, version: int, target: torch.UntypedStorage) -> None:
        filled.append(storage)
        fill(self, storage, version, target)

    monkeypatch.setattr(Synthesis, "fill", count)

    def report(_op: MeasuredOp, _place: int, _of: int) -> None:
        at.append(len(filled))

    plan = Plan(path, devices=["cpu"], keep_going=True)
    run = measure_ops(
        plan,
        OpOptions(min_time=parse_min_time("2x"), **options),
        on_measured=report,
        progress=lambda what, done, of: None,
    )
    at.append(len(filled))
    return run, at, plan


def test_each_distinct_op_is_measured_once_its_own_content_is_made(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at, plan = measured(capture, monkeypatch)
    assert at == [2, 3, 5, 5], "two matrices, one tensor, two matrices; nothing for the other 57 calls"
    assert run.successful == 3 and [op.group.count for op in run.ops] == [20, 20, 20]
    assert run.verified.startswith("not verified: the content of")
    assert not plan._content._kept, "contents are let go of"


@pytest.mark.slow
def test_verbose_shows_what_was_replayed_and_where(
    capture: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, _at, plan = measured(capture, monkeypatch)
    lines = list(describe(run.ops[0], plan.reader))
    assert lines[-1] == "    replayed 0: float32[4,3] on cpu"
    with replayfmt.capture(tmp_path / "c.opreplay"):
        x = torch.arange(12.0).reshape(3, 4)
        x.max(0)
        x.split(2)
        x.sum().item()
        x.add_(1)
    run, _at, plan = measured(tmp_path / "c.opreplay", monkeypatch)
    returned = {op.group.kernel.name: op.returned for op in run.ops}
    assert returned["aten::max"] == ("float32[4] on cpu", "int64[4] on cpu")
    assert returned["aten::split"] == ("float32[2,4] on cpu", "float32[1,4] on cpu")
    assert returned["aten::_local_scalar_dense"] == ("66.0",)
    assert returned["aten::add_"] == ("float32[3,4] on cpu",)


@pytest.mark.slow
def test_every_instance_is_run_where_that_is_asked_for(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, at, _plan = measured(capture, monkeypatch, every=True)
    assert run.successful == 60 and at[0] == 2 and at[-1] == 100


@pytest.mark.slow
def test_another_instance_is_taken_where_the_first_cannot_be_run(
    capture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Synthesis.missing
    first = next(each.storage for each in Plan(capture, devices=["cpu"], keep_going=True).synthesis.initialized)
    monkeypatch.setattr(
        Synthesis,
        "missing",
        lambda self, storage, version: "it is not there" if storage == first else missing(self, storage, version),
    )
    run, _at, _plan = measured(capture, monkeypatch)
    assert [op.times is not None for op in run.ops] == [True] * 3
    assert run.ops[0].ordinal != run.ops[0].group.first_ordinal


def test_results_of_another_shape_are_found_though_nothing_is_verified_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [4]
    with torch.library._scoped_library("per_op_imports", "FRAGMENT") as library:
        library.define("shape(Tensor x) -> Tensor")
        library.impl("shape", lambda x: torch.zeros(sizes[0]), "CPU")
        with replayfmt.capture(tmp_path / "c.opreplay", payload="none"):
            kept = torch.ops.per_op_imports.shape(torch.ones(2))
        assert kept.shape == (4,)
        sizes[0] = 3
        run, _at, _plan = measured(tmp_path / "c.opreplay", monkeypatch)
    assert {op.group.kernel.name: op.verdict for op in run.ops}["per_op_imports::shape"] in ("failed", "mismatched")
    assert run.failed == 1


@pytest.mark.parametrize("rows", [1 << 40, 1 << 34])
@pytest.mark.parametrize(("tool", "flag"), [("benchmark", "--per-op"), ("run", "--keep-going")])
def test_an_op_whose_inputs_cannot_be_allocated_is_refused_alone(
    tools: Tools, tmp_path: Path, rows: int, tool: str, flag: str
) -> None:
    """Ops before it, after it, and on inputs of their own are run."""
    events = [
        call("aten::mm", 0, [4, 8], [8, 3]),
        call("aten::relu_", 10, [rows, 4]),
        call("aten::relu", 20, [rows, 4]),
        call("aten::relu", 30, [4, 6]),
    ]
    source, path = tmp_path / "trace.json", tmp_path / "t.opreplay"
    source.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    import_trace(source, path, level="leaf")
    shorter = ["--benchmark-min-time=1x"] if tool == "benchmark" else []
    ran = tools(tool, flag, *shorter, path)
    assert ran.code == 1
    refused = [line for line in ran.out.splitlines() if "cannot be put in place: it takes" in line and "aten::" in line]
    assert len(refused) == 2 and all("refused" in line for line in refused)
    wanted = "attempted 2 = 2 successful + 0 failed; refused 2" if tool == "benchmark" else "verdicts: 2 ok, 2 refused"
    assert wanted in ran.out
