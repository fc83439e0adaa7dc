"""Calls of one op in a device graph: launched together, so that a device does not wait for the host between them.

A graph holds many calls of an op. Of an op that writes its inputs it holds putting them back before each call, too; a
second graph of putting back alone is launched in turns with it and subtracted, sample by sample. What cannot be put
into a graph (it waits for the device, works on the host, draws from a generator that graphs do not know, launches
nothing) is said with its reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from replayfmt.pytorch.device_graphs import captured
from replayfmt.replay.run.isolated import IsolatedOp

from ..device_graphs import require_graphs

# A launch of a graph takes some microseconds on the host: the calls in it take much longer.
_GRAPH_NS = 500_000
_MOST_CALLS = 1000
_SHOWN = 200

# Records what a function does into a graph, and returns what launches that. Raises NoGraph.
RecordGraph = Callable[[Callable[[], None]], Callable[[], None]]


class NoGraph(Exception):
    """Work that cannot be put into a graph; the message says why."""


@dataclass(frozen=True)
class OpGraph:
    """`calls` calls of an op in one graph. `restoring` launches as many times putting back what it writes, None if it
    writes nothing."""

    calls: int
    launch: Callable[[], None]
    restoring: Callable[[], None] | None


def graphs_of(devices: Sequence[torch.device]) -> RecordGraph:
    """What records graphs on the device of a plan. Raises UsageError if there is none."""
    device = require_graphs(devices)

    def record(work: Callable[[], None]) -> Callable[[], None]:
        return _record(work, device)

    return record


def _record(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    stream = torch.Stream(device)
    torch.accelerator.synchronize(device)
    with stream:
        work()  # what a first use sets up is no part of the graph
    torch.accelerator.synchronize(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            graph = captured(device, work)
        except Exception as error:  # each operator has its own way to say so
            cause = error.__context__ or error  # ending the graph fails, too
            raise NoGraph(f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:_SHOWN]}") from error
    if any("empty" in str(each.message) for each in said):
        raise NoGraph("it launches nothing on the device's stream, so its graph is empty")
    replay: Callable[[], None] = graph.replay
    return replay


def graph_of(op: IsolatedOp, call_ns: float, record: RecordGraph) -> OpGraph:
    """A graph of calls that take `call_ns` each. Raises NoGraph."""
    calls = int(min(max(_GRAPH_NS / max(call_ns, 1.0), 1.0), _MOST_CALLS))

    def restore() -> None:
        for _ in range(calls):
            op.restore()

    def run() -> None:
        for _ in range(calls):
            op.restore()
            op.calls(1)

    if not op.writes:
        return OpGraph(calls, record(lambda: op.calls(calls)), None)
    op.restore()
    memory = op.addresses()
    graph = OpGraph(calls, record(run), record(restore))
    op.restore()
    if op.addresses() != memory:
        raise NoGraph("it moves the memory that it writes, whose addresses a graph keeps")
    return graph
