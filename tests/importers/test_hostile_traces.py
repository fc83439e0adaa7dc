"""Traces that say anything: an import ends in a capture or in one sentence, soon."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from replayfmt.errors import InvalidCapture, OpReplayError, OutputExists
from replayfmt.importers.importing import import_trace

from .conftest import Import
from .test_kineto import LAUNCHED
from .traces import H100, NONE, annotation, kernel, launch, numbers, op, scalar, tensor, trace

EVENTS = [
    annotation("ProfilerStep#1", 0, 1000),
    *LAUNCHED,
    op("aten::cat", 120, 10, [("TensorList", [[4, 8], [2, 8]], [[8, 1], [8, 1]], ""), scalar("0")]),
    op("aten::empty", 130, 3, [numbers("[2, 3]"), scalar("6"), scalar("0"), NONE, scalar("False"), NONE]),
    op("aten::unbind", 150, 3, [tensor("float", 4, 3), scalar("0")]),
    op("c10d::allreduce_", 170, 3, [("TensorList", [[4]], [[1]], "")]),
    launch(9, 180, name="cudaGraphLaunch"),
    kernel(9, 190, 4),
]
# fmt: off
STRANGE: list[Any] = [None, True, -1, 2**31, 2**63, 10**30, 1e300, float("nan"), float("inf"), "", "x", "[1,2",
                      "[[[[[[[[[[[[", "9" * 5000,
                      [], [[]], [2**62] * 3, [2**63], {}, {"a": 1}, "TensorList", "c10::complex<", "\ud800",
                      "1e400", "(1,2)", "..."]
# fmt: on


def changed(value: Any, chance: random.Random) -> Any:
    """A value with one thing in it left out or made strange."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        copy: Any = value.copy()
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        if chance.random() < 0.15:
            del copy[key]
        else:
            copy[key] = changed(value[key], chance)
        return copy
    return chance.choice(STRANGE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_strange_traces_become_captures_or_are_refused(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path = tmp_path / "trace.json"
    captures = 0
    for _ in range(25):
        document: Any = {"deviceProperties": [H100], "distributedInfo": {"rank": 0}, "traceEvents": EVENTS}
        for _ in range(chance.randint(1, 5)):
            document = changed(document, chance) if isinstance(document, dict) else document
        path.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
        try:
            import_trace(path, tmp_path / "out.opreplay", force=True, level=chance.choice(["auto", "leaf", "root"]))
            captures += 1
        except OpReplayError as error:
            assert str(path) in str(error) or "trace.json" in str(error)
    assert captures > 5


def test_annotations_of_no_length_begin_before_they_end(imported: Import) -> None:
    result = imported([annotation("a", 10, 0), annotation("b", 10, -5), op("aten::relu", 20, 5, [tensor("float", 4)])])
    kinds = [each.kind.name for each in result.records if "scope" in each.kind.name]
    assert kinds == ["scope_begin", "scope_begin", "scope_end", "scope_end"]


def test_numbers_of_thousands_of_digits_and_deep_nesting_are_skipped(tmp_path: Path) -> None:
    good = json.dumps(op("aten::relu", 20, 5, [tensor("float", 4)]))
    path = tmp_path / "trace.json"
    long = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": ' + "9" * 5000 + "}"
    deep = '{"ph": ' + "[" * 5000 + "]" * 5000 + "}"
    path.write_text(f'{{"traceEvents": [{long}, {deep}, {good}]}}')
    report = import_trace(path, tmp_path / "out.opreplay")
    assert report.calls()["exact"] == 1 and report.problems
    inside = [op(f"range {depth}", 10 + depth, 500 - 2 * depth, []) for depth in range(100)]
    path.write_text(json.dumps({"traceEvents": [*inside, op("aten::relu", 200, 5, [tensor("float", 4)])]}))
    report = import_trace(path, tmp_path / "out.opreplay", force=True)
    assert "ranges nested more than 64 deep: ops note the innermost ones" in report.notes


@pytest.mark.slow
def test_anything_in_the_place_of_what_a_trace_says_of_a_kernel_is_read(imported: Import) -> None:
    deep: object = []
    for _ in range(60):
        deep = [deep]
    given = {"kernel_hash": "abc", "kernel_backend": "triton", "kernel_file": "cache/mine.py", "num_warps": 4}
    for value in (math.nan, math.inf, -1, 10**30, [math.nan], {"a": math.inf}, deep, None, ""):
        for name in ("Input Strides", "Input Dims", "Input type", "Concrete Inputs", *given):
            event = op("mine_fwd", 10, 5, [tensor("float", 4)])
            event["args"] |= given | {name: value}
            work = kernel(1, 20, 3)
            work["args"] |= {"grid": value, "registers per thread": value}
            result = imported([event, launch(1, 11), work])
            assert sum(result.report.calls().values()) == 1, (name, value)


def test_a_list_of_results_without_end_is_not_computed(imported: Import) -> None:
    record = imported([op("aten::unbind", 10, 5, [tensor("float", 10**9, 2), scalar("0")])]).of("op")[0]
    assert "more than 100000 tensors" in record.annotation["results"]


def test_tensors_larger_than_any_memory_are_incomplete_with_the_reason(imported: Import) -> None:
    for sizes in ([10**6] * 4, [1 << 61], [10**30]):
        result = imported([op("aten::relu", 10, 5, [tensor("float", *sizes)])])
        assert not result.ops and result.of("unsupported") and result.report.calls()["incomplete"] == 1
        assert any("2^63-1" in line for line in result.report.lines())


def test_an_existing_file_is_told_before_the_trace_is_read(tmp_path: Path) -> None:
    (tmp_path / "out.opreplay").touch()
    with pytest.raises(OutputExists, match="exists already"):
        import_trace(trace(tmp_path / "t.json", []), tmp_path / "out.opreplay")


def test_a_refusal_is_short_whatever_the_trace_names(tmp_path: Path) -> None:
    event = op("aten::relu", 20, 5, [tensor("float", 4)]) | {"ph": "a" * 70_000}
    with pytest.raises(InvalidCapture, match="1 events are of category cpu_op") as refused:
        import_trace(trace(tmp_path / "t.json", [event]), tmp_path / "out.opreplay")
    assert len(str(refused.value)) < 1000
