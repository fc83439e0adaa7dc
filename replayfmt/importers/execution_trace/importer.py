"""Imports a PyTorch execution trace (ExecutionTraceObserver): a graph in which results of one call are arguments of
others.

Three passes over the file, which therefore need not fit into memory: choosing the nodes that represent the work,
determining the length of each allocation, and writing. Calls keep their order; storages and views are those of the
traced program. Storages that no call produced have no content in the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from replayfmt.errors import InvalidCapture
from replayfmt.format.records.builder import Moment
from replayfmt.pytorch.op_libraries import OpLibraries
from replayfmt.pytorch.traced_names import TracedNames

from ..common.json_stream import JsonStream
from ..common.operators import Operators
from ..common.rank_trace import RankTrace, rank_fields
from ..common.report import ImportReport, most
from ..common.synthesis import ImportedSession, imported_session
from ..common.trace_files import Progress, others_note
from ..rewrites.portable import REWRITES, Portable
from .calls import NodeCalls
from .content import TracedContent
from .nodes import TraceNode, node_of, rank_said, schema_version
from .selection import ChosenNodes, Skeleton
from .selection import Path as MarkPath
from .writing import GraphWriter

KIND = "execution-trace"
_PASSES = 3
_MOST_KEPT = 1 << 16  # nodes, of some kilobytes each


def import_execution_trace(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    libraries: OpLibraries | None = None,
    names: TracedNames | None = None,
    force: bool = False,
    progress: Progress | None = None,
    rewrite: str = "none",
    level: str = "deepest",
    place: RankTrace | None = None,
) -> ImportReport:
    """Make a capture of an execution trace: plain, gzip, or in a tar archive with its resources.

    `place` says which file of an archive it is and which rank's, if that was chosen. `rewrite="portable"` replaces
    operators that only the traced device has with operators that every device has. `level="root"` imports the outermost
    operators instead of the deepest ones that cover all of the work. `progress` is called with the bytes done and the
    total.

    Raises CaptureNotFound and InvalidCapture for the file, UnsupportedVersion for an unknown schema, OutputExists and
    CaptureFailed for the capture.
    """
    trace = _Trace(fspath(path), progress, place.member if place else "")
    report = ImportReport(Path(trace.path).name, KIND)
    selection = trace.select(roots=level == "root")
    if level not in ("deepest", "leaf", "root"):
        report.notes.append(
            f"level {level}: an execution trace does not show what launched work; the deepest operators are taken"
        )
    operators = Operators(libraries, names)
    first = NodeCalls(operators)
    for node, _position, chosen in trace.nodes(selection, 1):
        if chosen:
            first.step(node)
        else:
            first.inside(node)
    calls = NodeCalls(operators, first.allocations, first.inferred)
    session = imported_session(
        KIND,
        report.source,
        **rank_fields(trace.rank, trace.world_size, place),
        policies={"schema": trace.schema, "traced": trace.time, "rewrite": rewrite},
    )
    content = TracedContent(trace.path, trace.member)
    with ImportedSession(out, session, force=force) as capture:
        writer = GraphWriter(capture, report, calls, content, Portable() if rewrite in REWRITES else None, trace.groups)
        marks = _Marks(capture)
        for node, position, chosen in trace.nodes(selection, 2):
            if not chosen:
                calls.inside(node)
                writer.inside(node)
                continue
            scope = marks.enter(selection.path_of(position), node.thread)
            writer.write(calls.step(node), scope, selection.wrappers_of(position))
        marks.enter((), 0)
    report.problems += trace.problems + selection.problems + content.problems
    _finish(report, trace, selection, place)
    return report


def _finish(report: ImportReport, trace: _Trace, selection: ChosenNodes, place: RankTrace | None) -> None:
    report.counts = selection.counts()
    if trace.member and place is None:
        report.notes.append(others_note(trace.path, trace.member))
    if selection.dropped:
        report.notes.append(f"no work, left out: {most(selection.dropped)}")
    if selection.in_collectives:
        report.notes.append(f"inside collectives, as parts of them: {most(selection.in_collectives)}")
    if trace.version < (1, 1, 1):
        report.notes.append(
            f"schema {trace.schema} has no strides: they are computed where operators allow it, else assumed contiguous"
        )
    report.notes.append("tensors that no call produced have no content in the trace")


class _Trace:
    """The file, read as often as needed."""

    def __init__(self, path: str, progress: Progress | None, member: str) -> None:
        self.path = path
        self._progress = progress
        self.member = self._wanted_member = member
        self.schema = ""
        self.time: str | None = None
        self.version = (0, 0, 0)
        self.problems: list[str] = []
        self._broken: set[int] = set()  # entries that are not nodes, by their place in the file
        self._length = 0
        self._kept: list[TraceNode] | None = []  # all nodes, if there are few
        self.rank: int | None = None
        self.world_size = 1
        self.groups: dict[str, dict[str, Any]] = {}

    def _rows(self, number: int) -> Iterator[tuple[str, Any]]:
        with JsonStream.open(self.path, self._share(number), member=self._wanted_member) as stream:
            self.member = stream.member
            yield from stream.entries({"nodes"})
            if number == 0:
                self.problems = [*(str(problem) for problem in stream.problems), *self.problems]

    def _share(self, number: int) -> Progress | None:
        """The progress of one pass as a share of the whole."""
        progress = self._progress
        if progress is None:
            return None

        def share(done: int, length: int) -> None:
            self._length = length
            progress((number * length + done) // _PASSES, length)

        return share

    def select(self, *, roots: bool) -> ChosenNodes:
        """The first pass. Raises InvalidCapture if the file is not an execution trace."""
        skeleton = Skeleton(self.path)
        entry = -1
        for key, value in self._rows(0):
            entry += key == "nodes"
            if key == "schema":
                self.schema, self.version = str(value), schema_version(value, self.path)
            elif key == "time":
                self.time = str(value)
            elif key == "nodes":
                if not self.schema:
                    raise InvalidCapture(f"{self.path}: not an execution trace: its nodes come before a schema version")
                try:
                    node = node_of(value)
                except ValueError as error:
                    self._broken.add(entry)
                    self.problems.append(f"entry {entry} of the nodes was passed over: {error}")
                    continue
                skeleton.add(node)
                if self._kept is not None:
                    self._kept.append(node)
                    if len(self._kept) > _MOST_KEPT:
                        self._kept = None
                if self.rank is None:
                    self.rank = rank_said(node)
                if node.name == "## process_group:init ##":
                    self._groups(node)
        if not self.schema or not len(skeleton):
            raise InvalidCapture(
                f"{self.path}: not an execution trace: expected an object with a schema version and nodes"
                + "".join(f"; {problem}" for problem in self.problems[:1])
            )
        return skeleton.select(roots=roots)

    def _groups(self, node: TraceNode) -> None:
        try:
            groups = json.loads(node.inputs.values[0]) if node.inputs.values else []
        except (json.JSONDecodeError, TypeError):
            return
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, dict):
                self.groups[str(group.get("pg_name"))] = group
                if group.get("pg_desc") == "default_pg" and isinstance(group.get("group_size"), int):
                    self.world_size = max(1, group["group_size"])

    def nodes(self, selection: ChosenNodes, number: int) -> Iterator[tuple[TraceNode, int, bool]]:
        """The chosen nodes in the order in which they ran, with True; between them, with False, the nodes inside them
        that say something about memory or collectives."""
        found = self._wanted(selection, number)
        if selection.ordered:
            yield from found
        else:
            yield from _by_id(found, selection.before)

    def _wanted(self, selection: ChosenNodes, number: int) -> Iterator[tuple[TraceNode, int, bool]]:
        chosen = iter(selection.chosen)
        following = next(chosen, None)
        for position, node in enumerate(self._again(number)):
            if position == following:
                yield node(), position, True
                following = next(chosen, None)
            elif selection.inside(position) and (inner := node()).name.startswith(_TELLING):
                yield inner, position, False

    def _again(self, number: int) -> Iterator[Callable[[], TraceNode]]:
        """Every node once more, as a function that returns it."""
        if self._kept is not None:
            share = self._share(number)
            for position, node in enumerate(self._kept):
                if share is not None and not position % 1024:
                    share(self._length * position // len(self._kept), self._length)
                yield partial(_itself, node)
            if share is not None:
                share(self._length, self._length)
            return
        entry = -1
        for key, row in self._rows(number):
            entry += key == "nodes"
            if key == "nodes" and entry not in self._broken:
                yield partial(node_of, row)


def _itself(node: TraceNode) -> TraceNode:
    return node


def _by_id(
    found: Iterator[tuple[TraceNode, int, bool]], before: Mapping[int, int]
) -> Iterator[tuple[TraceNode, int, bool]]:
    """The chosen nodes by id, each after the nodes inside it and after those that ran before it."""
    groups: list[list[tuple[TraceNode, int, bool]]] = [[]]
    for each in found:
        groups[-1].append(each)
        if each[2]:
            groups.append([])

    def moment(group: list[tuple[TraceNode, int, bool]]) -> tuple[int, bool]:
        node, position, _chosen = group[-1]
        return before.get(position, node.id), position not in before

    for group in sorted(groups[:-1], key=moment):
        yield from group


_TELLING = ("aten::empty", "record_param_comms")


class _Marks:
    """Begins and ends scopes to match the marks that each record was inside."""

    def __init__(self, capture: ImportedSession) -> None:
        self._capture = capture
        self._path: MarkPath = ()
        self._scopes: list[int] = []

    def enter(self, path: MarkPath, thread: int) -> int:
        """Enter these marks; returns the scope."""
        if path != self._path:
            common = sum(1 for _pair in takewhile(lambda pair: pair[0] == pair[1], zip(path, self._path, strict=False)))
            for _position, name in reversed(self._path[common:]):
                self._capture.scope_end(name, Moment(thread=thread, scope=self._scopes.pop()))
            for _position, name in path[common:]:
                scope = self._capture.scope(self._scopes[-1] if self._scopes else 0, name)
                self._scopes.append(scope)
                self._capture.scope_begin(name, Moment(thread=thread, scope=scope))
            self._path = path
        return self._scopes[-1] if self._scopes else 0
