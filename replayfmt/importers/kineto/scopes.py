"""A profiler trace's user annotations as scopes: the scope of each event, on any thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from replayfmt.pytorch.iterations import Iteration, parse_iteration

from ..common.synthesis import ImportedSession
from .events import TraceEvents
from .tree import EventRole, EventTraits, Tree


class AnnotationScopes:
    """Scope ids in a capture that is being written, by annotation."""

    def __init__(
        self, events: TraceEvents, tree: Tree, traits: Sequence[EventTraits], session: ImportedSession
    ) -> None:
        self._events, self._session = events, session
        self._paths: dict[tuple[int, str], int] = {}
        ops = events.ops
        scopes = np.asarray([each.role is EventRole.annotation for each in traits], bool)
        annotations = tree.order[scopes[np.asarray(ops.kind, np.int64)[tree.order]]].tolist()
        self._timeline = _Timeline(events, annotations)
        self._ids: dict[int, int] = {}
        self._described: set[int] = set()  # annotations that describe a batch, and those inside of such
        self._iterations: dict[int, Iteration] = {}
        for index in sorted(annotations, key=lambda each: (ops.start[each], -ops.duration[each])):
            around = int(tree.scope[index])
            if around < 0:
                around = self._timeline.at(ops.start[index], ops.thread[index])
            parent, name = self._ids.get(around, 0), events.kinds[ops.kind[index]].name
            self._ids[index] = self._path(parent, name)
            iteration = parse_iteration(name)
            if around in self._described or iteration is not None:
                self._described.add(index)
            if around not in self._described and iteration is not None:
                self._iterations[index] = iteration

    @property
    def annotations(self) -> list[int]:
        """All annotations, in order of their beginning."""
        return list(self._ids)

    def __getitem__(self, annotation: int) -> int:
        return self._ids[annotation]

    def iteration(self, annotation: int) -> Iteration | None:
        """The step that an annotation describes; None inside another annotation that describes it: a step counts
        once."""
        return self._iterations.get(annotation)

    def at(self, around: int, start: int) -> int:
        """The scope id of what has the annotation `around` around it on its thread (-1: none) and begins at `start`."""
        if around < 0:
            around = self._timeline.at(start, -1)
        return self._ids.get(around, 0)

    def _path(self, parent: int, name: str) -> int:
        if (parent, name) not in self._paths:
            self._paths[parent, name] = self._session.scope(parent, name)
        return self._paths[parent, name]


class _Timeline:
    """The main thread's annotations by time: the scopes of work on other threads, such as the backward pass.

    The main thread is the one with the longest total of annotations.
    """

    def __init__(self, events: TraceEvents, annotations: Sequence[int]) -> None:
        ops = events.ops
        total: dict[int, int] = defaultdict(int)
        for index in annotations:
            total[ops.thread[index]] += ops.duration[index]
        self._thread = max(total, key=lambda thread: total[thread]) if total else -1
        edges: list[tuple[int, int, int, int]] = []
        for index in annotations:
            if ops.thread[index] == self._thread:
                start, duration = ops.start[index], max(1, ops.duration[index])  # it begins before it ends
                edges += [(start, 1, -duration, index), (start + duration, 0, -start, index)]
        edges.sort()
        self._times: list[int] = []
        self._innermost: list[int] = []
        stack: list[int] = []
        for time, begins, _tie, index in edges:
            if begins:
                stack.append(index)
            else:
                stack.remove(index)
            self._times.append(time)
            self._innermost.append(stack[-1] if stack else -1)
        self._array = np.asarray(self._times, np.int64)

    def at(self, time: int, thread: int) -> int:
        """The innermost annotation of the main thread around a time, -1: none. The main thread itself needs none."""
        if thread == self._thread or not self._times:
            return -1
        place = int(np.searchsorted(self._array, time, side="right")) - 1
        return self._innermost[place] if place >= 0 else -1
