"""What graphs of a device hold besides plain operators, tried on the simulated one. Run by test_accelerator.py in a
process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from graphs_on_device import DEVICE, body_of, calls, graph_of, graphs_in, replays_bitwise
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import replayfmt
from replayfmt import Plan
from replayfmt.errors import ReplayMismatch, ReplayRefused
from replayfmt.format.reader import open_capture
from replayfmt.recording.stream import device_streams

sim = register()


def refused_because(path: Path) -> str:
    with pytest.raises(ReplayRefused) as refused, Plan(path) as plan:
        plan.execute()
    return "".join(refused.value.findings)


def before(x: torch.Tensor) -> torch.Tensor:
    sim.launch_beside(x)
    return x + 1


def between(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    sim.launch_beside(y)
    return y * 3


def after(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    sim.launch_beside(y)
    return y


def alone(x: torch.Tensor) -> torch.Tensor:
    sim.launch_beside(x)
    return x


@pytest.mark.parametrize("issue", [before, between, after, alone])
def test_work_that_another_library_puts_into_a_graph_is_said(
    tmp_path: Path, issue: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def program() -> list[float]:
        x = torch.ones(4).to(DEVICE)
        graph, result = graph_of(lambda: issue(x))
        graph.replay()
        return result.tolist()

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}
    assert "work that no operator issued (nodes of the kind kernel)" in refused_because(path)


def test_what_another_library_launches_between_ops_is_never_a_replay_that_is_ok(tmp_path: Path) -> None:
    """Launched here is what no hook sees. An audit finds it in memory whose content is known."""

    def known() -> list[float]:
        x = torch.ones(4).to(DEVICE)
        sim.launch_beside(x)
        return (x + 1).tolist()

    def unwritten() -> list[float]:
        x = torch.empty(4, device=DEVICE)
        sim.launch_beside(x)
        return (x + 1).tolist()

    plain, audited, empty = (tmp_path / f"{name}.opreplay" for name in ("plain", "audited", "empty"))
    for path, program, audit in ((plain, known, False), (audited, known, True), (empty, unwritten, False)):
        with replayfmt.capture(path, audit=audit):
            program()
    with pytest.raises(ReplayMismatch):
        replayfmt.run(plain, verify="bitwise")
    assert replayfmt.run(audited, verify="bitwise").outcome == "ok"
    assert "unseen_write" in refused_because(empty)


def test_an_operator_that_fails_half_way_leaves_work_that_no_op_stands_for(tmp_path: Path) -> None:
    @torch.library.custom_op("graphs_here::half_way", mutates_args=["x"], device_types="sim")
    def half_way(x: torch.Tensor) -> None:
        sim.launch_beside(x)
        raise ValueError("half way")

    def issue(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="half way"):
            half_way(x)
        return x + 1

    path, x = tmp_path / "a.opreplay", torch.ones(4).to(DEVICE)
    with replayfmt.capture(path):
        graph, result = graph_of(lambda: issue(x))
        graph.replay()
        assert result.tolist() == [3] * 4
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}


def test_a_device_that_does_not_tell_what_a_graph_holds_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = tmp_path / "a.opreplay", torch.ones(4).to(DEVICE)

    def captured(path: Path) -> str:
        with replayfmt.capture(path):
            graph, result = graph_of(lambda: x * 2)
            graph.replay()
            result.tolist()
        return replays_bitwise(path)[1]

    said = "not checked for work that no operator issued"
    assert said not in captured(path)
    frontier = sim.capture_frontier
    monkeypatch.setattr(sim, "capture_frontier", list)
    text = captured(tmp_path / "blind.opreplay")
    assert f"{said}: the device told of no work of aten::mul, which has some" in text
    monkeypatch.setattr(sim, "capture_frontier", lambda: frontier(1))
    assert f"{said}: capture_frontier of PyTorch's module for sim failed" in captured(tmp_path / "c.opreplay")
    monkeypatch.setattr(sim, "capture_frontier", frontier)
    monkeypatch.delattr(sim, "capture_frontier")
    text = captured(tmp_path / "b.opreplay")
    assert f"{said}: PyTorch's module for sim has no capture_frontier" in text


def test_a_copy_to_the_host_lands_where_the_program_reads_it(tmp_path: Path) -> None:
    def program() -> list[list[float]]:
        x = torch.arange(4.0).to(DEVICE)
        graph, brought = graph_of(lambda: (x * 2).to("cpu", non_blocking=True))
        seen = []
        for number in range(3):
            x.fill_(number + 1.0)
            graph.replay()
            torch.accelerator.synchronize()
            seen.append(brought.tolist())
        return seen

    path = tmp_path / "a.opreplay"
    assert program() == [[2] * 4, [4] * 4, [6] * 4]
    with replayfmt.capture(path):
        program()
    assert not open_capture(path).summary.unsupported
    assert body_of(path) == ["aten::mul.Tensor", "aten::_to_copy.default"]
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_ops_of_the_host_may_run_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where following streams begins late, with a wait that no capture permits."""
    monkeypatch.setattr(device_streams, "tells_of_memory", lambda _kind: True)
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)
    x.add_(1)
    with replayfmt.capture(path):
        x.add_(1)
        graph, result = graph_of(lambda: x * 2 + torch.ones(3).sum())
        graph.replay()
        assert result.tolist() == [7, 9, 11, 13]
    assert len(graphs_in(path)) == 1 and not open_capture(path).summary.unsupported
    replays_bitwise(path)


def test_a_recording_may_end_while_a_graph_is_captured(tmp_path: Path) -> None:
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)
    recording = replayfmt.Recorder(path)
    recording.start()
    x.add_(1)

    def issue() -> Any:
        y = x * 2
        recording.close()
        return y + 1

    graph, result = graph_of(issue)
    graph.replay()
    assert result.tolist() == [3, 5, 7, 9]
    assert not _get_current_dispatch_mode_stack()
    with open_capture(path) as reader:
        assert reader.complete and not reader.summary.unsupported
    assert calls(path) == ["aten::add_"]


def test_a_scope_may_end_while_a_graph_is_captured_and_its_digests_come_later(tmp_path: Path) -> None:
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)

    def issue() -> Any:
        with replayfmt.scope("inside"):
            return x * 2

    with replayfmt.capture(path):
        x.add_(1)
        graph, result = graph_of(issue)
        graph.replay()
        result.tolist()
    assert not open_capture(path).summary.unsupported
    assert "2 digests" in replays_bitwise(path)[1]


base = torch._C._acceleratorGraph  # type: ignore[attr-defined]
begin_in_cpp = base.capture_begin  # which no recorder has seen


def test_a_graph_of_the_base_class_is_one_as_any(tmp_path: Path) -> None:
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)
    with replayfmt.capture(path):
        graph = base(False)
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE):
            graph.capture_begin(None)
            y = x * 2
            graph.capture_end()
        graph.replay()
        assert y.tolist() == [0, 2, 4, 6]
    assert len(graphs_in(path)) == 1 and not open_capture(path).summary.unsupported
    assert body_of(path) == ["aten::mul.Tensor"]
    replays_bitwise(path)


def test_the_seeds_that_pytorch_keeps_for_a_graph_are_no_memory_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a generator of CUDA: C++ allocates them when a first graph is captured, and fills them for each
    capture and each replay. They live as long as any graph, maybe one that the program captured before."""
    path, x, replay_in_cpp = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE), base.replay
    seeds: list[torch.Tensor] = []

    def register(_graph: Any, _generator: Any) -> None:
        seeds.append(torch.empty(1, dtype=torch.int64, device=DEVICE))

    def begin(graph: Any, **options: Any) -> None:
        seeds.append(torch.empty(1, dtype=torch.int64, device=DEVICE))
        for each in seeds:
            each.fill_(0)
        begin_in_cpp(graph, **options)

    def replay(graph: Any) -> None:
        for each in seeds:
            each.fill_(4)
        replay_in_cpp(graph)

    with monkeypatch.context() as patched:
        for name, method in (("register_generator_state", register), ("capture_begin", begin), ("replay", replay)):
            patched.setattr(base, name, method, raising=False)
        with replayfmt.capture(path):
            graph = torch.accelerator.Graph()
            graph.register_generator_state(None)  # type: ignore[attr-defined]
            torch.accelerator.synchronize()
            with torch.Stream(DEVICE), graph:
                x.mul_(2)
            torch.accelerator.synchronize()
            graph.replay()
            assert x.tolist() == [0, 2, 4, 6]
    assert [each.tolist() for each in seeds] == [[4], [4]]
    replays_bitwise(path)
    assert "aten::fill_" not in calls(path) and "aten::empty" not in calls(path)


def test_what_a_class_of_graphs_does_around_its_base_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions run functions of the program when a capture begins and ends, and before and after each replay."""
    original, seen = torch.accelerator.Graph, []
    begin, replay = original.capture_begin, original.replay
    x, static = torch.arange(4.0).to(DEVICE), torch.zeros(4, device=DEVICE)

    def begun(graph: torch.accelerator.Graph) -> None:
        begin(graph)
        static.add_(1)

    def replayed(graph: torch.accelerator.Graph) -> None:
        static.copy_(x)
        replay(graph)
        seen.append((static * 3).tolist())

    monkeypatch.setattr(original, "capture_begin", begun)
    monkeypatch.setattr(original, "replay", replayed)
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        graph, _result = graph_of(lambda: static.mul_(2))
        graph.replay()
    assert seen == [[6.0, 12.0, 18.0, 24.0]]
    assert not open_capture(path).summary.unsupported
    assert body_of(path) == ["aten::add_.Tensor", "aten::mul_.Tensor"]
    (number,) = (calls(path).index(kernel.name) for kernel in graphs_in(path))
    assert calls(path)[number - 1] == "aten::copy_" and "aten::mul" in calls(path)[number + 1]
    replays_bitwise(path)


def test_a_capture_may_end_in_two_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `capture_end_pre` and `capture_end_post` of PyTorch 2.15."""
    monkeypatch.setattr(base, "capture_end_pre", base.capture_end, raising=False)
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)
    with replayfmt.capture(path):
        graph = base(False)
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE):
            graph.capture_begin(None)
            y = x * 2
            graph.capture_end_pre()
        graph.replay()
        assert (y + 1).tolist() == [1, 3, 5, 7]
    assert len(graphs_in(path)) == 1 and not open_capture(path).summary.unsupported
    assert "aten::add" in calls(path)
    replays_bitwise(path)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_issued_to_a_graph_whose_beginning_was_not_seen_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The program does as ever: nothing waits for the device or reads its memory meanwhile."""
    monkeypatch.setattr(device_streams, "tells_of_memory", lambda _kind: late)
    path, x = tmp_path / "a.opreplay", torch.arange(4.0).to(DEVICE)
    with replayfmt.capture(path):
        graph = base(False)
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE):
            begin_in_cpp(graph, None, "default")
            with replayfmt.scope("inside"):
                y = x * 2 + torch.ones(2).sum()
                z = torch.zeros(4, device=DEVICE)
            graph.capture_end()
        graph.replay()
        assert y.tolist() == [2, 4, 6, 8] and not z.any()
    with open_capture(path) as reader:
        assert reader.complete and reader.summary.unsupported["cuda_graph"] == 4  # the replay, too
        assert "aten::ones" in calls(path)
    assert "the recorder did not see that begin" in refused_because(path)


class _WithBranches(torch.accelerator.Graph):
    """What `torch.cuda.CUDAGraph` has for conditional nodes: a part is captured on a stream of its own."""

    def begin_capture_to_if_node(self, _predicate: torch.Tensor) -> None:
        self.branch, self.before = torch.Stream(DEVICE), torch.accelerator.current_stream()
        self.branch.wait_stream(self.before)
        torch.accelerator.set_stream(self.branch)

    begin_capture_to_while_node = begin_capture_to_if_node

    def end_capture_to_conditional_node(self) -> None:
        self.before.wait_stream(self.branch)
        torch.accelerator.set_stream(self.before)


@pytest.mark.parametrize("begin", ["begin_capture_to_if_node", "begin_capture_to_while_node"])
def test_a_graph_with_a_part_that_is_run_on_a_condition_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", _WithBranches)
    path, x = tmp_path / "a.opreplay", torch.ones(4).to(DEVICE)
    with replayfmt.capture(path):
        graph = _WithBranches()
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE), graph:
            getattr(graph, begin)(x.sum() > 0)
            y = x * 2
            graph.end_capture_to_conditional_node()
        graph.replay()
        assert y.tolist() == [2] * 4
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}
    assert "parts of it are run on a condition" in refused_because(path)
