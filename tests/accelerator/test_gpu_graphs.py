"""Graphs of CUDA: what tests/accelerator/graphs_on_device.py tries on the simulated accelerator, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt import Plan
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture
from replayfmt.replay.report import as_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def decoding() -> list[list[float]]:
    """A static input, a state that each replay adds to, and a static output."""
    torch.manual_seed(0)
    weight, token = torch.randn(64, 64, device="cuda"), torch.zeros(64, device="cuda")
    state, graph = torch.zeros(64, 64, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        state.add_(torch.outer(token, token) @ weight)
        logits = (state.relu() @ token).softmax(0)
    seen = []
    for step in range(3):
        token.copy_(torch.arange(64.0) / 64 + step)
        graph.replay()
        seen.append(logits.tolist())
    return seen


def dropping() -> list[list[float]]:
    """Random numbers, other ones at each replay."""
    torch.manual_seed(3)
    x, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped = torch.nn.functional.dropout(x, 0.4)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(dropped.tolist())
    return seen


def graphed() -> list[Any]:
    """Forward and backward passes of `make_graphed_callables`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).cuda()
    made = torch.cuda.make_graphed_callables(model, (torch.randn(8, 64, device="cuda"),))
    losses = []
    for number in range(2):
        loss = made(torch.full((8, 64), float(number), device="cuda")).square().sum()
        loss.backward()
        losses.append(loss.item())
    return [losses, *(parameter.grad.tolist() for parameter in model.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("recorder", ["python", "native"])
@pytest.mark.parametrize(("program", "graphs"), [(decoding, 1), (dropping, 1), (graphed, 2)])
def test_graphs_are_recorded_and_replay_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[], list[Any]], graphs: int, recorder: str
) -> None:
    monkeypatch.setenv("OPREPLAY_RECORDER", recorder)
    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    with open_capture(path) as reader:
        assert not reader.summary.unsupported
        assert sum(kernel is not None and kernel.kind is KernelKind.graph for kernel in reader.kernels) == graphs
    for mode, words in (("captured", "captured into a graph of cuda:0"), ("issued", "issued op by op")):
        with Plan(path, graphs=mode) as plan:  # type: ignore[arg-type]
            for _ in range(3):
                result = plan.execute(verify="bitwise")
                assert result.outcome == "ok", str(result.divergence)
            assert words in "\n".join(as_text(plan, result))
