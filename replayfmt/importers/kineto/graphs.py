"""CUDA and HIP graphs in profiler traces: where one was captured, and the operators behind the kernels of its
launches.

While a graph is captured, operators run but not their launches: each launch becomes a node of the graph. These
operators therefore cannot be chosen by the device work that they launched: there is none. A trace of a graph's
execution has one launch and all of its kernels; the trace of its capture has the operators and their launches, but no
kernels. Each launch in the latter corresponds to a kernel in the former, in the same order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .events import TraceEvents
from .tree import CallTree, GraphCaptured

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


def captured(events: TraceEvents, tree: CallTree, windows: list[CaptureWindow]) -> GraphCaptured:
    """The operators of a trace that were captured into graphs, and its launches that did no work."""
    start, thread = np.asarray(events.ops.start, np.int64), np.asarray(events.ops.thread, np.int64)
    ops = np.zeros(len(start), bool)
    for window in windows:
        ops |= (thread == window.thread) & (start > window.start) & (start < window.end)
    launches = np.asarray(sorted(launch for window in windows for launch in window.launches), np.int64)
    worked = np.zeros(len(events.launches.start), bool)
    worked[tree.work_launch[tree.work_launch >= 0]] = True
    return GraphCaptured(ops, launches[~worked[launches]] if len(launches) else launches)


_ALLOWED_LOSS = 100  # one kernel in this many may be missing: profilers lose some


@dataclass(frozen=True)
class _Node:
    """What a launch put into a graph, or a piece of work was: `kernel`, `memcpy` or `memset`, and the kernel's name,
    "" where the trace does not say."""

    kind: str
    name: str = ""


@dataclass
class _Capture:
    file: str
    events: TraceEvents
    window: CaptureWindow
    nodes: list[_Node]


def give_operators(events: TraceEvents, captures: Sequence[tuple[str, TraceEvents]]) -> list[str]:
    """Insert the operators of captures (by file name) where `events` launch their graphs; returns sentences about the
    outcome."""
    known = [
        _Capture(name, each, window, _launched(each, window))
        for name, each in captures
        for window in capture_windows(each)
    ]
    notes = [
        f"{name}: no graph was captured in it"
        for name, each in captures
        if not any(capture.events is each for capture in known)
    ]
    if not any(events.launches.graph):
        return [*notes, "no graph is launched in the trace: its graph captures were not needed"]
    given, kernels, unknown, lost = Counter[str](), Counter[str](), 0, 0
    unnamed: set[str] = set()
    next_id = 1 + max(
        (max(column, default=0) for column in (events.launches.correlation, events.work.correlation)), default=0
    )
    graphs = _graph_launches(events)
    matching = _Matching(known, [[_ran(events, each) for each in work] for _launch, work in graphs])
    for place, (launch, work) in enumerate(graphs):
        capture = matching.capture(place)
        nodes = None if capture is None else matching.nodes(capture, place)
        if capture is None or nodes is None:
            unknown += 1
            continue
        next_id = _Splice(events, launch, capture).splice(dict(zip(nodes, work, strict=True)), next_id)
        given[capture.file] += 1
        kernels[capture.file] += len(work)
        lost += len(capture.nodes) - len(work)
        if not all(node.name or node.kind != "kernel" for node in capture.nodes):
            unnamed.add(capture.file)
    for name, count in given.items():
        how = "by their order alone: its launches do not name kernels" if name in unnamed else "by name and order"
        notes.append(
            f"{kernels[name]} kernels of {count} graph launches were given to the operators that {name} shows "
            f"while the graph was captured, {how}"
        )
    if lost:
        notes.append(f"{lost} nodes of these graphs have no kernel in the trace")
    if unknown and known:
        notes.append(f"{unknown} graph launches fit none of the captures, or several different ones")
    return notes


def _graph_launches(events: TraceEvents) -> list[tuple[int, list[int]]]:
    """Every launch of a graph with its work, both in order of time."""
    launches, by_id = events.launches, dict[int, int]()
    for launch in np.flatnonzero(np.asarray(launches.graph, bool)).tolist():
        by_id[launches.correlation[launch]] = launch
    by_id.pop(-1, None)
    found: dict[int, list[int]] = defaultdict(list)
    for each, number in enumerate(events.work.correlation):
        if number in by_id:
            found[by_id[number]].append(each)
    return [
        (launch, sorted(work, key=lambda each: events.work.start[each]))
        for launch, work in sorted(found.items(), key=lambda item: launches.start[item[0]])
    ]


def _launched(events: TraceEvents, window: CaptureWindow) -> list[_Node]:
    launches, names = events.launches, list(events.launches.names)
    nodes = []
    for launch in window.launches:
        name, work = names[launches.name[launch]].lower(), launches.work[launch]
        kind = next((each for each in ("memcpy", "memset") if each in name), "kernel")
        nodes.append(_Node(kind, events.launch_kinds[work].name if work >= 0 and kind == "kernel" else ""))
    return nodes


def _ran(events: TraceEvents, work: int) -> _Node:
    kind = events.work_kinds[events.work.kind[work]]
    return _Node(next((each for each in ("memcpy", "memset") if each in kind.category), "kernel"), kind.name)


class _Matching:
    """Determines which capture each graph launch executes. `ran` is the work of each launch."""

    def __init__(self, captures: list[_Capture], ran: list[list[_Node]]) -> None:
        self._captures, self._ran = captures, ran
        self._matched: dict[tuple[tuple[_Node, ...], tuple[_Node, ...]], list[int] | None] = {}
        turns = [
            turn
            for turn in range(len(captures))
            if all(self.nodes(captures[(turn + place) % len(captures)], place) is not None for place in range(len(ran)))
        ]
        self._turn = turns[0] if len(turns) == 1 else None  # they are launched one after the other, as captured

    def nodes(self, capture: _Capture, place: int) -> list[int] | None:
        """The capture's node for each piece of a launch's work; None if it is another graph."""
        key = tuple(capture.nodes), tuple(self._ran[place])
        if key not in self._matched:
            self._matched[key] = match(*key)
        return self._matched[key]

    def capture(self, place: int) -> _Capture | None:
        """The capture of a launch; None if none fits, or several different ones do."""
        if self._turn is not None:
            return self._captures[(self._turn + place) % len(self._captures)]
        fitting = [each for each in self._captures if self.nodes(each, place) is not None]
        alike = all(each.events is fitting[0].events and _kinds(each) == _kinds(fitting[0]) for each in fitting)
        return fitting[0] if fitting and alike else None


def match(nodes: Sequence[_Node], ran: Sequence[_Node]) -> list[int] | None:
    """Which node each piece of work is: in the same order, where few may be missing; or, where kernels overtake each
    other on several streams, by name and in the order of that name. None if neither is so."""
    found: list[int] = []
    place = 0
    for each in ran:
        while place < len(nodes) and not (nodes[place].kind == each.kind and nodes[place].name in ("", each.name)):
            place += 1
        if place == len(nodes):
            break
        found.append(place)
        place += 1
    missing = len(nodes) - len(ran)
    if (
        len(found) == len(ran)
        and missing <= max(1, len(nodes) // _ALLOWED_LOSS)
        and (not missing or all(node.name for node in nodes if node.kind == "kernel"))
    ):
        return found
    if missing or not all(node.name for node in nodes if node.kind == "kernel"):
        return None
    waiting: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for index, node in enumerate(nodes):
        waiting[node.kind, node.name].append(index)
    keys = [(each.kind, each.name if each.kind == "kernel" else "") for each in ran]
    return (
        [waiting[key].popleft() for key in keys]
        if Counter(keys) == {key: len(places) for key, places in waiting.items()}
        else None
    )


def _kinds(capture: _Capture) -> list[int]:
    ops = capture.events.ops
    return [ops.kind[index] for index in _ops_of(capture)]


def _ops_of(capture: _Capture) -> list[int]:
    """The operators around the launches of a capture, callers before callees."""
    ops, window = capture.events.ops, capture.window
    start, thread = np.asarray(ops.start, np.int64), np.asarray(ops.thread, np.int64)
    end = start + np.asarray(ops.duration, np.int64)
    inside = np.flatnonzero((thread == window.thread) & (start > window.start) & (start < window.end))
    times = np.sort(np.asarray([capture.events.launches.start[launch] for launch in window.launches], np.int64))
    around = np.searchsorted(times, start[inside], "left") < np.searchsorted(times, end[inside], "right")
    chosen = [each for each in inside[around].tolist() if not capture.events.kinds[ops.kind[each]].annotation]
    return sorted(chosen, key=lambda each: (ops.start[each], ops.external[each], -ops.duration[each]))


class _Splice:
    """One graph launch of `events` that gets the operators of a capture."""

    def __init__(self, events: TraceEvents, launch: int, capture: _Capture) -> None:
        self._events, self._launch, self._capture = events, launch, capture

    def splice(self, work: dict[int, int], next_id: int) -> int:
        """Add the operators and launches of the capture, with the work by node; returns the next free id.

        Their times are their order: as many nanoseconds after the graph's launch as there are beginnings and ends
        before them.
        """
        events, source, window = self._events, self._capture.events, self._capture.window
        chosen = _ops_of(self._capture)
        moments = [
            time
            for each in chosen
            for time in (source.ops.start[each], source.ops.start[each] + source.ops.duration[each])
        ]
        moments += [source.launches.start[launch] for launch in window.launches]
        begin = events.launches.start[self._launch]
        when = {time: begin + place for place, time in enumerate(sorted(set(moments)), 1)}
        thread = events.borrow_thread(events.launches.thread[self._launch])
        for each in chosen:
            start, end = source.ops.start[each], source.ops.start[each] + source.ops.duration[each]
            events.durations[len(events.ops.start)] = end - start
            events.ops.start.append(when[start])
            events.ops.duration.append(when[end] - when[start])
            events.ops.thread.append(thread)
            events.ops.external.append(-1)
            events.ops.kind.append(events.kind_number(source.kinds[source.ops.kind[each]]))
        for node, launch in enumerate(window.launches):
            if node in work:
                self._node(work[node], launch, when[source.launches.start[launch]], thread, next_id)
                next_id += 1
        return next_id

    def _node(self, work: int, launch: int, start: int, thread: int, number: int) -> None:
        launches, source = self._events.launches, self._capture.events.launches
        launches.start.append(start)
        launches.thread.append(thread)
        launches.correlation.append(number)
        launches.external.append(-1)
        name = list(source.names)[source.name[launch]]
        launches.name.append(launches.names.setdefault(name, len(launches.names)))
        launches.work.append(-1)
        launches.graph.append(0)
        self._events.work.correlation[work] = number
        self._events.work.external[work] = -1
