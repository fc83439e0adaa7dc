"""Graphs of CUDA: what tests/accelerator/graphs_on_device.py tries on the simulated accelerator, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import replayfmt
from replayfmt import Plan
from replayfmt.errors import ReplayRefused
from replayfmt.format.codes import KernelKind
from replayfmt.format.reader import open_capture
from replayfmt.replay.convenience import as_text

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def decoding() -> list[list[float]]:
    """A static input, a state that each replay adds to, and a static output."""
    torch.manual_seed(0)
    weight, token = torch.randn(64, 64, device="cuda"), torch.zeros(64, device="cuda")
    state, graph, stream = torch.zeros(64, 64, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # cuBLAS cannot be started inside a graph's capture
        _warm = (torch.outer(token, token) @ weight) @ token
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
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


def forked() -> list[float]:
    """Two streams in one graph, and a backward pass on both."""
    torch.manual_seed(0)
    x, other, graph = torch.randn(64, 64, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    weight = torch.randn(64, 64, device="cuda").requires_grad_()
    weight.grad = torch.zeros_like(weight)

    def issue() -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x @ weight
        other.wait_stream(main)
        with torch.cuda.stream(other):
            z = y.relu().sum()
        main.wait_stream(other)
        loss = z + y.square().sum()
        loss.backward()
        return loss.detach()

    before = torch.cuda.Stream()
    before.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(before):
        issue()
    torch.cuda.current_stream().wait_stream(before)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = issue()
    seen = []
    for number in range(2):
        x.fill_(number + 1.0)
        weight.grad.zero_()
        graph.replay()
        seen += [loss.item(), weight.grad.sum().item()]
    return seen


def sharing_a_pool() -> list[list[float]]:
    """The second graph has its result where the first one had something that it freed."""
    x, stream = torch.arange(1.0, 65.0, device="cuda"), torch.cuda.Stream()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, stream=stream):
        one = (x * 2) + 1
    with torch.cuda.graph(second, stream=stream, pool=first.pool()):
        other = x * 5
    seen = []
    for _ in range(2):
        second.replay()
        seen.append(other.tolist())
        first.replay()
        seen += [one.tolist(), other.tolist()]
    return seen


@pytest.mark.parametrize("recorder", ["python", "native"])
@pytest.mark.parametrize(
    ("program", "graphs"), [(decoding, 1), (dropping, 1), (graphed, 2), (forked, 1), (sharing_a_pool, 2)]
)
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
            said = "\n".join(as_text(plan, result))
            assert words in said
            assert "not checked for work that no operator issued" not in said
            assert ("on 2 streams" in said) is (program is forked)


def of_a_library(stream: int, memory: torch.Tensor) -> None:
    """Work that PyTorch does not see."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    (error,) = runtime.cudaMemsetAsync(memory.data_ptr(), 0, memory.nbytes, stream)
    assert error == runtime.cudaError_t.cudaSuccess


@pytest.mark.parametrize("last", [False, True])
def test_work_that_no_operator_issued_is_found_in_a_graph(tmp_path: Path, last: bool) -> None:
    path, x, graph = tmp_path / "a.opreplay", torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with replayfmt.capture(path):
        with torch.cuda.graph(graph):
            y = x + 1
            of_a_library(torch.cuda.current_stream().cuda_stream, y)
            if not last:
                y = y + 1
        graph.replay()
        assert y.tolist() == [float(not last)] * 64
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}
    with pytest.raises(ReplayRefused) as refused, Plan(path):
        pass
    assert "nodes of the kind memset" in "".join(refused.value.findings)


def test_a_triton_kernel_in_a_graph_is_replayed_from_its_binary(tmp_path: Path) -> None:
    busy = pytest.importorskip("tests.triton_kernels.busy_kernels").busy
    path, x = tmp_path / "a.opreplay", torch.ones(1 << 10, device="cuda")

    def program() -> list[float]:
        graph = torch.cuda.CUDAGraph()
        busy[(4,)](x, 10, 10, BLOCK=256)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.mul_(2)
            busy[(4,)](x, 10, 10, BLOCK=256)
        x.fill_(1)
        graph.replay()
        return x.tolist()  # type: ignore[no-any-return]

    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert not open_capture(path).summary.unsupported
    with pytest.raises(ReplayRefused), Plan(path):
        pass
    for mode in ("captured", "issued"):
        with Plan(path, graphs=mode, allow_code=True) as plan:  # type: ignore[arg-type]
            result = plan.execute(verify="bitwise")
            assert result.outcome == "ok", str(result.divergence)
