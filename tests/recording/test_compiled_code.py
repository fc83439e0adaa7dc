"""Compiled code under a capture: it stays compiled, and nothing is compiled again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from .conftest import Capture


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Compiled:
    """A function compiled by a backend that counts graphs, and runs their operators."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.graphs = 0
        self.run = torch.compile(function, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, _examples: Any) -> Any:
        self.graphs += 1
        return graph.forward


def in_one(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def in_two(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y + 1


def breaks() -> int:
    return sum(counters["graph_break"].values())


@pytest.mark.parametrize(("function", "graphs"), [(in_one, 1), (in_two, 2)], ids=["one graph", "a graph break"])
@pytest.mark.parametrize("begins", ["before", "inside"])
def test_nothing_is_compiled_again(
    capture: Capture, function: Callable[..., torch.Tensor], graphs: int, begins: str, recorder: str
) -> None:
    if (recorder, begins) == ("python", "inside"):
        pytest.skip("code that is compiled under a dispatch mode is compiled for it")
    compiled, x = Compiled(function), torch.ones(3)
    if begins == "before":
        compiled.run(x)
    first = capture(lambda: [compiled.run(x), compiled.run(x)])
    broken = breaks()
    compiled.run(x)
    second = capture(lambda: [compiled.run(x), compiled.run(x)])
    compiled.run(x)
    assert compiled.graphs == graphs and breaks() == broken
    for captured in (first, second):
        assert captured.ops() == ["aten::sin.default", "aten::add.Tensor"] * 2
        captured.replays()


def test_dynamo_leaves_the_recorder_alone_where_it_compiles_nothing(capture: Capture) -> None:
    """It looks at all frames that a module calls which it cannot compile as a whole: an LSTM, for one."""
    compiled, x = Compiled(torch.nn.LSTM(4, 3).forward), torch.ones(2, 4)
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled.run(x)
        graphs = compiled.graphs
        captured = capture(lambda: compiled.run(x)[0])
    assert compiled.graphs == graphs
    assert "aten::mkldnn_rnn_layer.default" in captured.ops()
    captured.replays()


_IMPORTS_DYNAMO_LATE = """
import sys
import torch, replayfmt
with replayfmt.capture(sys.argv[1]):
    x = torch.ones(3)
    assert "torch._dynamo" not in sys.modules
    lstm = torch.compile(torch.nn.LSTM(4, 3), backend="eager")
    lstm(torch.ones(2, 4))
    from torch._dynamo.utils import counters
    looked_at = dict(counters["frames"])
torch._dynamo.reset()
counters.clear()
torch.compile(torch.nn.LSTM(4, 3), backend="eager")(torch.ones(2, 4))
assert looked_at == dict(counters["frames"]), (looked_at, counters["frames"])
"""


@pytest.mark.slow
@pytest.mark.recorder("native")
def test_dynamo_leaves_it_alone_where_it_is_imported_during_the_capture(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _IMPORTS_DYNAMO_LATE, str(tmp_path / "late.opreplay")]
    subprocess.run(command, check=True)


@pytest.mark.recorder("native")
def test_compiled_code_in_an_operator_is_not_compiled_again(capture: Capture) -> None:
    compiled, x = Compiled(in_one), torch.ones(3)
    compiled.run(x)
    with torch.library._scoped_library("compiled_inside", "DEF") as library:
        library.define("run(Tensor x) -> Tensor")
        library.impl("run", compiled.run, "CPU")
        captured = capture(lambda: [torch.ops.compiled_inside.run(x), compiled.run(x)])
        compiled.run(x)
    assert compiled.graphs == 1
    assert captured.ops() == ["compiled_inside::run.default", "aten::sin.default", "aten::add.Tensor"]


@pytest.mark.slow
def test_regions_are_told_and_kept(capture: Capture) -> None:
    """By Inductor."""
    run, x = torch.compile(in_one), torch.ones(3)
    expected = run(x)
    compiled = dict(counters["stats"])
    captured = capture(lambda: [x * 2, run(x), run(x), x * 3], compiled="keep")
    after = run(x)
    assert dict(counters["stats"]) == compiled
    assert torch.equal(captured.returned[1], expected) and torch.equal(after, expected)
    assert captured.unsupported() == {"compiled_region": 2}
    assert captured.ops() == ["aten::mul.Tensor"] * 2


def test_tracing_with_symbolic_sizes_leaves_no_record(capture: Capture) -> None:
    """A fake tensor of the result of a binary operator is made by `torch.empty` on the meta device."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def program() -> torch.Tensor:
        compiled = torch.compile(add, backend="aot_eager", dynamic=True)
        return compiled(torch.ones(6, 4), torch.ones(6, 4))

    captured = capture(program)
    assert captured.unsupported() == {}
    assert "meta" not in {device.kind for device in captured.reader.devices[1:]}
    captured.replays()
