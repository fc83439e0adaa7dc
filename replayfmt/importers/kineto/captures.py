"""Parts of a profiler trace in which a CUDA or HIP graph was captured: operators run there, but not their launches.

Each launch becomes a node of the graph, which the device executes whenever the graph is launched. The operators
therefore cannot be chosen by the device work that they launched: there is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from .events import TraceEvents
from .tree import Captured, Tree

# Runtime calls that add a node to a graph; all others only query the runtime.
_NODE = re.compile(r"Launch(?!HostFunc)|Memcpy|Memset|launch_kernel", re.IGNORECASE)
_BEGINS, _ENDS = "BeginCapture", "EndCapture"
_MOST = 1 << 62


@dataclass(frozen=True)
class CaptureWindow:
    """One capture of a graph: the activity of thread `thread` from `start` to `end`, in nanoseconds. `launches` are
    those that became its nodes, in order."""

    thread: int
    start: int
    end: int
    launches: list[int] = field(default_factory=list)


def capture_windows(events: TraceEvents) -> list[CaptureWindow]:
    """Every capture of a graph, in order of time; without a recorded beginning or end it reaches to the trace's
    edge."""
    launches = events.launches
    names = list(launches.names)
    marks = [place for place, name in enumerate(names) if _BEGINS in name or _ENDS in name]
    if not marks:
        return []
    name, start, thread = (np.asarray(column, np.int64) for column in (launches.name, launches.start, launches.thread))
    windows: list[CaptureWindow] = []
    for each in np.unique(thread[np.isin(name, marks)]).tolist():
        own = np.flatnonzero(thread == each)
        begun = -_MOST
        for index in own[np.argsort(start[own], kind="stable")].tolist():
            if _BEGINS in names[name[index]]:
                begun = int(start[index])
            elif _ENDS in names[name[index]]:
                windows.append(CaptureWindow(each, begun, int(start[index])))
                begun = _MOST
        if begun not in (_MOST, -_MOST):
            windows.append(CaptureWindow(each, begun, _MOST))
    nodes = np.asarray([_NODE.search(each) is not None and "Graph" not in each for each in names], bool)[name]
    for window in windows:
        inside = np.flatnonzero(nodes & (thread == window.thread) & (start > window.start) & (start < window.end))
        window.launches.extend(inside[np.argsort(start[inside], kind="stable")].tolist())
    return sorted((window for window in windows if window.launches), key=lambda window: window.start)


def captured(events: TraceEvents, tree: Tree, windows: list[CaptureWindow]) -> Captured:
    """The operators of a trace that were captured into graphs, and its launches that did no work."""
    start, thread = np.asarray(events.ops.start, np.int64), np.asarray(events.ops.thread, np.int64)
    ops = np.zeros(len(start), bool)
    for window in windows:
        ops |= (thread == window.thread) & (start > window.start) & (start < window.end)
    launches = np.asarray(sorted(launch for window in windows for launch in window.launches), np.int64)
    worked = np.zeros(len(events.launches.start), bool)
    worked[tree.work_launch[tree.work_launch >= 0]] = True
    return Captured(ops, launches[~worked[launches]] if len(launches) else launches)
