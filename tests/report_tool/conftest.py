"""A capture with what was measured of it, and one whose names would do harm if they became markup."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from dump.captures import SESSION, STRIDED, Builder

import replayfmt
from replayfmt.format.codes import DType, KernelKind, OpStatus, RecordKind, ValueKind
from replayfmt.format.model import CaptureInfo, Device, Kernel, Node, Signature, TensorMeta

HOSTILE = "</script><img src=x onerror=window.harmed=1>"


@dataclass(frozen=True)
class Measured:
    """Files of one capture: whole replays, single ops, the ops an hour earlier, energy, a replay's trace."""

    capture: Path
    whole: Path
    per_op: Path
    earlier: Path
    energy: Path
    trace: Path


def tool(name: str, *arguments: object) -> int:
    """Run a tool in this process; returns its exit code."""
    before, sys.argv = sys.argv, [f"opreplay-{name}", *map(str, arguments)]
    try:
        importlib.import_module(f"opreplay_tools.{name}").main()
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("a tool exits")


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("measured")
    names = ("step.opreplay", "whole.json", "per_op.json", "earlier.json", "energy.json", "trace.json.gz")
    made = Measured(*(folder / name for name in names))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with replayfmt.capture(made.capture):
            for step in range(3):
                with replayfmt.scope("step"), replayfmt.scope("forward"):
                    kept = torch.mm(torch.ones(16, 32), torch.ones(32, 8)).mul(step + 0.5).add_(1.0).relu()
                    for width in range(1, 16):
                        torch.ones(width).add(1)
        del kept  # the digests of the scopes' ends are there to compare with
    finally:
        torch.set_num_threads(threads)
    shared = ("--benchmark-min-time=6x", made.capture)
    roof = ("--per-op", "--roofline", "--peak-flops=1T", "--peak-bandwidth=100G")
    assert tool("benchmark", f"--benchmark-out={made.whole}", *shared) == 0
    assert tool("benchmark", f"--benchmark-out={made.per_op}", *roof, *shared) == 0
    traced = ("--device-profiling-mode=host-ops", f"--device-profiling-output={made.trace}")
    assert tool("run", *traced, made.capture) == 0
    earlier = json.loads(made.per_op.read_text())
    for row in earlier["benchmarks"]:  # the same work, in a tenth of the time
        times = ("median_real_time", "estimated_us")
        for name in (f"{each}{end}" for each in times for end in ("", "_low", "_high")):
            row[name] /= 10
        row["samples"]["real_time"] = [each / 10 for each in row["samples"]["real_time"]]
    made.earlier.write_text(json.dumps(earlier))
    made.energy.write_text(json.dumps(energy_of(json.loads(made.per_op.read_text()))))
    return made


def energy_of(per_op: dict[str, object]) -> dict[str, object]:
    """A report as opreplay-energy writes it: a joule for each call, and of the product none, with a reason."""
    rows = per_op["benchmarks"]
    assert isinstance(rows, list)
    kernels = []
    for row in rows:
        known = "aten::mm" not in row["name"]
        kernels.append(
            {
                "name": row["name"].removeprefix("BM_op/"),
                "kernel": row["op"],
                "class": "",
                "count": row["count"],
                "runs": 10,
                "seconds_per_call": 0.1,
                "samples": 20,
                "gaps": 0,
                "mean_watts": 10.0,
                "method": "trapezoid rule",
                "joules_per_call": 1.0 if known else None,
                "error_joules_per_call": 0.1 if known else None,
                "joules_per_run": float(row["count"]) if known else None,
                "reason": None if known else "too few samples",
            }
        )
    part = {"runs": 4, "joules": 400.0, "error_joules": 4.0, "seconds": 10.0, "samples": 99, "gaps": 0,
            "joules_from_power": None, "method": "trapezoid rule"}  # fmt: skip
    whole = {"name": "whole", **part, "joules_per_run": 100.0, "mean_watts": 40.0, "reason": None}
    nothing = {"name": "idle", **part, "joules": None, "error_joules": None, "joules_per_run": None}
    return {
        "schema_version": 2,
        "context": per_op["context"],
        "method": "trapezoid rule",
        "power_log": {
            "path": "power.csv", "source": None, "counters": [],
            "gpus": ["0"], "rows": 9, "left_out": {}, "out_of_order": 0, "same_time": 0, "interval_s": 0.04,
            "resolution_w": 0.1, "averaging_s": None, "clock_offset_s": 0.0, "clock": "as it is",
        },
        "idle": {**nothing, "mean_watts": None, "reason": "the log ends before"},
        "whole_model": whole,
        "program": None,
        "scopes": [],
        "isolated_kernels": {
            "distinct": len(kernels), "measured": len(kernels) - 1, "unmeasurable": 1, "not_run": 0,
            "predicted_joules_per_run": 60.0, "predicted_error_joules": 1.0, "estimated_joules_of_the_rest": None,
            "without_estimate": 0, "share_of_calls": 0.9, "share_of_time": 0.9,
        },
        "comparison": {
            "whole_joules_per_run": 100.0, "predicted_joules_per_run": 60.0, "error_joules": -40.0,
            "error_percent": -40.0, "ratio": 0.6, "reason": None,
        },
        "by_class": {},
        "kernels": kernels,
        "warnings": ["it was hot"],
    }  # fmt: skip


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever may be named by whoever made the capture is named to do harm."""
    session = CaptureInfo(
        SESSION.session_id, HOSTILE, HOSTILE, argv=(HOSTILE, "\ud800{{ 7 * 7 }}"), cpu=HOSTILE, host=HOSTILE
    )
    b = Builder(tmp_path_factory.mktemp("hostile") / "x<script>alert(1)<.opreplay", session)
    device = b.writer.device(Device("cpu", -1, HOSTILE))
    meta = b.writer.meta(TensorMeta(DType.float32, STRIDED, device, (4,), (1,)))
    kernel = b.writer.kernel(Kernel(f"a::{HOSTILE}", HOSTILE, f"a::b({HOSTILE})", KernelKind.collective))
    scope = b.writer.scope(0, HOSTILE + "'\"`{{7*7}}")
    text = Node(ValueKind.string, HOSTILE, HOSTILE)
    results = (Node(ValueKind.tensor, "out"),)
    b.record(Signature(RecordKind.scope_begin, (Node(ValueKind.string, "name", HOSTILE),)), scope=scope)
    for _ in range(3):
        tensor = b.tensor(b.storage(16, device), meta)
        b.record(Signature(RecordKind.op, (text,), results, kernel, OpStatus.ok), [tensor], scope=scope)
    b.record(Signature(RecordKind.scope_end, (Node(ValueKind.string, "name", HOSTILE),)), scope=scope)
    b.frame()
    return b.close()
