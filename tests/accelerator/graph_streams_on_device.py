"""Graphs that are captured over several streams, tried on the simulated accelerator. Run by test_accelerator.py in a
process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from graphs_on_device import DEVICE, graph_of, graphs_in, replays_bitwise
from in_process import Tools, tools  # noqa: F401 - a fixture
from replay.rewriting import rewrite

import replayfmt
from replayfmt import Plan
from replayfmt.errors import ReplayRefused
from replayfmt.format.attachments import BODY, contents_of, open_body
from replayfmt.format.codes import RecordKind
from replayfmt.format.races import judge_races
from replayfmt.format.reader import open_capture
from replayfmt.replay.resolution.graph_bodies import check_edges

sim = register()


def forked(*, joined: bool = True, ordered: bool = True) -> list[float]:
    """A graph on two streams. Without `ordered`, the second one does not wait for what it reads."""
    x, other = torch.ones(4).to(DEVICE), torch.Stream(DEVICE)

    def issue() -> torch.Tensor:
        main = torch.accelerator.current_stream()
        if not ordered:
            other.wait_stream(main)
        y = x * 2
        if ordered:
            other.wait_stream(main)
        with other:
            z = y + 1
        y2 = y * 3
        if joined:
            main.wait_stream(other)
        return z * y2

    graph, result = graph_of(issue)
    graph.replay()
    return result.tolist()  # type: ignore[no-any-return]


def in_body(path: Path) -> list[tuple[str, int]]:
    """What the body of a capture's only graph does: the kinds of its records or their ops, and their streams."""
    reader = open_capture(path)
    (kernel,) = graphs_in(path)
    found = []
    with open_body(contents_of(reader, kernel)) as body:
        for record in body.records():
            if record.kind is RecordKind.op:
                placement = body.placements[record.placement] if record.placement else None
                name = body.kernels[record.signature.kernel].name  # type: ignore[union-attr]
                found.append((name, placement.streams[0][1] if placement else 0))
            else:
                stream = record.argument("stream")
                assert isinstance(stream, int)
                found.append((record.kind.name, stream))
    return found


def captured(path: Path, program: Callable[[], Any], **options: Any) -> Path:
    with replayfmt.capture(path, **options):
        program()
    return path


def test_streams_inside_of_a_graph_and_their_edges_are_kept(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path), replayfmt.scope("execute"):
        assert forked() == [18] * 4
    assert in_body(path) == [
        ("aten::mul", 0),
        ("event_record", 0),
        ("event_wait", 1),
        ("aten::add", 1),
        ("aten::mul", 0),
        ("event_record", 1),
        ("event_wait", 0),
        ("aten::mul", 0),
    ]
    assert not {RecordKind.event_record, RecordKind.event_wait} & set(open_capture(path).summary.records)
    assert not judge_races(open_capture(path)).sentences
    for mode in ("captured", "issued"):
        sim.forget_launches()
        assert "on 2 streams" in replays_bitwise(path, graphs=mode)[1]
        assert len(sim.launched()) > 1
    sim.forget_launches()
    done = tools("run", "--verify=bitwise", "--streams=serial", path)
    assert done.code == 0 and "on one stream instead of 2 (--streams=serial)" in done.out, done.err
    assert len(sim.launched()) == 1
    assert "on one stream instead of 2" in replays_bitwise(path, device="cpu")[1]


def test_an_edge_that_is_taken_out_of_a_graph_is_found(tmp_path: Path, tools: Tools) -> None:  # noqa: F811
    sim.tolerate_races(True)
    try:
        path = captured(tmp_path / "a.opreplay", lambda: forked(ordered=False))
    finally:
        sim.tolerate_races(False)
    (race,) = judge_races(open_capture(path)).sentences
    assert race.startswith("inside graph::captured_1.v") and "aten::mul" in race and "aten::add" in race
    done = tools("check", path)
    assert done.code == 0 and "race         inside graph::captured_1" in done.out
    with Plan(path) as plan, pytest.raises(Exception, match="no event lies between them"):
        plan.execute()


def test_a_stream_that_is_not_joined_ends_the_capture_of_a_graph_as_it_would(tmp_path: Path) -> None:
    path, x = tmp_path / "a.opreplay", torch.ones(4).to(DEVICE)
    with replayfmt.capture(path):
        with pytest.raises(RuntimeError, match="does not wait for"):
            forked(joined=False)
        x.add_(1)
    assert not graphs_in(path)


def test_a_backward_pass_on_the_streams_of_the_forward_one_is_part_of_a_graph(tmp_path: Path) -> None:
    def program() -> list[list[float]]:
        x, weight = torch.arange(4.0).to(DEVICE), torch.ones(4).to(DEVICE).requires_grad_()
        weight.grad = torch.zeros_like(weight)
        other = torch.Stream(DEVICE)

        def issue() -> torch.Tensor:
            main = torch.accelerator.current_stream()
            y = weight * x
            other.wait_stream(main)
            with other:
                z = (y * y).sum()
            main.wait_stream(other)
            z.backward()
            return z.detach()

        graph, loss = graph_of(issue)
        seen = []
        for number in range(2):
            x.fill_(number + 1.0)
            graph.replay()
            seen.append([loss.item(), *weight.grad.tolist()])
        return seen

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert not open_capture(path).summary.unsupported, open_capture(path).summary.unsupported
    assert {stream for _name, stream in in_body(path)} == {0, 1}
    for mode in ("captured", "issued"):
        assert "on 2 streams" in replays_bitwise(path, graphs=mode)[1]


def test_memory_that_another_stream_of_a_graph_uses_is_not_reused_before_that_is_done(tmp_path: Path) -> None:
    def program() -> list[float]:
        x, other = torch.ones(4).to(DEVICE), torch.Stream(DEVICE)

        def issue() -> torch.Tensor:
            main = torch.accelerator.current_stream()
            y = x * 2
            other.wait_stream(main)
            with other:
                z = y + 1
            y.record_stream(other)
            del y
            w = x * 5  # must not get the memory of y, which the other stream may not have read yet
            main.wait_stream(other)
            return z + w

        graph, result = graph_of(issue)
        graph.replay()
        return result.tolist()  # type: ignore[no-any-return]

    path = tmp_path / "a.opreplay"
    with replayfmt.capture(path):
        assert program() == [8] * 4
    assert not open_capture(path).summary.unsupported
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)
    assert sim.races() == 0


def test_what_other_streams_are_given_meanwhile_is_none_of_the_graph(tmp_path: Path) -> None:
    def program() -> list[list[float]]:
        x, y, other = torch.ones(4).to(DEVICE), torch.ones(4).to(DEVICE), torch.Stream(DEVICE)
        torch.accelerator.synchronize()

        def issue() -> torch.Tensor:
            with other:
                y.add_(1)  # at once
            return x + 1

        graph, result = graph_of(issue)
        graph.replay()
        torch.accelerator.synchronize()
        return [result.tolist(), y.tolist()]

    path = tmp_path / "a.opreplay"
    assert program() == [[2] * 4, [2] * 4]
    with replayfmt.capture(path):
        assert program() == [[2] * 4, [2] * 4]
    assert in_body(path) == [("aten::add", 0)]
    assert open_capture(path).summary.unsupported == {"cuda_graph": 1}
    with pytest.raises(ReplayRefused) as refused, Plan(path):
        pass
    assert "aten::add_" in "".join(refused.value.findings) and "which waits for no event" in "".join(
        refused.value.findings
    )


def test_a_graph_on_several_streams_of_a_device_that_tells_no_edges_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sim, "_gpu_trace")
    path = captured(tmp_path / "a.opreplay", forked)
    with pytest.raises(ReplayRefused) as refused, Plan(path):
        pass
    assert "does not tell what orders them" in "".join(refused.value.findings)


@pytest.mark.parametrize(
    ("kind", "stream", "words"),
    [
        (RecordKind.event_wait, 1, "gives work to stream 1, which waits for no other one of it"),
        (RecordKind.event_record, 0, "waits for event 1, which is not recorded before"),
        (RecordKind.event_wait, 0, "at its end nothing waits for what its body gave to stream 1"),
    ],
)
def test_a_body_whose_streams_are_not_part_of_one_graph_is_refused(
    tmp_path: Path, kind: RecordKind, stream: int, words: str
) -> None:
    path = captured(tmp_path / "a.opreplay", forked)
    reader = open_capture(path)
    whole = tmp_path / "whole.opreplay"
    whole.write_bytes(contents_of(reader, graphs_in(path)[0])[BODY])
    with open_capture(whole) as body:
        check_edges(body)
    less = rewrite(
        whole,
        tmp_path / "less.opreplay",
        change=lambda record, ints, _floats: not (record.kind is kind and ints[1] == stream),
    )
    with open_capture(less) as body, pytest.raises(ValueError, match=words):
        check_edges(body)


@pytest.mark.parametrize("options", [{"redact": True}, {"sources": False}, {"payload": "none"}])
def test_a_capture_that_leaves_things_out_keeps_a_body_that_reveals_nothing(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = captured(tmp_path / "a.opreplay", forked, **options)
    assert len(in_body(path)) == 8
    with Plan(path) as plan:
        assert plan.execute().outcome == "ok"


@pytest.mark.parametrize("selection", [["--scope=decode"], ["--kernel=graph::*"]])
def test_a_trimmed_capture_keeps_the_streams_inside_of_graphs(
    tmp_path: Path,
    tools: Tools,  # noqa: F811
    selection: list[str],
) -> None:
    x, other = torch.ones(4).to(DEVICE), torch.Stream(DEVICE)

    def issue() -> torch.Tensor:
        main = torch.accelerator.current_stream()
        y = x * 2
        other.wait_stream(main)
        with other:
            z = y + 1
        main.wait_stream(other)
        return z * y

    path, out = tmp_path / "a.opreplay", tmp_path / "b.opreplay"
    with replayfmt.capture(path):
        graph, result = graph_of(issue)
        with replayfmt.scope("decode"):
            graph.replay()
        result.tolist()
    done = tools("trim", "--verify=none", *selection, path, out)
    assert done.code == 0, done.err
    assert in_body(out) == in_body(path)
    assert tools("check", out).code == 0
    with Plan(out) as plan:
        replayed = plan.execute()
    assert replayed.outcome == "ok" and "on 2 streams" in "".join(replayed.notes)
