"""--cuda-graph on the simulated device: whole replays, scopes and ops that are launched as one graph. Run by
test_accelerator.py in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, register  # noqa: F401 - fixtures of every test
from in_process import Tools, tools  # noqa: F401 - a fixture

import replayfmt
from replayfmt import Plan
from replayfmt.replay import replay_graph
from replayfmt.replay.replay_graph import NotGraphCapturable

sim = register()
DEVICE = torch.device("sim:0")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A training step on the device, in a scope, and work of the host before it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(5, 4)
    found = tmp_path / "a.opreplay"
    with replayfmt.capture(found):
        moved = (batch * 2).to(DEVICE)
        for _ in range(2):
            with replayfmt.scope("step"):
                model(moved).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return found


def captured(path: Path, program: Callable[[], Any], **options: Any) -> Path:
    with replayfmt.capture(path, **options):
        kept = program()
    del kept
    return path


def rows_of(tools: Tools, *flags: object) -> dict[str, dict[str, Any]]:  # noqa: F811
    done = tools("benchmark", "--cuda-graph", "--benchmark-min-time=6x", "--benchmark-format=json", *flags)
    assert done.code == 0, done.err
    return {row["name"]: row for row in json.loads(done.out)["benchmarks"]}


def test_python_launches_the_whole_replay_as_one_graph_too(tmp_path: Path) -> None:
    x = torch.ones(4, device=DEVICE)
    path = captured(tmp_path / "whole.opreplay", lambda: x.add(1).mul(2))
    (row,) = replayfmt.benchmark(path, min_time="6x", cuda_graph=True).rows
    assert row["graph"] is True and row["no_graph"] is None and row["eager_time"] > 0, row


def test_a_scope_is_launched_as_one_graph_with_all_its_passes(tools: Tools, path: Path) -> None:  # noqa: F811
    before = sim.graph_replays()
    (row,) = rows_of(tools, "--scope=step", path).values()
    assert row["graph"] is True and row["no_graph"] is None, row
    assert sim.graph_replays() - before == 1 + 2 + 6, "one is compared, two warm up, six are timed"
    assert row["iterations"] == 6 and row["passes"] == 2 and row["eager_time"] > 0 and row["host_time"] > 0
    assert int(row["graph_compared"].split()[0]) >= 8, "parameters and their momenta"


def test_a_whole_replay_with_work_of_the_host_is_measured_op_by_op_and_says_where(tools: Tools, path: Path) -> None:  # noqa: F811
    before = sim.graph_replays()
    (row,) = rows_of(tools, path).values()
    assert row["graph"] is False and "aten::mul.Tensor) works on the host" in row["no_graph"]
    assert row["real_time"] > 0 and "eager_time" not in row and sim.graph_replays() == before
    assert any("could not be put into a graph: ordinal" in each for each in row["warnings"])
    done = tools("benchmark", "--cuda-graph", "--benchmark-min-time=6x", path)
    assert done.code == 0 and "WARNING: BM_replay: measured op by op, because it could not be put into" in done.out


def test_a_whole_replay_is_one_graph_and_the_table_says_what_was_compared(tools: Tools, tmp_path: Path) -> None:  # noqa: F811
    x = torch.arange(4.0).to(DEVICE)

    def program() -> Any:
        x.add_(1)
        return (x * 2).relu()

    path = captured(tmp_path / "b.opreplay", program)
    out = tmp_path / "old.json"
    done = tools("benchmark", "--cuda-graph", "--benchmark-min-time=6x", f"--benchmark-out={out}", path)
    assert done.code == 0, done.err
    assert "BM_replay: launched as one graph; op by op it takes" in done.out and "bit for bit" in done.out
    assert x.tolist() == [1, 2, 3, 4]
    done = tools("benchmark", "--benchmark-min-time=6x", f"--baseline={out}", "--fail-above=500%", path)
    assert done.code == 4 and "launched in a graph, and the other was not" in done.out + done.err
    with Plan(path) as plan:
        graph = replay_graph.WholeGraph(plan)
        assert plan.execute(verify="bitwise").outcome == "ok", "a graph leaves the plan as it was"
        assert graph.compared.startswith("2 results")


def test_ops_are_launched_in_graphs_of_a_device_that_has_them(tools: Tools, path: Path) -> None:  # noqa: F811
    rows = rows_of(tools, "--per-op", "--kernel=aten::addmm", path)
    assert rows and all(row["graphs"] == 1 and row["eager_time"] > 0 for row in rows.values()), rows


def draws_twice() -> Any:
    torch.manual_seed(1)
    first = torch.rand(3, device=DEVICE)
    torch.manual_seed(2)
    return first, torch.rand(3, device=DEVICE)


def on_two_streams() -> Any:
    x = torch.ones(3, device=DEVICE)
    other = torch.Stream(DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(other)
    return x, y


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda: torch.ones(3, device=DEVICE).sum().item(), "reads from the device on the host"),
        (lambda: torch.ones(3, device=DEVICE).cpu(), "works on the host"),
        (lambda: torch.ones(3, device=DEVICE).nonzero(), "wait for the sizes of its results"),
        (lambda: torch.ones(3).to(DEVICE), "works on the host"),
        (
            lambda: (torch.ones(3, device=DEVICE), torch.accelerator.synchronize())[0],
            "lets the host wait for the device",
        ),
        (lambda: torch.ones(3, device=DEVICE).untyped_storage().resize_(64), "changes how long a storage is"),
        (draws_twice, "sets a generator after ops have drawn from one"),
        (on_two_streams, "its work is on several streams; --streams=serial gives it to one"),
    ],
    ids=lambda value: None if callable(value) else value.replace(" ", "_")[:30],
)
def test_what_forbids_a_graph_is_told_with_its_place(tmp_path: Path, program: Callable[[], Any], words: str) -> None:
    path = captured(tmp_path / "a.opreplay", program)
    with Plan(path) as plan, pytest.raises(NotGraphCapturable) as refused:
        replay_graph.WholeGraph(plan)
    assert words in str(refused.value)
    assert "streams" in words or str(refused.value).startswith("ordinal "), refused.value


def test_a_graph_of_the_program_is_in_a_graph_only_where_its_ops_are_issued(tools: Tools, tmp_path: Path) -> None:  # noqa: F811
    def program() -> Any:
        x, graph = torch.ones(3).to(DEVICE), torch.accelerator.Graph()
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE), graph:
            x.add_(1)
        with replayfmt.scope("decode"):
            graph.replay()
            graph.replay()
        return x, graph

    path = captured(tmp_path / "a.opreplay", program)
    (row,) = rows_of(tools, "--scope=decode", path).values()
    assert "is a graph itself; --graphs=issued issues its ops" in row["no_graph"]
    (row,) = rows_of(tools, "--scope=decode", "--graphs=issued", path).values()
    assert row["graph"] is True and row["graph_compared"].startswith("1 results")


def test_a_graph_that_computes_something_else_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3).to(DEVICE)
    path = captured(tmp_path / "a.opreplay", lambda: x.add_(1))

    class Empty:
        def replay(self) -> None: ...

    def of_nothing(device: torch.device, issue: Callable[[], None]) -> Any:
        whole_graph(device, issue)
        return Empty()

    whole_graph = replay_graph.captured
    monkeypatch.setattr(replay_graph, "captured", of_nothing)
    with (
        Plan(path) as plan,
        pytest.raises(NotGraphCapturable, match="gave other bytes than its ops one by one, in 1 of 1"),
    ):
        replay_graph.WholeGraph(plan)


def test_a_device_without_graphs_and_a_replay_on_the_host_are_one_line(
    tools: Tools,  # noqa: F811
    tmp_path: Path,
) -> None:
    x = torch.ones(3).to(DEVICE)
    path = captured(tmp_path / "a.opreplay", lambda: x.add_(1))
    done = tools("benchmark", "--cuda-graph", "--device=cpu", path)
    assert done.code == 2 and "--cuda-graph needs a device that has graphs, such as a CUDA device" in done.err
    assert len(done.err.splitlines()) == 1 and not done.out
    with Plan(path, ["cpu"]) as plan, pytest.raises(NotGraphCapturable, match="works on cpu"):
        replay_graph.WholeGraph(plan)
