"""Calls tried without data: one trial answers for all calls whose sizes have the same pattern, and answers right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replayfmt.format.codes import DType, MemoryFormat
from replayfmt.importers.common import results
from replayfmt.importers.common.arguments import TensorSpec
from replayfmt.importers.common.results import Results, Trials, infer
from replayfmt.pytorch.overloads import find_overload

from .traces import op, trace
from .traces import tensor as traced

Arguments = Sequence[tuple[str, Any]]


def schema(name: str, overload: str = "default") -> Any:
    found = find_overload(f"aten::{name}", overload)
    assert found is not None
    return found._schema


def tensor(*sizes: int, strides: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(DType.float32, sizes, strides)


CALLS: list[tuple[Any, Arguments]] = [
    (schema("add", "Tensor"), [("self", tensor(4, 6)), ("other", tensor(4, 6))]),
    (schema("add", "Tensor"), [("self", tensor(6, 1, 1)), ("other", tensor(2, 3))]),
    (schema("add", "Tensor"), [("self", tensor(7, 1, 1)), ("other", tensor(2, 3))]),
    (schema("add", "Tensor"), [("self", tensor(4, 6)), ("other", tensor(4, 5))]),
    (schema("add_", "Tensor"), [("self", tensor(1, 6)), ("other", tensor(4, 6))]),
    (schema("mul", "Tensor"), [("self", tensor(4, 6, strides=(1, 4))), ("other", tensor(4, 6))]),
    (schema("mul", "Tensor"), [("self", tensor(4, 6, strides=(0, 1))), ("other", tensor(4, 6))]),
    (schema("relu"), [("self", tensor(0, 3))]),
    (schema("mm"), [("self", tensor(4, 8)), ("mat2", tensor(8, 16))]),
    (schema("mm"), [("self", tensor(4, 8)), ("mat2", tensor(8, 16, strides=(1, 8)))]),
    (schema("mm"), [("self", tensor(4, 8)), ("mat2", tensor(9, 16))]),
    (schema("matmul"), [("self", tensor(2, 4, 8)), ("other", tensor(8, 3))]),
    (schema("sum", "dim_IntList"), [("self", tensor(2, 4, 8)), ("dim", [1]), ("keepdim", True)]),
    (schema("sum", "dim_IntList"), [("self", tensor(2, 4, 8)), ("dim", [3]), ("keepdim", True)]),
    (schema("transpose", "int"), [("self", tensor(2, 4, 8)), ("dim0", 0), ("dim1", 2)]),
    (schema("clone"), [("self", tensor(36, 3, 4, 12)), ("memory_format", MemoryFormat.channels_last)]),
]


@pytest.mark.parametrize(
    ("called", "arguments"), CALLS, ids=[f"{place} {each[0].name}" for place, each in enumerate(CALLS)]
)
def test_what_a_pattern_tells_is_what_a_trial_tells(called: Any, arguments: Arguments) -> None:
    trials = Trials()
    others = [
        (
            name,
            tensor(*(3 * size if size > 1 else size for size in value.sizes))
            if isinstance(value, TensorSpec) and value.strides is None
            else value,
        )
        for name, value in arguments
    ]
    trials.of(called, others)  # of the same pattern, if it has one
    assert trials.of(called, arguments) == infer(called, arguments)


def test_calls_of_one_pattern_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def counted(called: Any, arguments: Arguments) -> Results:
        tried.append(called.name)
        return infer(called, arguments)

    monkeypatch.setattr(results, "infer", counted)
    trials = Trials()
    for size in range(2, 200):
        found = trials.of(schema("mm"), [("self", tensor(size, 500)), ("mat2", tensor(500, size + 500))])
        assert found.values is not None and found.values[0].sizes == (size, size + 500)
    assert len(tried) == 1


@pytest.mark.slow
def test_an_import_does_without_the_compiler_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    """Importing Dynamo takes longer than importing a trace of some MB. A compiled function calls PyTorch's Python
    kernels uncompiled, before and after."""
    x = traced("float", 8, 8)
    events = [op(f"aten::{name}", 10 * n, 5, [x]) for n, name in enumerate(("sigmoid", "rsqrt", "var_mean", "mean"))]
    trace(tmp_path / "trace.json", [*events, op("aten::add", 90, 5, [x, x, ("Scalar", [], [], "1")])])
    script = f"""
import sys
import torch
from replayfmt.importers.importing import import_trace
report = import_trace({str(tmp_path / "trace.json")!r}, {str(tmp_path / "x.opreplay")!r})
assert len(report.entries) == 5, report
assert "torch._dynamo" not in sys.modules
torch._refs.sigmoid(torch.ones(2, device="meta"))
assert "torch._dynamo" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
