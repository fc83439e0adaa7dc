"""Graphs that share memory, streams and objects, tried on the simulated accelerator. Run by test_accelerator.py in a
process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device import devices_as_they_were, recorder, register  # noqa: F401 - fixtures of every test
from graphs_on_device import DEVICE, calls, graph_of, graphs_in, replays_bitwise

import replayfmt
from replayfmt.format.codes import RecordKind
from replayfmt.format.races import find_races
from replayfmt.format.reader import open_capture

sim = register()


def recorded(path: Path, program: Callable[[], Any]) -> Path:
    """A capture of a program that does the same without one."""
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected
    assert not open_capture(path).summary.unsupported, open_capture(path).summary.unsupported
    return path


def captured_on(stream: torch.Stream, issue: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    graph = torch.accelerator.Graph(**options)
    torch.accelerator.synchronize()
    with stream, graph:
        result = issue()
    return graph, result


def test_a_graph_that_writes_over_what_another_of_its_pool_left_is_known_to(tmp_path: Path) -> None:
    def program() -> list[Any]:
        x, stream = torch.arange(1.0, 5.0).to(DEVICE), torch.Stream(DEVICE)
        first, one = captured_on(stream, lambda: (x * 2) + 1)
        second, other = captured_on(stream, lambda: x * 5, pool=first.pool())
        seen = []
        for _ in range(2):
            second.replay()
            seen.append(other.tolist())
            first.replay()  # whose x * 2 was where the other graph has its result
            seen += [one.tolist(), other.tolist()]
        return seen

    expected = program()
    assert expected[0] == [5, 10, 15, 20] and expected[2] == [2, 4, 6, 8]
    path = recorded(tmp_path / "a.opreplay", program)
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_graphs_of_a_pool_that_run_in_turns_import_nothing_that_is_written_anew(tmp_path: Path) -> None:
    def program() -> list[Any]:
        x, stream = torch.arange(1.0, 5.0).to(DEVICE), torch.Stream(DEVICE)
        first, one = captured_on(stream, lambda: (x * 2) + 1)
        second, other = captured_on(stream, lambda: x * 5, pool=first.pool())
        seen = []
        for _ in range(3):
            first.replay()
            seen.append(one.tolist())
            second.replay()
            seen.append(other.tolist())
        return seen

    path = recorded(tmp_path / "a.opreplay", program)
    assert not open_capture(path).summary.records.get(RecordKind.storage_import)
    replays_bitwise(path)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_object_can_be_reset_and_captured_again(tmp_path: Path, mode: str) -> None:
    def program() -> list[Any]:
        x = torch.ones(3).to(DEVICE)
        graph, one = graph_of(lambda: x * 2, capture_error_mode=mode)
        graph.replay()
        seen = [one.tolist()]
        graph.reset()
        with pytest.raises(RuntimeError, match="nothing was captured"):
            graph.replay()
        torch.accelerator.synchronize()
        with torch.Stream(DEVICE), graph:
            other = x * 7
        graph.replay()
        return [*seen, other.tolist()]

    path = tmp_path / "a.opreplay"
    expected = program()
    with replayfmt.capture(path):
        assert program() == expected == [[2] * 3, [7] * 3]
    # The replay that raised did nothing that could be replayed.
    assert len(graphs_in(path)) == 2
    assert [name for name in calls(path) if name.startswith("graph::")] == ["graph::captured_1", "graph::captured_2"]


def test_a_graph_on_another_stream_with_an_edge_is_ordered(tmp_path: Path) -> None:
    def program() -> list[Any]:
        x, other = torch.zeros(3).to(DEVICE), torch.Stream(DEVICE)
        graph, result = graph_of(lambda: x + 1)
        main = torch.accelerator.current_stream()
        seen = []
        for number in range(2):
            x.fill_(float(number))
            other.wait_stream(main)
            with other:
                graph.replay()
            main.wait_stream(other)
            seen.append(result.tolist())
        return seen

    path = recorded(tmp_path / "a.opreplay", program)
    assert not find_races(open_capture(path))
    for mode in ("captured", "issued"):
        replays_bitwise(path, graphs=mode)


def test_a_graph_of_a_scope_that_is_replayed_after_it_is_the_same_graph(tmp_path: Path) -> None:
    def program() -> list[Any]:
        x = torch.zeros(3).to(DEVICE)
        with replayfmt.scope("warm up"):
            graph, result = graph_of(lambda: x.add_(1) * 2)
            graph.replay()
        seen = [result.tolist()]
        with replayfmt.scope("decode"):
            graph.replay()
            seen.append(result.tolist())
        graph.replay()
        return [*seen, result.tolist()]

    path = recorded(tmp_path / "a.opreplay", program)
    assert len(graphs_in(path)) == 1
    replays_bitwise(path)
