"""Graphs of a device, tried on the simulated one. Run by test_accelerator.py in a process of its own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, native_alone, recorder, register  # noqa: F401 - fixtures of every test
from in_process import Tools, tools  # noqa: F401 - a fixture
from replay.rewriting import rewrite

import replayfmt
from replayfmt import Plan
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import contents_of, open_body
from replayfmt.format.codes import KernelKind, RecordKind
from replayfmt.format.model import Kernel
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture
from replayfmt.replay.convenience import as_text

sim = register()
DEVICE = torch.device("sim:0")


def graph_of(issue: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """What `issue` does as a graph, and what it returned while that was captured."""
    graph = torch.accelerator.Graph(**options)
    torch.accelerator.synchronize()
    with torch.Stream(DEVICE), graph:
        result = issue()
    return graph, result


def decoding() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A graph with a static input, a state that each replay adds to, and a static output."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4).to(DEVICE)
    token, state = torch.zeros(4).to(DEVICE), torch.zeros(4, 4).to(DEVICE)

    def step() -> torch.Tensor:
        state.add_(torch.outer(token, token) @ weight)
        return (state.relu() @ token).softmax(0)

    graph, logits = graph_of(step)
    graph.uses = weight, state  # a graph keeps no memory that was there before
    return graph, token, logits


def decode(graph: Any, token: torch.Tensor, logits: torch.Tensor, steps: int = 3) -> list[list[float]]:
    seen = []
    for step in range(steps):
        token.copy_(torch.arange(4.0) + step)
        graph.replay()
        seen.append(logits.tolist())
    return seen


def of_freed_memory() -> Any:
    x = torch.ones(3).to(DEVICE)
    return graph_of(lambda: x.add_(1) is None)[0]


def graphs_in(path: Path) -> list[Kernel]:
    return [kernel for kernel in open_capture(path).kernels if kernel and kernel.kind is KernelKind.graph]


def body_of(path: Path) -> list[str]:
    """The ops in the body of a capture's only graph."""
    reader = open_capture(path)
    (kernel,) = graphs_in(path)
    with open_body(contents_of(reader, kernel)) as body:
        return [body.kernels[record.signature.kernel].qualified_name for record in body.records()]  # type: ignore[union-attr]


def calls(path: Path) -> list[str]:
    reader = open_capture(path)
    return [
        reader.kernels[record.signature.kernel].name  # type: ignore[union-attr]
        for record in reader.records()
        if record.kind is RecordKind.op
    ]


def replays_bitwise(path: Path, *, graphs: str = "captured", device: str = "") -> tuple[int, str]:
    """Twice. How often graphs were replayed, and what the report says."""
    before = sim.graph_replays()
    with Plan(path, [device] if device else [], graphs=graphs) as plan:  # type: ignore[arg-type]
        for _ in range(2):
            result = plan.execute(verify="bitwise")
            assert result.outcome == "ok", str(result.divergence)
        text = "\n".join(as_text(plan, result))
    return sim.graph_replays() - before, text


def test_what_is_captured_does_not_run_and_replays_on_the_same_memory() -> None:
    graph, token, logits = decoding()
    assert logits.sum().item() != pytest.approx(1), "nothing was computed while it was captured"
    first = decode(graph, token, logits, 1)
    assert sum(first[0]) == pytest.approx(1)
    gone = of_freed_memory()
    with pytest.raises(RuntimeError, match="freed"):
        gone.replay()


def test_a_graph_is_recorded_once_and_each_replay_is_one_op(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    expected = decode(*decoding())
    with replayfmt.capture(path):
        assert decode(*decoding()) == expected
    (kernel,) = graphs_in(path)
    assert not open_capture(path).summary.unsupported
    assert calls(path).count(kernel.name) == 3
    assert "aten::softmax" not in "".join(calls(path)), "what is captured is not recorded where it stands"
    assert body_of(path) == [
        "aten::view.default",
        "aten::mul.Tensor",
        "aten::mm.default",
        "aten::add_.Tensor",
        "aten::relu.default",
        "aten::mv.default",
        "aten::_softmax.default",
    ]
    schema = torch._C.parse_schema(kernel.schema)
    written = [each.alias_info is not None for each in schema.arguments]
    assert sorted(written) == [False, False, True, True], "weight and token are read, state and logits are written"


@pytest.mark.parametrize("device", ["", "sim:1", "cpu"])
def test_graphs_are_captured_anew_or_issued_and_the_output_says_which(tmp_path: Path, device: str) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        decode(*decoding())
    replayed, text = replays_bitwise(path, device=device)
    if device == "cpu":
        assert replayed == 0 and "1 graph kernel is issued op by op (cpu has no graphs)" in text
    else:
        assert replayed == 6 and f"1 graph kernel is captured into a graph of {device or 'sim:0'}" in text
    replayed, text = replays_bitwise(path, graphs="issued", device=device)
    assert replayed == 0 and "issued op by op (--graphs=issued)" in text


def test_the_flag_of_the_tools_chooses_and_a_wrong_value_is_refused(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        decode(*decoding())
    for mode, words in (("captured", "captured into a graph"), ("issued", "issued op by op")):
        done = tools("run", "--verify=bitwise", f"--graphs={mode}", path)
        assert done.code == 0 and words in done.out, done.err
    assert tools("run", "--graphs=guessed", path).code == 2
    done = tools(
        "benchmark",
        "--benchmark-min-time=6x",
        "--per-op",
        "--kernel=graph::*",
        "--inputs=hot",
        "--benchmark-format=json",
        path,
    )
    assert done.code == 0 and "graph::captured_1" in done.out, done.err


@native_alone
def test_a_graph_is_reconciled_as_one_call_of_the_device(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path, out = tmp_path / "a.opreplay", tmp_path / "a.json"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        decode(*decoding())
    done = tools("benchmark", "--reconcile", "--benchmark-min-time=6x", f"--benchmark-out={out}", path)
    assert done.code == 0 and "reconciliation of BM_replay" in done.out, done.err
    found = json.loads(out.read_text())["reconciliation"]
    with open_capture(path) as reader:
        ops = reader.summary.records[RecordKind.op]
    for inputs in ("isolated_hot", "isolated_cold"):
        assert found[inputs]["total_ns"] > 0 and found[inputs]["calls"] + found[inputs]["left_out"] == ops
    assert found["whole_replay_ns"] > 0 and found["whole_replay_host_ns"] > 0


def training_step() -> tuple[Any, list[torch.Tensor]]:
    """A whole step of training as one graph, the backward pass in the device's thread included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(5, 4).to(DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    torch.accelerator.synchronize()
    with torch.Stream(DEVICE):
        step()
    torch.accelerator.synchronize()
    graph, loss = graph_of(step)
    graph.uses = model, optimizer
    return graph, [batch, loss, *model.parameters()]


def test_a_step_of_training_in_one_graph_replays_bit_for_bit(tmp_path: Path) -> None:
    def program() -> list[Any]:
        graph, (batch, loss, *parameters) = training_step()
        losses = []
        for number in range(3):
            batch.copy_(torch.full((5, 4), float(number)))
            graph.replay()
            losses.append(loss.item())
        return [losses, *(parameter.tolist() for parameter in parameters)]

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert not open_capture(path).summary.unsupported, open_capture(path).summary.unsupported
    assert "aten::tanh_backward.default" in body_of(path)
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


class _Graph(torch.accelerator.Graph):
    """`torch.cuda.CUDAGraph`, on the simulated device."""


class _Capture:
    """`torch.cuda.graph`, on the simulated device."""

    def __init__(self, graph: Any, pool: Any = None, stream: torch.Stream | None = None, **_settings: Any) -> None:
        graph.graph_pool = pool
        self._graph, self._stream = graph, stream or torch.Stream(DEVICE)

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._graph.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._graph.__exit__(*error)
        self._stream.__exit__(*error)


def test_graphed_callables_replay_forward_and_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = torch.cuda.graphs
    for holder in (torch.cuda, graphs):
        monkeypatch.setattr(holder, "CUDAGraph", _Graph)
        monkeypatch.setattr(holder, "graph", _Capture)
    monkeypatch.setattr(graphs, "graph_pool_handle", lambda: (0, 77))
    monkeypatch.setattr(torch.cuda, "synchronize", torch.accelerator.synchronize)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: torch.Stream(DEVICE))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def program() -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(DEVICE)
        sample = torch.randn(3, 4).to(DEVICE)
        graphed = torch.cuda.make_graphed_callables(model, (sample,))
        torch.accelerator.synchronize()
        losses = []
        for number in range(2):
            loss = graphed(torch.full((3, 4), float(number)).to(DEVICE)).square().sum()
            loss.backward()
            losses.append(loss.item())
        return [losses, *(parameter.grad.tolist() for parameter in model.parameters())]  # type: ignore[union-attr]

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert not open_capture(path).summary.unsupported, open_capture(path).summary.unsupported
    assert [calls(path).count(kernel.name) for kernel in graphs_in(path)] == [2, 2], "one forward, one backward"
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_each_replay_draws_random_numbers_of_its_own(tmp_path: Path) -> None:
    def program() -> list[list[float]]:
        torch.manual_seed(3)
        x = torch.ones(8).to(DEVICE)
        graph, dropped = graph_of(lambda: torch.nn.functional.dropout(x + torch.rand(8, device=DEVICE), 0.4))
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(dropped.tolist())
        return seen

    path = tmp_path / "a.opreplay"
    expected = program()
    assert expected[0] != expected[1]
    with replayfmt.capture(path):
        assert program() == expected
    assert open_capture(path).summary.records[RecordKind.generator_state] > 0
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)
    with pytest.raises(ReplayRefused, match="cannot be replayed here") as refused, Plan(path, ["cpu"]) as plan:
        plan.execute()
    assert "draws random numbers" in refused.value.findings[0]


def test_graphs_that_share_a_pool_use_what_the_others_made(tmp_path: Path) -> None:
    def program() -> list[float]:
        x = torch.arange(4.0).to(DEVICE)
        one, hidden = graph_of(lambda: (x * 2).exp() + 1)
        two, result = graph_of(lambda: (hidden.log() - x).square(), pool=one.pool())
        seen: list[float] = []
        for number in range(2):
            x.copy_(torch.arange(4.0) + number)
            one.replay()
            two.replay()
            seen += result.tolist()
        return seen

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert len(graphs_in(path)) == 2 and not open_capture(path).summary.unsupported
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_tensors_of_the_host_are_copied_at_each_replay_or_were_given_by_value(tmp_path: Path) -> None:
    def program() -> list[list[float]]:
        static, by_value = torch.zeros(3, pin_memory=True), torch.tensor(2.0)
        assert static.is_pinned()
        seen = []

        def issue() -> torch.Tensor:
            return static.to(DEVICE, non_blocking=True) * by_value

        graph, result = graph_of(issue)
        by_value.fill_(100)
        for number in range(2):
            static.fill_(float(number + 1))
            graph.replay()
            seen.append(result.tolist())
        return seen

    path = tmp_path / "a.opreplay"
    assert program() == [[2] * 3, [4] * 3]
    with replayfmt.capture(path):
        assert program() == [[2] * 3, [4] * 3]
    assert not open_capture(path).summary.unsupported
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_a_graph_that_was_captured_before_the_first_recorded_scope_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path, start_scope="execute"):
        graph, token, logits = decoding()
        decode(graph, token, logits)  # what the graph's memory holds from here on is imported
        with replayfmt.scope("execute"):
            decode(graph, token, logits)
    assert not open_capture(path).summary.unsupported
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("before", "captured before the recording began"),
        ("own generator", "a generator of the program's own"),
        ("moved", "freed since it was captured"),
        ("a mode", "another dispatch mode"),
    ],
)
def test_a_graph_that_cannot_be_kept_is_unsupported_with_its_reason(tmp_path: Path, what: str, words: str) -> None:
    path = tmp_path / "a.opreplay"
    x = torch.ones(4).to(DEVICE)
    early, _ = graph_of(lambda: x.add_(1))
    own = torch.Generator(DEVICE)

    class Doubling(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with replayfmt.capture(path):
        torch.ones(2).to(DEVICE)
        graph = early
        if what == "own generator":
            graph, _ = graph_of(lambda: x.add_(torch.rand(4, device=DEVICE, generator=own)))
        elif what == "moved":
            graph = of_freed_memory()
        elif what == "a mode":
            with Doubling():
                graph, _ = graph_of(lambda: x.add_(1))
        if what == "moved":
            with pytest.raises(RuntimeError, match="freed"):
                graph.replay()
        else:
            graph.replay()
        (x * 2).tolist()
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}
    with pytest.raises(ReplayRefused) as refused, Plan(path) as plan:
        plan.execute()
    assert words in "".join(refused.value.findings)


def test_a_graph_on_another_stream_without_an_edge_races(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    sim.tolerate_races(True)
    try:
        with replayfmt.capture(path):
            graph, token, logits = decoding()
            other = torch.Stream(DEVICE)
            token.fill_(1)
            with other:
                graph.replay()
    finally:
        sim.tolerate_races(False)
    with open_capture(path) as reader:
        assert any("graph::captured_1" in each.text(reader) for each in find_races(reader))


def test_trimmed_captures_keep_graphs_and_a_script_of_one_is_refused(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    with replayfmt.capture(path):
        decode(*decoding())
    done = tools("trim", "--payload=none", "--kernel=graph::*", path, out)
    assert done.code == 0, done.err
    assert set(calls(out)) == {"graph::captured_1"} and len(body_of(out)) == 7
    assert tools("check", out).code == 0
    text = tools("dump", path).out
    assert "graph::captured_1" in text
    done = tools("trim", f"--script={tmp_path / 'c.py'}", "--kernel=graph::*", path)
    assert done.code == 1 and "graph::captured_1" in done.err and not (tmp_path / "c.py").exists(), done


def test_a_substitution_says_that_it_leaves_graphs_as_they_are(tmp_path: Path) -> None:
    path, x = tmp_path / "a.opreplay", torch.ones(3).to(DEVICE)
    with replayfmt.capture(path):
        graph, result = graph_of(lambda: x * 2)
        graph.replay()
        (result * 3).tolist()
    used: list[int] = []

    def doubled(a: torch.Tensor, b: Any) -> torch.Tensor:
        used.append(1)
        return torch.ops.aten.mul.Tensor(a, b)

    with Plan(path, substitutions=[replayfmt.Substitution("aten::mul", doubled)]) as plan:
        result = plan.execute()
    assert result.outcome == "ok" and used
    (said,) = [note for note in result.notes if "substituted" in note]
    assert said.startswith("aten::mul.Tensor is substituted, but not inside of graph::captured_1: ")


def test_a_body_that_does_more_than_its_schema_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        decode(*decoding())
    (kernel,) = graphs_in(path)
    silent = replace(kernel, schema=re.sub(r"Tensor\(a\d+!\)", "Tensor", kernel.schema))
    assert silent != kernel
    lying = rewrite(path, tmp_path / "b.opreplay", kernel=lambda each: silent if each == kernel else each)
    with pytest.raises(ReplayRefused) as refused:
        Plan(lying)
    assert "its schema does not say so" in "".join(refused.value.findings)
    for role, words in (("body", "the capture has no body of it"), ("metadata", "no metadata")):
        gone = rewrite(path, tmp_path / f"{role}.opreplay", kernel=functools.partial(without_role, path, role))
        with pytest.raises(ReplayRefused) as refused:
            Plan(gone)
        assert words in "".join(refused.value.findings)


def without_role(path: Path, role: str, kernel: Kernel) -> Kernel:
    reader = open_capture(path)
    return replace(kernel, attachments=tuple(n for n in kernel.attachments if reader.attachments[n].role != role))
