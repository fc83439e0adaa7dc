"""CUDA graphs of compiled regions are switched off for a capture. The functions that make them are PyTorch's own; none
is called here, because there is no device for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt.format.reader import open_capture

from .conftest import Capture

pytestmark = pytest.mark.slow


@pytest.fixture
def regions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The regions that are called."""
    from torch._inductor.output_code import CompiledFxGraph

    called: list[Any] = []
    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        called.append(self)
        return original(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", call)
    yield called


def graphed(function: Any) -> Any:
    """As a region's function is replaced where CUDA graphs are on."""
    from torch._inductor.compile_fx import cudagraphify

    return cudagraphify(function, device_index=0, stack_traces=[], is_backward=False, is_inference=True)


def test_a_region_runs_its_generated_code_and_has_its_graph_back_afterwards(
    regions: list[Any], capture: Capture, capfd: pytest.CaptureFixture[str]
) -> None:
    run, x = torch.compile(lambda x: x.sin() + 1), torch.randn(8)
    expected = run(x)
    (region,) = regions
    generated = region.current_callable
    replaying = region.current_callable = graphed(generated)
    capfd.readouterr()
    captured = capture(lambda: (run(x), run(x)))
    assert capfd.readouterr().err.count("CUDA graphs of compiled regions are switched off") == 1
    assert torch.equal(captured.returned[1], expected)
    assert captured.kernels() == ["empty_strided", "cpp_fused_add_sin_0"] * 2 and captured.unsupported() == []
    captured.replays()
    assert region.current_callable is replaying
    region.current_callable = generated


def test_parts_of_a_region_run_their_generated_code(regions: list[Any], capture: Capture) -> None:
    run, x = torch.compile(lambda x: (x.sin() + 1) @ x), torch.randn(8, 8)
    expected = run(x)
    (region,) = regions
    runner = region.compiled_fn_runner
    call = type(runner).call

    def part(args: Any) -> Any:
        raise AssertionError("only its place is looked at")

    # As a module with parts has them: functions of its own.
    runner.partitions = [graphed(_with_globals(part, call.__globals__))]
    replaying = list(runner.partitions)
    captured = capture(lambda: run(x), digests="ops")
    assert torch.equal(captured.returned, expected) and captured.unsupported() == []
    assert runner.partitions == replaying
    runner.partitions = [part]
    (record,) = capture(lambda: (run(x), x + 1)).unsupported()
    assert "a part of it is called through" in record["detail"]
    runner.partitions = []


def test_a_region_that_is_not_known_keeps_its_graph(regions: list[Any], tmp_path: Path) -> None:
    run, x = torch.compile(lambda x: x.cos() + 1), torch.randn(8)
    run(x)
    (region,) = regions
    generated, ran = region.current_callable, []

    @functools.wraps(generated)
    def other(inputs: Any) -> Any:
        ran.append(region.current_callable is replaying)
        return generated(inputs)

    replaying = region.current_callable = other
    with replayfmt.capture(tmp_path / "c.opreplay"):
        run(x)
        _kept = x + 1
    assert ran == [True]
    with open_capture(tmp_path / "c.opreplay") as reader:
        assert reader.summary.unsupported == {"compiled_region": 1}
    region.current_callable = generated


def test_the_session_says_that_graphs_are_off_where_there_may_be_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from replayfmt.recording.inductor import graph_policies

    assert graph_policies("kernels") == ({"cudagraph-trees": "off"} if torch.backends.cuda.is_built() else {})
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert graph_policies("keep") == graph_policies("eager") == {}
    assert graph_policies("kernels") == {"cudagraph-trees": "off"}


def _with_globals(function: Any, namespace: dict[str, Any]) -> Any:
    return type(function)(function.__code__, namespace)
